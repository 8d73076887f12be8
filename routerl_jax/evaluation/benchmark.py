"""Runs agents on a fixed set of questions: with their knowledge bases, or as a canary with passages for other questions."""

from __future__ import annotations

import pathlib
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from routerl_jax.agents.agent import Agent, SearchTool
from routerl_jax.agents.driver import run
from routerl_jax.core.types import Episode, Example, Passage, Query
from routerl_jax.engine.policy import Policy
from routerl_jax.engine.sampling import GREEDY, Sampling
from routerl_jax.evaluation.metrics import summarize
from routerl_jax.evaluation.records import write_records
from routerl_jax.knowledge.base import query_text
from routerl_jax.parallel import multihost
from routerl_jax.rewards.terms import Judge


def score(
    agent: Agent,
    examples: Sequence[Example],
    engine: Policy,
    tools: Mapping[str, SearchTool],
    normalizer: str,
    *,
    tool_timeout: float,
    sampling: Sampling = GREEDY,
    seed: int = 0,
    progress: str = "",
    judge: Judge | None = None,
) -> tuple[dict[str, Any], list[Episode]]:
    """Runs an agent once on every example, greedily by default. Returns metrics and episodes.

    Args:
      tool_timeout: seconds after which a search counts as failed. Use that of training, or results differ from it.
      judge: if given, it is asked about every answer, and its metrics are added.
    """
    episodes = run(
        agent,
        examples,
        engine,
        tools,
        samples=1,
        seed=seed,
        sampling=sampling,
        tool_timeout=tool_timeout,
        progress=progress,
    )
    if judge is not None:
        for episode, verdict in zip(episodes, judge(episodes), strict=True):
            episode.verdict = verdict
    return summarize(episodes, normalizer, tuple(tools), agent.search_budget), episodes


def score_all(
    agents: Mapping[str, Agent],
    examples: Sequence[Example],
    engine: Policy,
    tools: Mapping[str, SearchTool],
    normalizer: str,
    *,
    progress: bool = True,
    records: pathlib.Path | None = None,
    **options: Any,
) -> dict[str, dict[str, Any]]:
    """Metrics of several agents with one policy on the same questions, by name. Episodes go to `records`/NAME.jsonl.

    Args:
      options: further arguments of `score`.
    """
    table = {}
    for name, agent in agents.items():
        description = f"evaluating {name}" if progress else ""
        table[name], episodes = score(agent, examples, engine, tools, normalizer, progress=description, **options)
        if records is not None and multihost.is_main():
            write_records(records / f"{name}.jsonl", episodes)
    return table


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
        digests = [zlib.crc32(query_text(query).encode("utf-8", "replace")) for query in queries]
        return self._tool.search([self._pool[digest % len(self._pool)] for digest in digests], k)


def canary(
    agent: Agent,
    examples: Sequence[Example],
    engine: Policy,
    tools: Mapping[str, SearchTool],
    normalizer: str,
    *,
    tool_timeout: float,
) -> dict[str, float]:
    """Validation with a retriever that returns passages for other questions: `canary/em`, `canary/searches_per_question`. It
    shows whether the policy uses what it reads.

    If `canary/em` is near the EM of validation, the policy answers without reading. If its searches fall to 0, it has learnt
    that searching is useless. Both show earlier here than in validation.
    """
    pool = [example.question for example in examples]
    elsewhere = {name: RandomQueryTool(tool, pool) for name, tool in tools.items()}
    summary, _ = score(agent, examples, engine, elsewhere, normalizer, tool_timeout=tool_timeout)
    return {f"canary/{name}": summary[name] for name in ("em", "searches_per_question")}
