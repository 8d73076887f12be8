"""Steps whose rollouts are generated one step ahead, with the weights before the last update (config.rollout.ahead).

Let P_n be the weights after n steps. Step n makes P_{n+1} from rollouts that P_{n-1} sampled; those of step 0 come from P_0.
While the learner makes P_{n+1}, the engine samples the rollouts of step n + 1 with P_n:

    engine    rollouts of n + 1, by P_n      | rollouts of n + 2, by P_{n+1}
    learner   P_{n+1}, from rollouts of n    | P_{n+2}, from rollouts of n + 1
                                             ^ the engine gets P_{n+1}

With devices of its own (config.mesh.engine) the engine works at the same time as the learner, in another thread. On the same
devices, and in a run of several processes, one comes after the other: first the rollouts, then the update. Either way the same
is computed. What was generated ahead is part of a checkpoint, so a run continues exactly after it was killed.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
from collections.abc import Iterator
from typing import Any

from absl import logging

from routerl_jax.core.safe_pickle import dumps, loads
from routerl_jax.training.profiler import Clock
from routerl_jax.training.rollouts import Groups, Rollouts, RolloutSource
from routerl_jax.training.stages import Stages


class Ahead(RolloutSource):
    """Gives each step rollouts that were sampled during the step before, and samples those of the next one.

    Args:
      apart: the engine has devices of its own.
    """

    def __init__(self, stages: Stages, groups: Groups, steps: int, *, apart: bool) -> None:
        super().__init__(stages, groups, steps)
        self._apart = apart
        self._waiting: Rollouts | None = None
        self._before = stages.state()  # the streams' positions before the questions of the waiting rollouts were drawn

    @contextlib.contextmanager
    def rollouts(self, step: int, clock: Clock, *, whole: bool = False) -> Iterator[Rollouts]:
        rollouts = self._waiting or self._roll_out(step, whole=False)
        self._waiting = None
        if self._apart and step + 1 < self._steps:
            # both have ended when this returns or raises
            with concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="rollouts") as pool:
                coming = pool.submit(self._roll_out, step + 1, whole)
                yield rollouts
                with clock("wait_rollouts"):
                    self._waiting = coming.result()
            return
        if step + 1 < self._steps:
            self._waiting = self._roll_out(step + 1, whole)
        self._groups.engine.rest()
        yield rollouts

    def _roll_out(self, step: int, whole: bool) -> Rollouts:
        self._before = self._stages.state()
        return super()._roll_out(step, whole)

    @property
    def positions(self) -> dict[str, Any]:
        return self._before

    def state(self) -> bytes:
        return b"" if self._waiting is None else dumps(self._waiting)

    def restore(self, state: bytes) -> None:
        if state:
            rollouts: Rollouts = loads(state)
            self._waiting = rollouts
            logging.info("restored %d rollouts that were generated ahead", len(rollouts.episodes))
