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
from collections.abc import Callable, Mapping
from typing import Any

from absl import logging

from routerl_jax.agents.agent import Agent, SearchTool
from routerl_jax.core.safe_pickle import dumps, loads
from routerl_jax.engine.engine import Engine
from routerl_jax.training.partial import PartialRollouts
from routerl_jax.training.profiler import Clock
from routerl_jax.training.rollouts import Rollouts, roll_out
from routerl_jax.training.run import Run
from routerl_jax.training.stages import RunStage, Stages
from routerl_jax.training.step import learn


class Ahead:
    """Takes steps whose rollouts were generated during the step before.

    Args:
      stages: the run's stages.
      steps: the run's number of steps; nothing is generated beyond the last.
      apart: the engine has devices of its own.
      partial: attempts that are under way from step to step.
    """

    def __init__(
        self,
        stages: Stages,
        agent: Agent,
        engine: Engine,
        tools: Mapping[str, SearchTool],
        steps: int,
        *,
        apart: bool,
        partial: PartialRollouts | None = None,
    ) -> None:
        self._stages, self._agent, self._engine, self._tools = stages, agent, engine, tools
        self._steps, self._apart, self._partial = steps, apart, partial
        self._waiting: Rollouts | None = None
        self.before = stages.state()  # the streams' positions before the questions of the waiting rollouts were drawn

    def step(self, stage: RunStage, run_: Run, step: int, clock: Clock, *, whole: bool = False) -> dict[str, Any]:
        """Takes a step: updates from the waiting rollouts, and generates those of the next step. Returns the step's metrics.

        Args:
          whole: no attempt may be under way after the step.

        Raises:
          NotFinite: a reward or an advantage is not finite.
        """
        rollouts = self._waiting or self._next(step, whole=False)
        self._waiting = None

        def update() -> dict[str, Any]:
            return learn(stage, run_, self._engine, self._tools, rollouts, clock)

        if step + 1 == self._steps:
            self._engine.rest()
            metrics = update()
        elif self._apart:
            metrics = self._update_while_generating(update, step + 1, clock, whole)
        else:
            self._waiting = self._next(step + 1, whole)
            self._engine.rest()
            metrics = update()
        self._engine.update(run_.served_params(), step + 1)
        return metrics

    def _next(self, step: int, whole: bool) -> Rollouts:
        self.before = self._stages.state()
        stage, partial = self._stages.at(step), self._partial
        examples = stage.examples() if partial is None else partial.draw(stage, step, whole=whole)
        return roll_out(stage, self._agent, self._engine, self._tools, examples, step, partial)

    def _update_while_generating(
        self, update: Callable[[], dict[str, Any]], step: int, clock: Clock, whole: bool
    ) -> dict[str, Any]:
        """The update's metrics; the rollouts of `step` are generated meanwhile. Both have ended when this returns or raises."""
        with concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="rollouts") as pool:
            coming = pool.submit(self._next, step, whole)
            metrics = update()
            with clock("wait_rollouts"):
                self._waiting = coming.result()
        return metrics

    def state(self) -> bytes:
        """The waiting rollouts, for a checkpoint; b"" if there are none."""
        return b"" if self._waiting is None else dumps(self._waiting)

    def restore(self, state: bytes) -> None:
        """Restores the rollouts that waited when a checkpoint was written.

        Raises:
          ValueError: it can't be read.
        """
        if state:
            rollouts: Rollouts = loads(state)
            self._waiting = rollouts
            logging.info("restored %d rollouts that were generated ahead", len(rollouts.episodes))
