"""The rollouts of a step: attempts at its questions, with rewards. Groups without signal may be followed by others."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from routerl_jax.agents.agent import Agent, SearchTool
from routerl_jax.agents.driver import DriverStats, run
from routerl_jax.core.types import Episode, Example
from routerl_jax.engine.engine import Engine
from routerl_jax.engine.sampling import Sampling
from routerl_jax.engine.streams import EngineStats
from routerl_jax.learning.advantages import groups_without_signal
from routerl_jax.training.health import tool_counts, tool_metrics
from routerl_jax.training.partial import PartialRollouts
from routerl_jax.training.profiler import Clock
from routerl_jax.training.run import step_seed
from routerl_jax.training.stages import RunStage


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rollouts:
    """Scored episodes of a step.

    Attributes:
      step: the step that learns from them.
      episodes: all episodes, question by question, with `rewards`.
      groups: index of each episode's question, [N].
      replaced: whether each episode belongs to a group without signal that was replaced, [N]; it is not learnt from.
      refills: rounds in which groups were replaced.
      version: the engine's version of the weights.
      driver, engine: statistics of the driver and the engine.
      tools: metrics of the tools' stages (`tool_counts.tool_metrics`).
      partial: metrics of attempts that are under way from step to step (`PartialRollouts.metrics`).
      seconds: seconds by part: rollout, reward.
    """

    step: int
    episodes: list[Episode]
    groups: np.ndarray
    replaced: np.ndarray
    refills: int
    version: int
    driver: DriverStats
    engine: EngineStats
    tools: dict[str, float]
    partial: dict[str, float]
    seconds: dict[str, float]

    @property
    def learned(self) -> np.ndarray:
        """Indices of the episodes that are learnt from."""
        return np.flatnonzero(~self.replaced)


def roll_out(
    stage: RunStage,
    agent: Agent,
    engine: Engine,
    tools: Mapping[str, SearchTool],
    examples: Sequence[Example],
    step: int,
    partial: PartialRollouts | None = None,
) -> Rollouts:
    """Samples attempts at the questions and scores them. With `partial`, it begins these attempts, and may score others that
    were begun earlier.

    With config.rollout.refill, groups whose rewards are all equal are replaced by as many groups of the stream's next
    questions, in at most so many rounds: dynamic sampling (DAPO, arXiv 2503.14476, eq. 11), with a bound. Groups without
    signal that are left after the last round stay. A question that is in the step already is skipped, and the group
    that it would replace stays.
    """
    clock, rollout = Clock(), stage.config.rollout
    engine.stats, stats, counted = EngineStats(), DriverStats(), tool_counts(tools)
    attempt: dict[str, Any] = {
        "samples": rollout.samples,
        "seed": step_seed(stage.config.seed, step),
        "stats": stats,
    }
    settings: dict[str, Any] = {
        "sampling": Sampling(temperature=rollout.temperature, top_p=rollout.top_p, top_k=rollout.top_k),
        "deterministic": rollout.deterministic,
        "tool_timeout": rollout.tool_timeout,
        "forks": rollout.forks,
    }
    episodes: list[Episode] = []
    groups: list[int] = []
    number_of: dict[str, int] = {}
    replaced: set[int] = set()
    asked, refills = list(examples), 0
    while True:
        with clock("rollout"):
            if partial is None:
                sampled = run(agent, asked, engine, tools, **attempt, **settings)
            else:
                sampled = partial.run(
                    stage, asked, step, len(asked) if refills else rollout.examples, attempt, settings
                )
        with clock("reward"):
            scored = stage.reward(sampled)
        for episode, rewards in zip(sampled, scored, strict=True):
            episode.rewards = rewards
        numbers = [number_of.setdefault(episode.example.id, len(number_of)) for episode in sampled]
        episodes, groups = episodes + sampled, groups + numbers
        if refills == rollout.refill:
            break
        totals = np.asarray([episode.rewards["total"] for episode in sampled])
        flat = np.unique(numbers)[groups_without_signal(totals, np.asarray(numbers))].tolist()
        under_way = () if partial is None else partial.under_way
        asked = [e for e in stage.stream.next(len(flat), under_way) if e.id not in number_of] if flat else []
        if not asked:
            break
        replaced |= set(flat[: len(asked)])
        refills += 1
    return Rollouts(
        step=step,
        episodes=episodes,
        groups=np.asarray(groups),
        replaced=np.isin(groups, sorted(replaced)),
        refills=refills,
        version=engine.version,
        driver=stats,
        engine=engine.stats,
        tools=tool_metrics(tools, counted),
        partial={} if partial is None else partial.metrics(episodes),
        seconds=clock.seconds,
    )
