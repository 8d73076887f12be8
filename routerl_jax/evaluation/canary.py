"""Does the policy read what it retrieves? Validation with a retriever that answers other questions."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

from routerl_jax.agents.agent import Agent, SearchTool
from routerl_jax.core.types import Example, Passage, Query
from routerl_jax.evaluation.benchmark import score
from routerl_jax.generation.policy import Policy
from routerl_jax.knowledge.query import query_text


class Elsewhere:
    """A tool that searches for a question of a pool instead of what it is asked: real passages, of no use.

    Args:
      tool: what is searched.
      pool: questions; which of them, the query's digest decides, so that a run repeats.
    """

    def __init__(self, tool: SearchTool, pool: Sequence[str]) -> None:
        self._tool, self._pool = tool, pool
        self.cost = getattr(tool, "cost", 1.0)

    def search(self, queries: Sequence[Query], k: int) -> list[list[Passage]]:
        return self._tool.search([self._pool[_digest(query) % len(self._pool)] for query in queries], k)


def canary(
    agent: Agent,
    examples: Sequence[Example],
    engine: Policy,
    tools: Mapping[str, SearchTool],
    normalizer: str,
    *,
    tool_timeout: float,
) -> dict[str, float]:
    """Exact match and searches per question of a policy that finds nothing of use: `canary/em`, `canary/searches_per_question`.

    Where they come near to those of validation, the policy answers without reading; where searches fall to none, it has learnt
    that searching is of no use. Both show earlier than validation does.
    """
    pool = [example.question for example in examples]
    elsewhere = {name: Elsewhere(tool, pool) for name, tool in tools.items()}
    summary, _ = score(agent, examples, engine, elsewhere, normalizer, tool_timeout=tool_timeout)
    return {f"canary/{name}": summary[name] for name in ("em", "searches_per_question")}


def _digest(query: Query) -> int:
    return zlib.crc32(query_text(query).encode("utf-8", "replace"))
