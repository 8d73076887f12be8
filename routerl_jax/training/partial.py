"""Partial rollouts: attempts that are under way when a step's batch is taken, and go on after the update
(config.rollout.partial).

Let a step learn from E groups, and let C be config.rollout.partial. E + C groups are under way. The step takes E of those that
are complete, the oldest first; C remain, and the next step begins E others beside them:

    engine    groups 1..E+C, by P_0, until E are complete | the other C and E new ones, by P_1, until E are complete | ..
    learner                                                 P_1, from E of them                                        P_2 ..

Groups are never split: an attempt is learnt from with all others at its question. An attempt that goes on has all its tokens
fed to the new weights, so no keys and values of older weights are read. Every token has the version and the log-probability of
the weights that sampled it.

No attempt is under way at a checkpoint or between two stages: the step before begins C fewer groups, and waits for all of
them. So a run of S steps draws S E questions, and continues exactly after it was killed.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from routerl_jax.agents.agent import Agent, SearchTool
from routerl_jax.agents.driver import Attempts
from routerl_jax.core.types import Episode, Example
from routerl_jax.engine.engine import Engine
from routerl_jax.engine.streams import Stream
from routerl_jax.training.rollouts import Groups
from routerl_jax.training.stages import RunStage, Stages


class PartialRollouts(Groups):
    """The groups of a run that are under way, from step to step.

    Args:
      steps: the run's number of steps.
    """

    def __init__(
        self, stages: Stages, agent: Agent, engine: Engine, tools: Mapping[str, SearchTool], steps: int
    ) -> None:
        super().__init__(agent, engine, tools)
        self._stages, self._steps = stages, steps
        self._attempts: Attempts | None = None
        self._streams: list[Stream] = []  # the conversations between two steps
        self._first_versions: dict[
            str, int
        ] = {}  # by question under way, the engine's version when it was begun; oldest first
        self._carried: set[str] = set()  # those that an earlier step began
        self._ended = 0.0  # when one of their attempts ended last
        self._overdue, self._seconds = 0, 0.0

    def draw(self, stage: RunStage, step: int, *, whole: bool) -> list[Example]:
        rollout, self._carried = stage.config.rollout, set(self._first_versions)
        last = step + 1 == self._steps or self._stages.at(step + 1) is not stage
        under_way = rollout.examples + (0 if whole or last else rollout.partial)
        return stage.stream.next(under_way - len(self._first_versions), self._first_versions)

    def run(
        self,
        stage: RunStage,
        examples: Sequence[Example],
        step: int,
        count: int,
        attempt: Mapping[str, Any],
        settings: Mapping[str, Any],
    ) -> list[Episode]:
        """Begins attempts at the questions, and runs all that are under way until `count` groups are complete.

        Groups that would exceed config.rollout.max_staleness if they were not among them are waited for.
        """
        started, oldest = time.perf_counter(), step + 1 - stage.config.rollout.max_staleness  # version in the next step
        self._first_versions |= {example.id: self.engine.version for example in examples}
        overdue = sum(version < oldest for version in self._first_versions.values())
        self._overdue = max(self._overdue, overdue)
        if self._attempts is None:
            self._attempts = Attempts(self.agent, self.engine, self.tools, **settings, finished=self._note_finished)
        streams, self._streams, self._ended = self._streams, [], started
        self.engine.resume(streams)
        episodes = self._attempts.run(examples, **attempt, groups=count, awaited=overdue)
        self._streams = self.engine.suspend()
        self._first_versions = {id: self._first_versions[id] for id in self._attempts.under_way}
        self._seconds += (time.perf_counter() if self._carried & set(self._first_versions) else self._ended) - started
        if not self._first_versions:
            self.close()  # the next stage may have other settings
        return episodes

    @property
    def under_way(self) -> Collection[str]:
        return self._first_versions.keys()

    def _note_finished(self, episode: Episode) -> None:
        if episode.example.id in self._carried:
            self._ended = time.perf_counter()

    def metrics(self, episodes: Sequence[Episode]) -> dict[str, float]:
        """Metrics of a step, whose episodes these are:

        - `rollout/partial/episodes`: share of the episodes that weights of more than one version sampled;
        - `rollout/partial/unfinished`: attempts that had not ended when the batch was taken;
        - `rollout/partial/overdue`: groups that were waited for because of config.rollout.max_staleness;
        - `timing_s/carried`: seconds of the rollouts until all groups of earlier steps were complete. Without partial rollouts,
          the earlier steps would have waited for them at most this long.
        """
        versions = [
            np.concatenate([np.zeros(0, int), *(s.versions[s.loss_mask] for s in e.sequences)]) for e in episodes
        ]
        unfinished = sum(self._attempts.under_way.values()) if self._attempts is not None else 0
        metrics = {
            "rollout/partial/episodes": float(np.mean([len(np.unique(numbers)) > 1 for numbers in versions])),
            "rollout/partial/unfinished": unfinished,
            "rollout/partial/overdue": self._overdue,
            "timing_s/carried": self._seconds,
        }
        self._overdue, self._seconds = 0, 0.0
        return metrics

    def close(self) -> None:
        streams, self._streams, self._first_versions = self._streams, [], {}
        self.engine.resume(streams)
        if self._attempts is not None:
            self._attempts.close()
        self._attempts = None
