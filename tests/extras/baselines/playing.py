"""What tests of baselines share: a knowledge base whose passages say what was asked, and a policy that says a list of turns."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from routerl_jax.agents.agent import Agent
from routerl_jax.agents.driver import run
from routerl_jax.core.tokenizer import Tokenizer
from routerl_jax.core.types import Episode, Example, Passage
from tests import tiny
from tests.agents.scripted import ScriptedEngine

EXAMPLE = Example(id="q", question="Who was the mother of the author?", answers=("Mary",))
Q = EXAMPLE.question
BARE: dict[str, Any] = {"instruct": False}
BOTH = ("text", "table")
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


class Pages:
    """Finds `NAME1`, `NAME2`, .. whose texts name the query, and keeps what was asked. Queries with "nothing" in them find
    nothing, those with "broken" fail."""

    def __init__(self, name: str, asked: list[tuple[str, str, int]]) -> None:
        self.name = name
        self.asked = asked

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        self.asked += [(self.name, query, k) for query in queries]
        if any("broken" in query for query in queries):
            raise ConnectionError("the engine is down")
        return [[] if "nothing" in query else [self.page(query, rank) for rank in range(1, k + 1)] for query in queries]

    def page(self, query: str, rank: int) -> Passage:
        text = f"<{self.name}{rank} on {query}>"
        return Passage(id=text, title=f"{self.name}{rank}", text=text, score=1 / rank)


@dataclasses.dataclass
class Played:
    """An episode, and what was asked of whom.

    Attributes:
      asked: (knowledge base, query, k) of every search, in order.
      chats: what each conversation held at its end.
    """

    episode: Episode
    asked: list[tuple[str, str, int]]
    chats: list[str]


def played(
    agent: Agent,
    *turns: str,
    tools: Sequence[str] = ("text",),
    chats: bool = False,
    example: Example = EXAMPLE,
    **engine: Any,
) -> Played:
    """Runs an agent on a policy that says these turns, whatever the chat, and no more than these.

    Args:
      chats: the policy's tokenizer has a chat template.
    """
    left = list(turns)
    made = ScriptedEngine(lambda *_: left.pop(0), **{"max_length": 20_000, **engine})
    if chats:
        made.tokenizer = with_template()
    asked: list[tuple[str, str, int]] = []
    (episode,) = run(agent, [example], made, {name: Pages(name, asked) for name in tools})
    assert not left, f"turns that were not asked for: {left}"
    assert not made.live
    return Played(episode, asked, [made.tokenizer.decode(one.tokens) for one in episode.sequences])


def kinds(episode: Episode) -> list[str | None]:
    """The kind of each turn's action."""
    return [turn.action and turn.action.kind for turn in episode.turns]


def with_template() -> Tokenizer:
    """The small tokenizer with a chat template."""
    return tiny.with_template(tiny.tokenizer(), TEMPLATE)
