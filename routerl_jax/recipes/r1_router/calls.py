"""R1-Router's steps as tool calls: a route calls a retriever's function with the sub-question, or says that none is needed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from routerl_jax.agents.grammar import NO_TOOL
from routerl_jax.agents.tool_calls import ToolCalls, thought_of
from routerl_jax.agents.tool_forms import ReadCall
from routerl_jax.core.tokenizer import Tokenizer
from routerl_jax.core.types import Action, Message, ToolSchema
from routerl_jax.recipes.r1_router.steps import StepPrompt, StepProtocol

_ENOUGH = ToolSchema(
    name="enough", description="Says that the answers above are enough, and that nothing more is looked up.", query=""
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouteCalls(ToolCalls):
    """The turn of a route chat: thoughts, and a call of a function that searches, or of `enough`.

    Attributes:
      ends: whether there is the function `enough`.
    """

    ends: bool = True

    @property
    def _all_schemas(self) -> dict[str, ToolSchema]:
        return {**super()._all_schemas, **({NO_TOOL: _ENOUGH} if self.ends else {})}

    def parse(self, text: str) -> Action:
        action = super().parse(text)
        return self._words(text) if action.kind == "answer" else action

    def _words(self, text: str) -> Action:
        return Action(kind="invalid", thought=thought_of(text), error="there is no tool call; call one function")

    def _action(self, call: ReadCall, thought: str) -> Action:
        action = super()._action(call, thought)
        if action.kind == "search" and action.tool == NO_TOOL:
            return dataclasses.replace(action, query=NO_TOOL)
        if action.query.lower() == NO_TOOL:
            error = f"the sub-question is none; call {_ENOUGH.name} if nothing more is needed"
            return dataclasses.replace(action, kind="invalid", error=error)
        return action


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepCalls(StepProtocol):
    """The prompts of `StepProtocol` for a policy that calls functions. Every chat is in the model's template, and a turn ends
    with the template's own token. Only route chats show functions. Answers stand in `<answer>`, and may follow thoughts.

    Attributes:
      routes: how a route is written.
    """

    inside: ClassVar[str] = ""

    routes: RouteCalls

    @property
    def special_tokens(self) -> tuple[str, ...]:
        return self.routes.special_tokens

    @property
    def choices(self) -> None:
        """None: attempts can't be forked within a call."""
        return None

    @property
    def functions(self) -> tuple[dict[str, Any], ...]:
        return self.routes.functions

    def of(self, tokenizer: Tokenizer) -> StepCalls:
        routes = self.routes.of(tokenizer)
        return self if routes is self.routes else dataclasses.replace(self, routes=routes)

    def with_schemas(self, schemas: Mapping[str, ToolSchema]) -> StepCalls:
        return dataclasses.replace(self, routes=self.routes.with_schemas(schemas))

    def unending(self) -> StepCalls:
        """The protocol without the function that says that nothing more is needed."""
        return dataclasses.replace(self, routes=dataclasses.replace(self.routes, ends=False))

    def stops(self, prompt: StepPrompt) -> tuple[str, ...]:
        return ()

    def opening(self, prompt: StepPrompt, tokenizer: Tokenizer, *, instruct: bool, marks: str = "") -> list[int]:
        self.of(tokenizer)  # refuses a model without such a form
        user = marks + tokenizer.plain(prompt.user, keep=self.special_tokens)
        system = [Message(role="system", content=prompt.system)] if instruct else []
        request = Message(role="user", content=user.rstrip("\n"))
        return tokenizer.chat([*system, request], tools=self.functions if prompt.asked == "route" else ())

    def write_route(self, thought: str, query: str, tool: str) -> str:
        if tool not in (*self.tools, NO_TOOL):
            raise ValueError(
                f"a golden step asks the retriever {tool!r}, which is no function; config.knowledge has "
                f"{', '.join(self.tools)}"
            )
        return self.routes.write_search(thought, query, tool)

    def write_answer(self, thought: str, answer: str) -> str:
        return self.routes.write_answer(thought, answer)

    def read(self, prompt: StepPrompt, text: str, forced: bool) -> tuple[Action, bool]:
        if prompt.asked == "route":
            return self.parse_route(text), self.routes.well_formed(text)
        action = self.parse_answer(text)
        return action, action.kind == "answer" and self._answers.well_formed(text)

    def parse_route(self, text: str) -> Action:
        return self.routes.parse(text)

    def parse_answer(self, text: str) -> Action:
        action = self._answers.parse(text)
        if action.kind == "answer" and action.answer:
            return action
        error = "there is nothing in <answer> and </answer>"
        if action.kind != "answer" and action.error:
            error = action.error
        return Action(kind="invalid", thought=action.thought, error=error)

    @property
    def _answers(self) -> ToolCalls:
        """How answers are written. They come without functions."""
        return ToolCalls(tools=(), form=self.routes.form)

    def _route_system(self) -> str:
        schemas = dict(zip((*self.tools, NO_TOOL), self.functions))
        return (
            f"{self._step_task('function', lambda tool: schemas[tool]['function']['name'])}"
            "First weigh what is known and what is missing. Then call that function, with the sub-question as its query."
            + (f" If the answers above are enough for the question, call {_ENOUGH.name}." if self.routes.ends else "")
        )
