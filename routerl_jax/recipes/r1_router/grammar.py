"""R1-Router's tags as a grammar for one growing conversation (arXiv 2505.22095)."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

from routerl_jax.agents.grammar import NO_TOOL, Grammar, RouteChoices, between, inert, unshown
from routerl_jax.core.text import one_line, split_thoughts
from routerl_jax.core.types import Action, Call, Passage
from routerl_jax.data.trajectories import label_of, tool_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class R1RouterGrammar(Grammar):
    """R1-Router's tags (arXiv 2505.22095) in one growing conversation: a thought, a sub-question, and the name of the retriever
    for it, which is `none` if nothing more is needed. The answer comes last.

    Attributes:
      markers: prefix of each result line, per knowledge base, as in the released prompts.
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
        return label_of(tool)

    @property
    def choices(self) -> RouteChoices:
        """The retriever. The choice is open if the text is a search, whatever name follows."""
        names = {tool: f"{label_of(tool)}</ret>" for tool in self.tools}
        some = next(iter(names.values()))
        return RouteChoices(
            opening="<ret>", stop="</ret>", names=names, open=lambda text: self.parse(text + some).kind == "search"
        )

    def parse(self, text: str) -> Action:
        thought, said = split_thoughts(text)
        answer = between(said, "<answer>", "</answer>")
        if answer is not None:
            return Action(kind="answer", answer=answer, thought=thought)
        query, name = between(said, "<sub-question>", "</sub-question>"), between(said, "<ret>", "</ret>")
        if name is None:
            return Action(kind="invalid", thought=thought, error="there is neither a retriever in <ret> nor an answer")
        tool = tool_of(name, self.tools)
        if tool == NO_TOOL:
            return Action(kind="search", tool=NO_TOOL, thought=thought)
        if not query:
            return Action(kind="invalid", thought=thought, error="the sub-question is missing or empty")
        if query.lower() == NO_TOOL:
            return Action(kind="invalid", thought=thought, error="the sub-question is none, and the retriever is not")
        if tool not in self.tools:
            labels = ", ".join(map(self.label, self.tools))
            error = f"there is no {inert(name, self.special_tokens)!r}; there are: {labels}"
            return Action(kind="invalid", thought=thought, query=query, error=error)
        return Action(kind="search", tool=tool, query=query, thought=thought)

    def well_formed(self, text: str) -> bool:
        """True for a thought and a search or an answer in their tags, with no tags inside (after equations 18 and 19)."""
        content = r"[^<>]*"
        think = rf"\s*<think>{content}</think>\s*"
        search = rf"<sub-question>{content}</sub-question>\s*<ret>{content}</ret>"
        return bool(re.fullmatch(rf"{think}({search}|<answer>{content}</answer>)\s*", text))

    def write_search(self, thought: str, query: str, tool: str) -> str:
        return f"<think>{thought}</think><sub-question>{query}</sub-question><ret>{self.label(tool)}</ret>"

    def write_answer(self, thought: str, answer: str) -> str:
        return f"<think>{thought}</think><answer>{answer}</answer>"

    def observation(self, call: Call, passages: Sequence[Passage]) -> str:
        marker = self.markers.get(call.tool, call.tool)
        lines = [f"{marker}-{i}: {inert(one_line(passage), self.foreign)}" for i, passage in enumerate(passages)]
        body = unshown(call, passages, self.foreign) or "\n".join(lines)
        return f"<information>\n{body}\n</information>"

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
