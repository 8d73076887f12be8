"""Runs agents on a fixed set of questions."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from routerl_jax.agents.agent import Agent, SearchTool
from routerl_jax.agents.driver import run
from routerl_jax.core.types import Episode, Example
from routerl_jax.engine.policy import Policy
from routerl_jax.engine.sampling import GREEDY, Sampling
from routerl_jax.evaluation.metrics import summarize
from routerl_jax.evaluation.records import write_records
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
    tool_timeout: float,
    progress: bool = True,
    records: pathlib.Path | None = None,
    judge: Judge | None = None,
) -> dict[str, dict[str, Any]]:
    """Metrics of several agents with one policy on the same questions, by name. Episodes go to `records`/NAME.jsonl."""
    table = {}
    for name, agent in agents.items():
        description = f"evaluating {name}" if progress else ""
        table[name], episodes = score(
            agent, examples, engine, tools, normalizer, tool_timeout=tool_timeout, progress=description, judge=judge
        )
        if records is not None and multihost.is_main():
            write_records(records / f"{name}.jsonl", episodes)
    return table
