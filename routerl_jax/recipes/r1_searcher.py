"""R1-Searcher (arXiv 2503.05592): searching while thinking, taught in two stages."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from routerl_jax.agents.grammar import GRAMMARS, Grammar, between
from routerl_jax.core.types import Action, Call, Passage


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
        answer = between(text, "<answer>", "</answer>")
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
