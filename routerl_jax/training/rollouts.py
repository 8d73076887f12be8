"""The rollouts of a step: attempts at its questions, with rewards. Groups without signal may be followed by others."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from routerl_jax.agents.agent import Agent, SearchTool
from routerl_jax.agents.driver import DriverStats, run
from routerl_jax.core.types import Episode, Example
from routerl_jax.engine.engine import Engine
from routerl_jax.engine.policy import EngineStats
from routerl_jax.engine.sampling import Sampling
from routerl_jax.learning.advantages import groups_without_signal
from routerl_jax.training.health import tool_counts, tool_metrics
from routerl_jax.training.profiler import Clock
from routerl_jax.training.run import step_seed
from routerl_jax.training.stages import RunStage, Stages


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
      tools: metrics of the tools' stages (`health.tool_metrics`).
      partial: metrics of attempts that are under way from step to step (`asynchronous.PartialRollouts`).
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


class RolloutSource:
    """Gives each step its rollouts, sampled with the present weights. asynchronous.py has sources whose attempts go on after an
    update, or are made during the step before."""

    def __init__(self, stages: Stages, agent: Agent, engine: Engine, tools: Mapping[str, SearchTool]) -> None:
        self.stages, self.agent, self.engine, self.tools = stages, agent, engine, tools

    @contextlib.contextmanager
    def rollouts(self, step: int, clock: Clock, *, whole: bool = False) -> Iterator[Rollouts]:
        """The rollouts of a step, around its updates: when it ends, the engine may be given the new weights.

        Args:
          whole: no attempt may be under way after the step.
        """
        rollouts = self.roll_out(step, whole=whole)
        self.engine.rest()
        yield rollouts

    def roll_out(self, step: int, *, whole: bool = False) -> Rollouts:
        """Samples attempts at the questions of a step, and scores them.

        With config.rollout.refill, groups whose rewards are all equal are replaced by as many groups of the stream's next
        questions, in at most so many rounds: dynamic sampling (DAPO, arXiv 2503.14476, eq. 11), with a bound. Groups without
        signal that are left after the last round stay. A question that is in the step already is skipped, and the group
        that it would replace stays.
        """
        clock, stage, engine = Clock(), self.stages.at(step), self.engine
        rollout = stage.config.rollout
        engine.stats, stats, counted = EngineStats(), DriverStats(), tool_counts(self.tools)
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
        of_groups: list[int] = []
        number_of: dict[str, int] = {}
        replaced: set[int] = set()
        asked, refills = self._draw(stage, step, whole), 0
        while True:
            with clock("rollout"):
                sampled = self._run(stage, asked, step, len(asked) if refills else rollout.examples, attempt, settings)
            with clock("reward"):
                scored = stage.reward(sampled)
            for episode, rewards in zip(sampled, scored, strict=True):
                episode.rewards = rewards
            numbers = [number_of.setdefault(episode.example.id, len(number_of)) for episode in sampled]
            episodes, of_groups = episodes + sampled, of_groups + numbers
            if refills == rollout.refill:
                break
            totals = np.asarray([episode.rewards["total"] for episode in sampled])
            flat = np.unique(numbers)[groups_without_signal(totals, np.asarray(numbers))].tolist()
            asked = [e for e in stage.stream.next(len(flat), self.under_way) if e.id not in number_of] if flat else []
            if not asked:
                break
            replaced |= set(flat[: len(asked)])
            refills += 1
        of_engine, engine.stats = engine.stats, EngineStats()  # not what a validation adds before the step takes them
        return Rollouts(
            step=step,
            episodes=episodes,
            groups=np.asarray(of_groups),
            replaced=np.isin(of_groups, sorted(replaced)),
            refills=refills,
            version=engine.version,
            driver=stats,
            engine=of_engine,
            tools=tool_metrics(self.tools, counted),
            partial=self._metrics(episodes),
            seconds=clock.seconds,
        )

    def _draw(self, stage: RunStage, step: int, whole: bool) -> list[Example]:
        """The questions that the rollouts of a step begin."""
        return stage.examples()

    def _run(
        self,
        stage: RunStage,
        examples: Sequence[Example],
        step: int,
        count: int,
        attempt: Mapping[str, Any],
        settings: Mapping[str, Any],
    ) -> list[Episode]:
        """Begins attempts at the questions, and runs until `count` groups are complete; here these are all.

        Args:
          attempt, settings: further arguments of `driver.run`; the settings are the same for all steps of a stage.
        """
        return run(self.agent, examples, self.engine, self.tools, **attempt, **settings)

    def _metrics(self, episodes: Sequence[Episode]) -> dict[str, float]:
        """Metrics of attempts that are under way from step to step. `episodes`: those of the step."""
        return {}

    @property
    def under_way(self) -> Collection[str]:
        """The ids of the questions whose groups no step has taken yet."""
        return ()

    @property
    def positions(self) -> dict[str, Any]:
        """The positions of the stages' streams from which the rollouts of the next step can be sampled anew."""
        return self.stages.state()

    def state(self) -> bytes:
        """Rollouts that wait for their step, for a checkpoint; b"" if there are none."""
        return b""

    def kept(self) -> Callable[[], bytes]:
        """What gives the present `state` also when later steps have taken their rollouts."""
        return self.state

    def restore(self, state: bytes) -> None:
        """Restores the rollouts that waited when a checkpoint was written.

        Raises:
          ValueError: it can't be read.
        """

    def close(self) -> None:
        """Ends the attempts that are under way."""
