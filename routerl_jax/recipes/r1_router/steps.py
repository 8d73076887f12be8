"""The prompts and answers of R1-Router's three kinds of chats (arXiv 2505.22095, equations 3 to 8), each with one turn.

A route chat asks for the next sub-question and the retriever for it. An answer chat gives documents. The final chat gives only
the sub-questions and their answers. Training and evaluation use the same prompts, in our own words.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from routerl_jax.agents.grammar import NO_TOOL, Grammar, RouteChoices, between, inert, one_line, opening_ids
from routerl_jax.agents.tool_calls import ReadCall, ToolCalls, thought_of
from routerl_jax.core.text import split_thoughts
from routerl_jax.core.tokenizer import Tokenizer
from routerl_jax.core.types import Action, ToolSchema
from routerl_jax.data.trajectories import Document, GoldenStep, label_of, tool_of
from routerl_jax.recipes.r1_router.grammar import R1RouterGrammar

History = Sequence[tuple[str, str]]  # sub-questions with their answers

# --- what the policy writes: routes and answers, in tags or as tool calls ---

_TAGS = ("think", "sub-question", "ret", "answer")
_CONTENT = rf"((?:(?!</?(?:{'|'.join(_TAGS)})>).)*)"
_ROUTE = re.compile(
    rf"\s*<think>{_CONTENT}</think>\s*<sub-question>{_CONTENT}</sub-question>\s*<ret>{_CONTENT}</ret>\s*", re.DOTALL
)
_ANSWER = re.compile(rf"\s*<think>{_CONTENT}</think>\s*<answer>{_CONTENT}</answer>\s*", re.DOTALL)
_NO_ANSWER = "there is nothing in <answer> and </answer>"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouteTags(R1RouterGrammar):
    """The turn of a route chat: thoughts, a sub-question and its retriever; `none` in both if nothing more is needed."""

    @property
    def stops(self) -> tuple[str, ...]:
        return ("</ret>",)

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """The tags of all chats."""
        return tuple(f"<{slash}{name}>" for name in _TAGS for slash in ("", "/"))

    def parse(self, text: str) -> Action:
        """A search (with tool `none` if nothing more is needed), or `invalid` with the reason."""
        thought, said = split_thoughts(text)
        query, name = between(said, "<sub-question>", "</sub-question>"), between(said, "<ret>", "</ret>")
        if not query or not name:
            tag = "ret" if query else "sub-question"
            return Action(kind="invalid", thought=thought, error=f"there is nothing in <{tag}> and </{tag}>")
        tool = tool_of(name, self.tools)
        if tool not in (*self.tools, NO_TOOL):
            labels = ", ".join(map(self.label, (*self.tools, NO_TOOL)))
            error = f"there is no {inert(name, self.special_tokens)!r}; there are: {labels}"
            return Action(kind="invalid", thought=thought, query=query, error=error)
        if (query.lower() == NO_TOOL) != (tool == NO_TOOL):
            error = "the sub-question and the retriever must both be none, or neither"
            return Action(kind="invalid", thought=thought, query=query, error=error)
        return Action(kind="search", tool=tool, query=query, thought=thought)

    def well_formed(self, text: str) -> bool:
        """r_format of a route (equation 18): the three fields in their tags and nothing else. Only the thought may be empty."""
        match = _ROUTE.fullmatch(text)
        return bool(match and match[2].strip() and match[3].strip())

    def write_search(self, thought: str, query: str, tool: str) -> str:
        return f"<think>{thought}</think>\n<sub-question>{query}</sub-question>\n<ret>{self.label(tool)}</ret>"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerTags(R1RouterGrammar):
    """The turn of an answer chat or the final chat: thoughts, and the answer."""

    @property
    def stops(self) -> tuple[str, ...]:
        return ("</answer>",)

    def parse(self, text: str) -> Action:
        """An answer, or `invalid` with the reason."""
        thought, said = split_thoughts(text)
        if not (answer := between(said, "<answer>", "</answer>")):
            return Action(kind="invalid", thought=thought, error=_NO_ANSWER)
        return Action(kind="answer", answer=answer, thought=thought)

    def well_formed(self, text: str) -> bool:
        """r_format of an answer (equation 19): the thought and the answer in their tags and nothing else."""
        match = _ANSWER.fullmatch(text)
        return bool(match and match[2].strip())

    def write_answer(self, thought: str, answer: str) -> str:
        return f"<think>{thought}</think>\n<answer>{answer}</answer>"


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

    def write_search(self, thought: str, query: str, tool: str) -> str:
        if tool not in (*self.tools, NO_TOOL):
            raise ValueError(
                f"a golden step asks the retriever {tool!r}, which is no function; config.knowledge has "
                f"{', '.join(self.tools)}"
            )
        return super().write_search(thought, query, tool)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerCalls(ToolCalls):
    """The turn of an answer chat or the final chat, which show no functions: thoughts if there are any, and the answer."""

    def parse(self, text: str) -> Action:
        action = super().parse(text)
        if action.kind == "answer" and action.answer:
            return action
        error = action.error if action.kind != "answer" and action.error else _NO_ANSWER
        return Action(kind="invalid", thought=action.thought, error=error)


# --- what is said to the policy ---


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepPrompt:
    """The prompt of a chat: the instructions (for pretrained models), the request, how the policy's turn is written, and the
    kind of chat (`asked`: route, answer or final)."""

    system: str
    user: str
    form: Grammar
    asked: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepProtocol:
    """The prompts of the three kinds of chats, and how the policy writes its turns in them (`routes`, `answers`).

    Attributes:
      tools: names of the knowledge bases; `text_image` is written "text image retriever".
      holds: the content of each knowledge base in words, by its name, for the instructions.
      raw_results: see `Grammar`; for tags alone.
      calls: how a route is written if the policy calls functions; None: in the tags. With functions, every chat is in the
        model's template, and a turn ends with the template's own token. Only route chats show functions.
    """

    tools: tuple[str, ...]
    holds: Mapping[str, str] = dataclasses.field(
        default_factory=lambda: {
            "text": "facts that are told in words, about people, places, works and events",
            "text_image": "what is seen in a picture, and descriptions of similar pictures",
            "table": "figures, dates, ranks and results that stand in tables",
        },
        hash=False,
    )
    raw_results: bool = False
    calls: RouteCalls | None = None

    @property
    def routes(self) -> Grammar:
        """How a route is written."""
        return self.calls or RouteTags(tools=self.tools, raw_results=self.raw_results)

    @property
    def answers(self) -> Grammar:
        """How an answer is written."""
        return AnswerCalls(tools=(), form=self.calls.form) if self.calls else AnswerTags(tools=self.tools)

    def label(self, tool: str) -> str:
        """A knowledge base's name as golden trajectories, and the policy in tags, write it."""
        return label_of(tool)

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """The tags, for tokenizers that are trained for them."""
        return self.routes.special_tokens

    @property
    def foreign(self) -> tuple[str, ...]:
        """Tags that are broken up in documents, and in errors of tools (`Grammar.foreign`)."""
        return self.routes.foreign

    @property
    def choices(self) -> RouteChoices | None:
        """How a route names its knowledge base; None: attempts can't be forked within a call. After the sub-question `none`
        there is no choice."""
        return self.routes.choices

    @property
    def functions(self) -> tuple[dict[str, Any], ...]:
        """JSON schemas of the functions that route chats show; () for tags."""
        return self.routes.functions

    def of(self, tokenizer: Tokenizer) -> StepProtocol:
        """The protocol in this model's form. Raises ValueError if the model has none."""
        return dataclasses.replace(self, calls=self.calls.of(tokenizer)) if self.calls else self

    def with_schemas(self, schemas: Mapping[str, ToolSchema]) -> StepProtocol:
        """The protocol with these functions, by knowledge base."""
        return dataclasses.replace(self, calls=self.calls.with_schemas(schemas)) if self.calls else self

    def unending(self) -> StepProtocol:
        """The protocol without the function that says that nothing more is needed."""
        return dataclasses.replace(self, calls=dataclasses.replace(self.calls, ends=False)) if self.calls else self

    def route(self, question: str, history: History) -> StepPrompt:
        """Asks for the next sub-question and its retriever (equations 3 and 4)."""
        user = f"{_so_far(question, history)}Next sub-question:\n"
        system = self._call_task() if self.calls else self._tag_task()
        return StepPrompt(system=system, user=user, form=self.routes, asked="route")

    def answer(self, query: str, documents: Sequence[Document], failure: str = "") -> StepPrompt:
        """Asks for the answer to a sub-question from documents (equation 6). `failure` says why there are none."""
        user = f"{self._document_lines(documents, failure)}Question: {query}\nAnswer:\n"
        system = f"{self._findings}Then answer in one sentence inside <answer> and </answer>. {_HELPLESS}"
        return StepPrompt(system=system, user=user, form=self.answers, asked="answer")

    def direct(self, question: str, documents: Sequence[Document], failure: str = "") -> StepPrompt:
        """Asks for the answer to the question from documents, for vanilla RAG; in the words of `final`."""
        user = f"{self._document_lines(documents, failure)}Question: {question}\nFinal answer:\n"
        system = f"{self._findings}{_SHORT}{_HELPLESS}"
        return StepPrompt(system=system, user=user, form=self.answers, asked="final")

    def final(self, question: str, history: History) -> StepPrompt:
        """Asks for the answer to the question (equation 8)."""
        user = f"{_so_far(question, history)}Final answer:\n"
        system = (
            "You are given a question, and sub-questions with their answers that were worked out for it. Put them together"
            f"{self._inside}. {_SHORT}Write nothing else."
        )
        return StepPrompt(system=system, user=user, form=self.answers, asked="final")

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

    def write_golden(self, step: GoldenStep) -> str:
        """The right turn for a golden step, without a thought, because that is not known."""
        if step.kind == "route":
            return self.routes.write_search("", step.query, tool_of(step.retrievers[0], self.tools))
        return self.answers.write_answer("", step.answers[0])

    def opening(self, prompt: StepPrompt, tokenizer: Tokenizer, *, instruct: bool, marks: str = "") -> list[int]:
        """The token ids of a chat (`opening_ids`). `marks` are the marks of the images, which stand before the request.

        Without `instruct` it is the request alone.
        """
        self.of(tokenizer)  # refuses a model without such a form
        user = marks + tokenizer.plain(prompt.user, keep=self.special_tokens)
        functions = prompt.form.functions if self.calls else None
        return opening_ids(tokenizer, user.rstrip("\n"), prompt.system if instruct else None, functions)

    def _step_task(self, kind: str, name: Callable[[str], str]) -> str:
        """The explanation of a route, and the name and content of each knowledge base (in the text, a `kind`)."""
        named = [f"- {name(tool)}: {self.holds.get(tool, f'whatever is kept under {tool!r}')}\n" for tool in self.tools]
        return (
            "A question is to be answered in small steps. You are shown the question and the sub-questions that have been "
            "answered so far. Choose the step that comes next: one sub-question that asks for a single fact, that can be "
            f"understood by itself and that no answer above settles already, and the one {kind} that is most likely to "
            f"know. The {kind}s:\n{''.join(named)}"
        )

    def _tag_task(self) -> str:
        return (
            f"{self._step_task('retriever', self.label)}"
            "First weigh inside <think> and </think> what is known and what is missing. Then write the sub-question inside "
            "<sub-question> and </sub-question>, and the name of the retriever inside <ret> and </ret>. If the answers above "
            "are enough for the question, write none in both. Write nothing else. For example:\n"
            + self.routes.write_search(
                "The river is known, its length is not.", "How long is the river Volta?", self.tools[0]
            )
        )

    def _call_task(self) -> str:
        schemas = dict(zip((*self.tools, NO_TOOL), self.functions))
        ends = self.calls is not None and self.calls.ends
        return (
            f"{self._step_task('function', lambda tool: schemas[tool]['function']['name'])}"
            "First weigh what is known and what is missing. Then call that function, with the sub-question as its query."
            + (f" If the answers above are enough for the question, call {_ENOUGH.name}." if ends else "")
        )

    def _document_lines(self, documents: Sequence[Document], failure: str) -> str:
        tags = self.foreign
        lines = [f"[{d.retriever} {i}] {one_line(d.text, tags)}\n" for i, d in enumerate(documents, 1)]
        return "".join(lines) or f"{inert(failure, tags) or 'Nothing was found.'}\n"

    @property
    def _inside(self) -> str:
        """Where the instructions say that thoughts stand."""
        return "" if self.calls else " inside <think> and </think>"

    @property
    def _findings(self) -> str:
        return (
            f"You are given what a search has found, and a question. Think{self._inside} about which of the findings bear on "
            "it; some may not. "
        )


_SHORT = "Then write the answer to the question alone, in as few words as it takes, inside <answer> and </answer>. "
_HELPLESS = "If nothing of it helps, answer with what you know. Write nothing else."


def _so_far(question: str, history: History) -> str:
    steps = [f"Sub-question {i}: {query}\nAnswer {i}: {answer}\n" for i, (query, answer) in enumerate(history, 1)]
    return f"Question: {question}\n{''.join(steps)}"
