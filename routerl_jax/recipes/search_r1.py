"""Search-R1 (arXiv 2503.09516): a model learns to search while it reasons. Only right answers are rewarded.

RouteRAG's and VRAG's loops derive from it. Its agent is SearchAgent with this grammar, its reward is exact match alone, and its
algorithm is GRPO without a critic. docs/search_r1.md lists differences between paper and released code.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence

from routerl_jax.agents.grammar import Grammar, check_one_tool, inert, one_line, unshown
from routerl_jax.core.text import split_thoughts
from routerl_jax.core.types import Action, Call, Passage
from routerl_jax.recipes.search import search_recipe

# One stage (paper, eq. 4): exact match after the `search_r1` normaliser.
REWARD: Mapping[str, float] = {"em": 1.0}
MAX_SEARCHES = 4  # the paper's budget of actions; the released GRPO script has 2
PASSAGES = 3  # per search

_CONTENT = r"(?:(?!</?(?:think|search|information|answer)>).)*"
ACTION = re.compile(r"<(search|answer)>((?:(?!<\1>).)*?)</\1>", re.DOTALL)
_THINK = rf"<think>{_CONTENT}</think>\s*"


recipe = search_recipe("search_r1")


def documents(passages: Sequence[Passage], tags: Iterable[str]) -> str:
    """The passages as Search-R1 shows them, without these tags."""
    return "\n".join(
        f"Doc {i}(Title: {inert(passage.title, tags)}) {one_line(passage.text, tags)}"
        for i, passage in enumerate(passages, 1)
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchR1Grammar(Grammar):
    """A thought in `<think>`, a query in `<search>`, the results in `<information>` right after it, and at last `<answer>`.

    There is one knowledge base, which the tags don't name.
    """

    def __post_init__(self) -> None:
        check_one_tool(self)

    @property
    def stops(self) -> tuple[str, ...]:
        return ("</search>", "</answer>")

    @property
    def special_tokens(self) -> tuple[str, ...]:
        return tuple(f"<{slash}{name}>" for name in ("think", "search", "information", "answer") for slash in ("", "/"))

    def parse(self, text: str) -> Action:
        """The first complete pair of `<search>` or `<answer>` tags outside of thoughts decides. The released code also takes a
        pair within a thought."""
        match = ACTION.search(split_thoughts(text)[1])
        before = text[: match.start()] if match else text
        thought = re.sub(r"</?think>", " ", before).strip()
        if match is None:
            return Action(
                kind="invalid",
                thought=thought,
                error="there is neither a query in <search> nor an answer in <answer>",
            )
        content = match[2].strip()
        if match[1] == "answer":
            return Action(kind="answer", answer=content, thought=thought)
        query = " ".join(content.split())
        if not query:
            return Action(kind="invalid", thought=thought, error="there is nothing between <search> and </search>")
        return Action(kind="search", tool=self.tools[0], query=query, thought=thought)

    def well_formed(self, text: str) -> bool:
        return bool(re.fullmatch(rf"\s*{_THINK}<(search|answer)>{_CONTENT}</\1>\s*", text, re.DOTALL))

    def write_search(self, thought: str, query: str, tool: str) -> str:
        return f"<think>{thought}</think>\n<search>{query}</search>"

    def observation(self, call: Call, passages: Sequence[Passage]) -> str:
        body = unshown(call, passages, self.foreign) or documents(passages, self.foreign)
        return f"\n\n<information>{body}</information>\n\n"

    def reminder(self, error: str) -> str:
        """The reminder is not in `<information>` tags, as in the released code, because nothing was retrieved."""
        return (
            f"\nThat step could not be carried out: {error}. A query belongs between <search> and </search>, the final answer "
            "between <answer> and </answer>. Once more.\n"
        )

    def instructions(self) -> str:
        return (
            "Work out the answer to the question. Whenever you have learnt something new, first think inside <think> and "
            "</think>. If a fact is missing, look it up: write a query inside <search> and </search>, and the best passages "
            "for it appear inside <information> and </information>. You may search several times. As soon as you know enough, "
            "give the answer alone, in a few words, inside <answer> and </answer>, for example <answer>Lake Victoria</answer>."
        )
