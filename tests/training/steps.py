"""Single steps of a run, as the loop of training/rl.py takes them."""

import dataclasses
from typing import Any

from routerl_jax.training.asynchronous import Ahead
from routerl_jax.training.profiler import Clock
from routerl_jax.training.rollouts import RolloutSource
from routerl_jax.training.run import Run
from routerl_jax.training.stages import RunStage, Stages
from routerl_jax.training.step import learn


def take_step(
    source: RolloutSource | Ahead,
    stage: RunStage,
    run: Run,
    engine: Any,
    tools: Any,
    step: int,
    clock: Clock,
    whole: bool = False,
) -> dict[str, Any]:
    """A step on a source's rollouts; its metrics."""
    with source.rollouts(step, clock, whole=whole) as rollouts:
        metrics = learn(stage, run, engine, tools, rollouts, clock)
    engine.update(run.served_params(), step + 1)
    return metrics


class OneStage(Stages):
    """A run of one stage."""

    def __init__(self, stage: RunStage) -> None:
        self._stage = stage

    def at(self, step: int) -> RunStage:
        return self._stage


def train_step(
    stage: RunStage, agent: Any, run: Run, engine: Any, tools: Any, examples: Any, step: int, clock: Clock
) -> dict[str, Any]:
    """A step on these questions; its metrics."""

    class Asked(RunStage):
        def examples(self) -> Any:
            return examples

    asked = Asked(**{field.name: getattr(stage, field.name) for field in dataclasses.fields(stage)})
    return take_step(RolloutSource(OneStage(asked), agent, engine, tools), stage, run, engine, tools, step, clock)
