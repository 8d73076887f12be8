"""Asynchronous rollouts: attempts that go on after an update (`PartialRollouts`), and steps whose rollouts are generated with
the weights before the last update (`Ahead`). Runs may have both."""

from __future__ import annotations

import concurrent.futures
import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from absl import logging

from routerl_jax.agents.agent import Agent, SearchTool
from routerl_jax.agents.driver import Attempts
from routerl_jax.core.safe_pickle import dumps, loads
from routerl_jax.core.types import Episode, Example
from routerl_jax.engine.engine import Engine
from routerl_jax.engine.policy import Stream
from routerl_jax.training.profiler import Clock
from routerl_jax.training.rollouts import Rollouts, RolloutSource
from routerl_jax.training.stages import RunStage, Stages


class PartialRollouts(RolloutSource):
    """Takes the first complete groups, and lets the others go on after the update (config.rollout.partial).

    Let a step learn from E groups, and let C be config.rollout.partial. E + C groups are under way. The step takes E of those
    that are complete, the oldest first; C remain, and the next step begins E others beside them:

        engine    groups 1..E+C, by P_0, until E are complete | the other C and E new ones, by P_1, until E are | ..
        learner                                                 P_1, from E of them                              P_2 ..

    Groups are never split: an attempt is learnt from with all others at its question. An attempt that goes on has all its
    tokens fed to the new weights, so no keys and values of older weights are read. Every token has the version and the
    log-probability of the weights that sampled it.

    No attempt is under way at a checkpoint or between two stages: the step before begins C fewer groups, and waits for all of
    them. So a run of S steps draws S E questions, and continues exactly after it was killed.
    """

    def __init__(self, stages: Stages, agent: Agent, engine: Engine, tools: Mapping[str, SearchTool]) -> None:
        super().__init__(stages, agent, engine, tools)
        self._attempts: Attempts | None = None
        self._streams: list[Stream] = []  # the conversations between two steps
        # by question under way, the engine's version when it was begun; oldest first
        self._first_versions: dict[str, int] = {}
        self._carried: set[str] = set()  # those that an earlier step began
        self._ended = 0.0  # when one of their attempts ended last
        self._overdue, self._seconds = 0, 0.0

    def _draw(self, stage: RunStage, step: int, whole: bool) -> list[Example]:
        rollout, self._carried = stage.config.rollout, set(self._first_versions)
        last = step + 1 == self.stages.steps or self.stages.at(step + 1) is not stage
        under_way = rollout.examples + (0 if whole or last else rollout.partial)
        return stage.stream.next(under_way - len(self._first_versions), self._first_versions)

    def _run(
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

    def _metrics(self, episodes: Sequence[Episode]) -> dict[str, float]:
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


class Ahead:
    """Gives each step rollouts that were sampled during the step before, and samples those of the next one
    (config.rollout.ahead).

    Let P_n be the weights after n steps. Step n makes P_{n+1} from rollouts that P_{n-1} sampled; those of step 0 come from
    P_0. While the learner makes P_{n+1}, the engine samples the rollouts of step n + 1 with P_n:

        engine    rollouts of n + 1, by P_n      | rollouts of n + 2, by P_{n+1}
        learner   P_{n+1}, from rollouts of n    | P_{n+2}, from rollouts of n + 1
                                                 ^ the engine gets P_{n+1}

    With devices of its own (config.mesh.engine) the engine works at the same time as the learner, in another thread. On the
    same devices, and in a run of several processes, one comes after the other: first the rollouts, then the update. Either way
    the same is computed. What was generated ahead is part of a checkpoint, so a run continues exactly after it was killed.

    Args:
      source: samples the rollouts; its methods have the same meaning here.
      apart: the engine has devices of its own.
    """

    def __init__(self, source: RolloutSource, *, apart: bool) -> None:
        self._source, self._apart = source, apart
        self._waiting: Rollouts | None = None
        self.positions = source.positions  # before the questions of the waiting rollouts were drawn

    @contextlib.contextmanager
    def rollouts(self, step: int, clock: Clock, *, whole: bool = False) -> Iterator[Rollouts]:
        rollouts, steps = self._waiting or self._roll_out(step), self._source.stages.steps
        self._waiting = None
        if self._apart and step + 1 < steps:
            # both have ended when this returns or raises
            with concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="rollouts") as pool:
                coming = pool.submit(self._roll_out, step + 1, whole)
                yield rollouts
                with clock("wait_rollouts"):
                    self._waiting = coming.result()
            return
        if step + 1 < steps:
            self._waiting = self._roll_out(step + 1, whole)
        self._source.engine.rest()
        yield rollouts

    def _roll_out(self, step: int, whole: bool = False) -> Rollouts:
        self.positions = self._source.positions
        return self._source.roll_out(step, whole=whole)

    @property
    def under_way(self) -> Collection[str]:
        return self._source.under_way

    def state(self) -> bytes:
        return self.kept()()

    def kept(self) -> Callable[[], bytes]:
        waiting = self._waiting
        return lambda: b"" if waiting is None else dumps(waiting)

    def restore(self, state: bytes) -> None:
        if state:
            rollouts: Rollouts = loads(state)
            self._waiting = rollouts
            logging.info("restored %d rollouts that were generated ahead", len(rollouts.episodes))

    def close(self) -> None:
        self._source.close()
