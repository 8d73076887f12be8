"""Single steps of a run, as the loop of training/rl.py takes them."""

from typing import Any

from routerl_jax.training.profiler import Clock
from routerl_jax.training.rollouts import Groups, RolloutSource, roll_out
from routerl_jax.training.run import Run
from routerl_jax.training.stages import RunStage
from routerl_jax.training.step import learn


def train_step(
    stage: RunStage, agent: Any, run: Run, engine: Any, tools: Any, examples: Any, step: int, clock: Clock
) -> dict[str, Any]:
    """A step on these questions; its metrics."""
    rollouts = roll_out(stage, examples, step, Groups(agent, engine, tools))
    engine.rest()
    metrics = learn(stage, run, engine, tools, rollouts, clock)
    engine.update(run.served_params(), step + 1)
    return metrics


def take_step(
    source: RolloutSource,
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
