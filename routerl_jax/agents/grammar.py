"""How an agent writes its actions and reads its observations: one interface, one class per published tag protocol."""

from __future__ import annotations

import abc
import dataclasses
import re
from collections.abc import Mapping, Sequence

from routerl_jax.core.registry import Registry
from routerl_jax.core.types import Action, Call, Passage

GRAMMARS: Registry[type[Grammar]] = Registry("grammar")

NO_TOOL = "none"  # the tool name of "I need no (further) retrieval"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grammar(abc.ABC):
    """A tag protocol.

    Attributes:
      tools: names of the knowledge bases that the policy may call.
    """

    tools: tuple[str, ...]

    # --- what the policy writes ---

    @property
    @abc.abstractmethod
    def stops(self) -> tuple[str, ...]:
        """Strings that end a turn; they belong to the turn."""

    @property
    @abc.abstractmethod
    def special_tokens(self) -> tuple[str, ...]:
        """The protocol's tags, for tokenizers that are trained for it."""

    @abc.abstractmethod
    def parse(self, text: str) -> Action:
        """The action in a turn's text (forced opening included); `invalid` with a reason if there is none."""

    @abc.abstractmethod
    def well_formed(self, text: str) -> bool:
        """True if the turn is written exactly as the protocol says, with nothing outside its tags."""

    @abc.abstractmethod
    def write_search(self, thought: str, query: str, tool: str) -> str:
        """A well-formed search turn, for demonstrations."""

    @abc.abstractmethod
    def write_answer(self, thought: str, answer: str) -> str:
        """A well-formed answer turn, for demonstrations."""

    @property
    @abc.abstractmethod
    def answer_opening(self) -> str:
        """What is fed to force a final answer."""

    # --- what the surroundings write ---

    @abc.abstractmethod
    def observation(self, call: Call, passages: Sequence[Passage]) -> str:
        """The text fed back after a search: these passages (a prefix of `call.passages`), or the call's error."""

    @abc.abstractmethod
    def reminder(self, error: str) -> str:
        """The text fed back after an invalid action."""

    @abc.abstractmethod
    def instructions(self) -> str:
        """How to work and what to write, for models that must be told."""


def _between(text: str, opening: str, closing: str) -> str | None:
    """The content of the last complete tag pair, stripped."""
    found = re.findall(re.escape(opening) + r"(.*?)" + re.escape(closing), text, re.DOTALL)
    return found[-1].strip() if found else None


@GRAMMARS.register("r1_router")
@dataclasses.dataclass(frozen=True, kw_only=True)
class R1RouterGrammar(Grammar):
    """R1-Router's tags (arXiv 2505.22095) in one growing conversation: a thought, a sub-question, and the name of the
    retriever that shall answer it, `none` when nothing more is needed; then the answer.

    Attributes:
      markers: prefix of each result line per knowledge base, as in the released prompts.
    """

    markers: Mapping[str, str] = dataclasses.field(
        default_factory=lambda: {"text": "ter", "text_image": "tir", "table": "tar"}, hash=False
    )

    @property
    def stops(self) -> tuple[str, ...]:
        return ("</ret>", "</answer>")

    @property
    def special_tokens(self) -> tuple[str, ...]:
        names = ("think", "sub-question", "ret", "answer", "information")
        return tuple(f"<{slash}{name}>" for name in names for slash in ("", "/"))

    def label(self, tool: str) -> str:
        """The retriever's name as the policy writes it: `text_image` is "text image retriever"."""
        return f"{tool.replace('_', ' ')} retriever"

    def parse(self, text: str) -> Action:
        thought = _between(text, "<think>", "</think>") or ""
        answer = _between(text, "<answer>", "</answer>")
        if answer is not None:
            return Action(kind="answer", answer=answer, thought=thought)
        query, name = _between(text, "<sub-question>", "</sub-question>"), _between(text, "<ret>", "</ret>")
        if name is None:
            return Action(kind="invalid", thought=thought, error="there is neither a retriever in <ret> nor an answer")
        if name.lower() == NO_TOOL:
            return Action(kind="search", tool=NO_TOOL, thought=thought)
        if not query:
            return Action(kind="invalid", thought=thought, error="the sub-question is missing or empty")
        by_label = {self.label(tool).lower(): tool for tool in self.tools}
        if name.lower() not in by_label:
            known = ", ".join(map(self.label, self.tools))
            return Action(
                kind="invalid", thought=thought, query=query, error=f"there is no {name!r}; there are: {known}"
            )
        return Action(kind="search", tool=by_label[name.lower()], query=query, thought=thought)

    def well_formed(self, text: str) -> bool:
        content = r"[^<>]*"
        think = rf"\s*<think>{content}</think>\s*"
        search = rf"<sub-question>{content}</sub-question>\s*<ret>{content}</ret>"
        return bool(re.fullmatch(rf"{think}({search}|<answer>{content}</answer>)\s*", text))

    def write_search(self, thought: str, query: str, tool: str) -> str:
        return f"<think>{thought}</think><sub-question>{query}</sub-question><ret>{self.label(tool)}</ret>"

    def write_answer(self, thought: str, answer: str) -> str:
        return f"<think>{thought}</think><answer>{answer}</answer>"

    @property
    def answer_opening(self) -> str:
        return "<answer>"

    def observation(self, call: Call, passages: Sequence[Passage]) -> str:
        if call.error is not None:
            body = f"The search failed: {call.error}\n"
        elif not passages:
            body = "Nothing was found.\n"
        else:
            marker = self.markers.get(call.tool, call.tool)
            body = "".join(f"{marker}-{i}: {_one_line(passage)}\n" for i, passage in enumerate(passages))
        return f"<information>\n{body}</information>"

    def reminder(self, error: str) -> str:
        return f"<information>\nThat was no valid step: {error}.\n</information>"

    def instructions(self) -> str:
        labels = "; ".join(self.label(tool) for tool in self.tools)
        return (
            "Answer the question step by step. In each step think inside <think> and </think>. If you still need a fact, "
            "write one simple sub-question inside <sub-question> and </sub-question>, then the retriever that should "
            f"answer it inside <ret> and </ret>. Retrievers: {labels}. What it finds comes back inside <information> and "
            "</information>. When you know enough, write the short final answer inside <answer> and </answer>."
        )


@GRAMMARS.register("r1_searcher")
@dataclasses.dataclass(frozen=True, kw_only=True)
class R1SearcherGrammar(Grammar):
    """R1-Searcher's tags (arXiv 2503.05592): queries between begin/end marks in running text, documents injected right
    after, reasoning until </think>, then the answer. The prompt ends with `<think>`. One knowledge base."""

    begin_query: str = "<|begin_of_query|>"
    end_query: str = "<|end_of_query|>"
    begin_documents: str = "<|begin_of_documents|>"
    end_documents: str = "<|end_of_documents|>"

    def __post_init__(self) -> None:
        if len(self.tools) != 1:
            raise ValueError(
                f"grammar 'r1_searcher' names no knowledge base, so it needs exactly one, got {self.tools}"
            )

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.end_query, "</answer>")

    @property
    def special_tokens(self) -> tuple[str, ...]:
        tags = (self.begin_query, self.end_query, self.begin_documents, self.end_documents)
        return (*tags, "<think>", "</think>", "<answer>", "</answer>")

    def parse(self, text: str) -> Action:
        answer = _between(text, "<answer>", "</answer>")
        if answer is not None:
            thought = text.split("<answer>")[0].replace("</think>", "").replace("<think>", "").strip()
            return Action(kind="answer", answer=answer, thought=thought)
        before, mark, rest = text.rpartition(self.begin_query)
        thought = before.replace("<think>", "").strip()
        if not mark or self.end_query not in rest:
            return Action(kind="invalid", thought=text.strip(), error="there is neither a complete query nor an answer")
        query = " ".join(rest.split(self.end_query)[0].replace('"', " ").split())
        if not query:
            return Action(kind="invalid", thought=thought, error="the query is empty")
        return Action(kind="search", tool=self.tools[0], query=query, thought=thought)

    def well_formed(self, text: str) -> bool:
        if self.begin_documents in text or self.end_documents in text:
            return False  # documents are written by the retriever alone
        content = r"(?:(?!<\||<answer>|</answer>|</think>|<think>).)*"
        query = rf"{re.escape(self.begin_query)}{content}{re.escape(self.end_query)}"
        return bool(
            re.fullmatch(rf"{content}{query}", text, re.DOTALL)
            or re.fullmatch(rf"{content}</think>\s*<answer>{content}</answer>\s*", text, re.DOTALL)
        )

    def write_search(self, thought: str, query: str, tool: str) -> str:
        return f"{thought} {self.begin_query}{query}{self.end_query}"

    def write_answer(self, thought: str, answer: str) -> str:
        return f"{thought}</think>\n<answer>{answer}</answer>"

    @property
    def answer_opening(self) -> str:
        return "</think>\n<answer>"

    def observation(self, call: Call, passages: Sequence[Passage]) -> str:
        if call.error is not None:
            body = f"(1)The search failed: {call.error}\n"
        elif not passages:
            body = "(1)Nothing was found.\n"
        else:
            body = "".join(
                f"({i})Title: {p.title} Text: {' '.join(p.text.split())}\n" for i, p in enumerate(passages, 1)
            )
        return f"\n\n{self.begin_documents}\n{body}{self.end_documents}\n\n"

    def reminder(self, error: str) -> str:
        return f"\n\n{self.begin_documents}\n(1)That was no valid step: {error}.\n{self.end_documents}\n\n"

    def instructions(self) -> str:
        return (
            "The Assistant answers the User's question. It reasons first and then gives the answer, as <think> reasoning "
            "</think> <answer> short final answer </answer>. Whenever it lacks a fact while reasoning it searches by "
            f"writing {self.begin_query} keywords {self.end_query}, one fact per query; the documents found follow between "
            f"{self.begin_documents} and {self.end_documents}, and it goes on reasoning."
        )


def _one_line(passage: Passage) -> str:
    """Title and text, the title left out where the text holds it."""
    text = " ".join(passage.text.split())
    return text if passage.title in text else f"{passage.title}: {text}"
