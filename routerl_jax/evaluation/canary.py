"""The canary: validation with a retriever that returns passages for other questions. It shows whether the policy uses what it
reads."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

from routerl_jax.agents.agent import Agent, SearchTool
from routerl_jax.core.types import Example, Passage, Query
from routerl_jax.engine.policy import Policy
from routerl_jax.evaluation.benchmark import score
from routerl_jax.knowledge.base import query_text


class RandomQueryTool:
    """A tool that ignores its query and searches for a question from a pool: it returns real but useless passages.

    Args:
      tool: the tool that is searched.
      pool: questions. The query's digest chooses one, so that a run is reproducible.
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
    """Exact match and searches per question if searches find nothing useful: `canary/em`, `canary/searches_per_question`.

    If `canary/em` is near the EM of validation, the policy answers without reading. If its searches fall to 0, it has learnt
    that searching is useless. Both show earlier here than in validation.
    """
    pool = [example.question for example in examples]
    elsewhere = {name: RandomQueryTool(tool, pool) for name, tool in tools.items()}
    summary, _ = score(agent, examples, engine, elsewhere, normalizer, tool_timeout=tool_timeout)
    return {f"canary/{name}": summary[name] for name in ("em", "searches_per_question")}


def _digest(query: Query) -> int:
    return zlib.crc32(query_text(query).encode("utf-8", "replace"))
