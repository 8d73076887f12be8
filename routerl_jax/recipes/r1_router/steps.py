"""The prompts and answers of R1-Router's three kinds of chats (arXiv 2505.22095, equations 3 to 8), each with one turn.

A route chat asks for the next sub-question and the retriever for it. An answer chat gives documents. The final chat gives only
the sub-questions and their answers. Training and evaluation use the same prompts, in our own words.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

from routerl_jax.agents.grammar import NO_TOOL, RouteChoices, between
from routerl_jax.agents.tool_calls import ReadCall, ToolCalls, thought_of
from routerl_jax.core.text import split_thoughts
from routerl_jax.core.tokenizer import Tokenizer
from routerl_jax.core.types import Action, Message, ToolSchema
from routerl_jax.data.trajectories import Document, GoldenStep, label_of, tool_of
from routerl_jax.recipes.r1_router.grammar import retriever_choices

History = Sequence[tuple[str, str]]  # sub-questions with their answers

_TAGS = ("think", "sub-question", "ret", "answer")
_CONTENT = rf"((?:(?!</?(?:{'|'.join(_TAGS)})>).)*)"
_ROUTE = re.compile(
    rf"\s*<think>{_CONTENT}</think>\s*<sub-question>{_CONTENT}</sub-question>\s*<ret>{_CONTENT}</ret>\s*", re.DOTALL
)
_ANSWER = re.compile(rf"\s*<think>{_CONTENT}</think>\s*<answer>{_CONTENT}</answer>\s*", re.DOTALL)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepPrompt:
    """The prompt of a chat: the instructions (for pretrained models), the request, the string that ends the policy's turn, and
    the kind of chat (`asked`: route, answer or final)."""

    system: str
    user: str
    stop: str
    asked: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepProtocol:
    """The tags `<think>`, `<sub-question>`, `<ret>` and `<answer>`, and the prompts that ask for them.

    Attributes:
      tools: names of the knowledge bases; `text_image` is written "text image retriever".
      holds: the content of each knowledge base in words, by its name, for the instructions.
    """

    inside: ClassVar[str] = " inside <think> and </think>"  # where the instructions say that thoughts stand

    tools: tuple[str, ...]
    holds: Mapping[str, str] = dataclasses.field(
        default_factory=lambda: {
            "text": "facts that are told in words, about people, places, works and events",
            "text_image": "what is seen in a picture, and descriptions of similar pictures",
            "table": "figures, dates, ranks and results that stand in tables",
        },
        hash=False,
    )

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """The tags, for tokenizers that are trained for them."""
        return tuple(f"<{slash}{name}>" for name in _TAGS for slash in ("", "/"))

    def label(self, tool: str) -> str:
        """A knowledge base's name as the policy and golden trajectories write it."""
        return label_of(tool)

    @property
    def choices(self) -> RouteChoices | None:
        """How a route names its knowledge base. After the sub-question `none` there is no choice."""
        return retriever_choices(self.tools, lambda text: self.parse_route(text).kind == "search")

    # --- whether the policy calls functions (`StepCalls` does) ---

    @property
    def functions(self) -> tuple[dict[str, Any], ...]:
        """JSON schemas of the functions that route chats show; () for tags."""
        return ()

    def of(self, tokenizer: Tokenizer) -> Self:
        """The protocol in this model's form. Raises ValueError if the model has none."""
        return self

    def with_schemas(self, schemas: Mapping[str, ToolSchema]) -> Self:
        """The protocol with these functions, by knowledge base."""
        return self

    # --- what is said to the policy ---

    def route(self, question: str, history: History) -> StepPrompt:
        """Asks for the next sub-question and its retriever (equations 3 and 4)."""
        return StepPrompt(
            system=self._route_system(),
            user=f"{_so_far(question, history)}Next sub-question:\n",
            stop="</ret>",
            asked="route",
        )

    def answer(self, query: str, documents: Sequence[Document], failure: str = "") -> StepPrompt:
        """Asks for the answer to a sub-question from documents (equation 6). `failure` says why there are none."""
        user = f"{_document_lines(documents, failure)}Question: {query}\nAnswer:\n"
        return StepPrompt(system=_answer_system(self.inside), user=user, stop="</answer>", asked="answer")

    def direct(self, question: str, documents: Sequence[Document], failure: str = "") -> StepPrompt:
        """Asks for the answer to the question from documents, for vanilla RAG; in the words of `final`."""
        user = f"{_document_lines(documents, failure)}Question: {question}\nFinal answer:\n"
        return StepPrompt(system=_direct_system(self.inside), user=user, stop="</answer>", asked="final")

    def final(self, question: str, history: History) -> StepPrompt:
        """Asks for the answer to the question (equation 8)."""
        user = f"{_so_far(question, history)}Final answer:\n"
        return StepPrompt(system=_final_system(self.inside), user=user, stop="</answer>", asked="final")

    def golden(self, question: str, step: GoldenStep) -> StepPrompt:
        """The chat of a golden step, in the same words as any other chat."""
        if step.kind == "route":
            return self.route(question, step.history)
        if step.kind == "answer":
            return self.answer(step.query, step.documents)
        return self.final(question, step.history)

    def again(self, prompt: StepPrompt, error: str) -> StepPrompt:
        """The same chat after an attempt that could not be read."""
        user = f"{prompt.user}An attempt before this one could not be used: {error}. Keep to the form.\n"
        return dataclasses.replace(prompt, user=user)

    # --- what the policy writes ---

    def write_route(self, thought: str, query: str, tool: str) -> str:
        """A well-formed route, for demonstrations."""
        return f"<think>{thought}</think>\n<sub-question>{query}</sub-question>\n<ret>{self.label(tool)}</ret>"

    def route_opening(self, query: str = "") -> str:
        """The beginning of a well-formed route: up to its sub-question, or if that is given, up to its retriever."""
        opening = "<think></think>\n<sub-question>"
        return f"{opening}{query}</sub-question>\n<ret>" if query else opening

    def write_answer(self, thought: str, answer: str) -> str:
        """A well-formed answer, for demonstrations."""
        return f"<think>{thought}</think>\n<answer>{answer}</answer>"

    def write_golden(self, step: GoldenStep) -> str:
        """The right turn for a golden step, without a thought, because that is not known."""
        if step.kind == "route":
            return self.write_route("", step.query, self.tool_of(step.retrievers[0]))
        return self.write_answer("", step.answers[0])

    def stops(self, prompt: StepPrompt) -> tuple[str, ...]:
        """The strings that end the turn of a chat."""
        return (prompt.stop,)

    def read(self, prompt: StepPrompt, text: str, forced: bool) -> tuple[Action, bool]:
        """The action of a chat's turn, and whether the turn has the right form.

        Args:
          forced: the agent began the turn, so the policy could not write a thought before it.
        """
        if prompt.asked == "route":
            return self.parse_route(text), well_formed_route(text)
        return self.parse_answer(text), well_formed_answer(f"<think></think>{text}" if forced else text)

    def parse_route(self, text: str) -> Action:
        """A search (with tool `none` if nothing more is needed), or `invalid` with the reason."""
        thought, said = split_thoughts(text)
        query, name = between(said, "<sub-question>", "</sub-question>"), between(said, "<ret>", "</ret>")
        if not query or not name:
            tag = "ret" if query else "sub-question"
            return Action(kind="invalid", thought=thought, error=f"there is nothing in <{tag}> and </{tag}>")
        tool = self.tool_of(name)
        if tool not in (*self.tools, NO_TOOL):
            labels = ", ".join(map(self.label, (*self.tools, NO_TOOL)))
            return Action(
                kind="invalid", thought=thought, query=query, error=f"there is no {name!r}; there are: {labels}"
            )
        if (query.lower() == NO_TOOL) != (tool == NO_TOOL):
            error = "the sub-question and the retriever must both be none, or neither"
            return Action(kind="invalid", thought=thought, query=query, error=error)
        return Action(kind="search", tool=tool, query=query, thought=thought)

    def parse_answer(self, text: str) -> Action:
        """An answer, or `invalid` with the reason."""
        thought, said = split_thoughts(text)
        answer = between(said, "<answer>", "</answer>")
        if not answer:
            return Action(kind="invalid", thought=thought, error="there is nothing in <answer> and </answer>")
        return Action(kind="answer", answer=answer, thought=thought)

    def tool_of(self, label: str) -> str:
        """The knowledge base that a written name means. An unknown name is returned in lower case."""
        return tool_of(label, self.tools)

    def opening(self, prompt: StepPrompt, tokenizer: Tokenizer, *, instruct: bool, marks: str = "") -> list[int]:
        """The token ids of a chat. `marks` are the marks of the images, which stand before the request.

        With `instruct`, a system and a user message, or plain text for models without a chat template. Without, the request
        alone.
        """
        user = marks + tokenizer.plain(prompt.user, keep=self.special_tokens)
        if not instruct:
            return tokenizer.encode_prompt(user)
        if not tokenizer.instructs_in_chats:
            return tokenizer.encode_prompt(f"{prompt.system}\n\nUser: {user}Assistant: ")
        return tokenizer.chat(
            [Message(role="system", content=prompt.system), Message(role="user", content=user.rstrip("\n"))]
        )

    def _step_task(self, kind: str, name: Callable[[str], str]) -> str:
        """The explanation of a route, and the name and content of each knowledge base (in the text, a `kind`)."""
        named = [f"- {name(tool)}: {self.holds.get(tool, f'whatever is kept under {tool!r}')}\n" for tool in self.tools]
        return (
            "A question is to be answered in small steps. You are shown the question and the sub-questions that have been "
            "answered so far. Choose the step that comes next: one sub-question that asks for a single fact, that can be "
            f"understood by itself and that no answer above settles already, and the one {kind} that is most likely to "
            f"know. The {kind}s:\n{''.join(named)}"
        )

    def _route_system(self) -> str:
        return (
            f"{self._step_task('retriever', self.label)}"
            "First weigh inside <think> and </think> what is known and what is missing. Then write the sub-question inside "
            "<sub-question> and </sub-question>, and the name of the retriever inside <ret> and </ret>. If the answers above "
            "are enough for the question, write none in both. Write nothing else. For example:\n"
            + self.write_route("The river is known, its length is not.", "How long is the river Volta?", self.tools[0])
        )


_SHORT = "Then write the answer to the question alone, in as few words as it takes, inside <answer> and </answer>. "
_HELPLESS = "If nothing of it helps, answer with what you know. Write nothing else."


def _findings(inside: str) -> str:
    return (
        f"You are given what a search has found, and a question. Think{inside} about which of the findings bear on it; some "
        "may not. "
    )


def _answer_system(inside: str) -> str:
    return f"{_findings(inside)}Then answer in one sentence inside <answer> and </answer>. {_HELPLESS}"


def _direct_system(inside: str) -> str:
    return f"{_findings(inside)}{_SHORT}{_HELPLESS}"


def _final_system(inside: str) -> str:
    return (
        "You are given a question, and sub-questions with their answers that were worked out for it. Put them together"
        f"{inside}. {_SHORT}Write nothing else."
    )


def _document_lines(documents: Sequence[Document], failure: str) -> str:
    lines = [f"[{d.retriever} {i}] {' '.join(d.text.split())}\n" for i, d in enumerate(documents, 1)]
    return "".join(lines) or f"{failure or 'Nothing was found.'}\n"


def _so_far(question: str, history: History) -> str:
    steps = [f"Sub-question {i}: {query}\nAnswer {i}: {answer}\n" for i, (query, answer) in enumerate(history, 1)]
    return f"Question: {question}\n{''.join(steps)}"


def well_formed_route(text: str) -> bool:
    """r_format of a route (equation 18): the three fields in their tags and nothing else. Only the thought may be empty."""
    match = _ROUTE.fullmatch(text)
    return bool(match and match[2].strip() and match[3].strip())


def well_formed_answer(text: str) -> bool:
    """r_format of an answer (equation 19): the thought and the answer in their tags and nothing else."""
    match = _ANSWER.fullmatch(text)
    return bool(match and match[2].strip())


# --- the same steps as tool calls ---

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
