"""Counts the steps of a run whose length is given in passes over its questions."""

from __future__ import annotations

import dataclasses
import itertools

from absl import logging

from routerl_jax.training.config import TrainConfig
from routerl_jax.training.setup import open_examples


def count_steps(config: TrainConfig) -> TrainConfig:
    """The run with `steps` instead of `data.epochs`, and with each stage's `start` instead of `after`.

    A stage of E passes over N questions, with n questions per step, has E N / n steps, rounded up: the last step is filled with
    questions of a further pass. Stages on the same questions continue them where the stage before stopped.

    Raises:
      ValueError: stages follow each other in a circle, the last stage has no epochs, or a stage does not start exactly when the
        passes of the stage before it end.
    """
    if not config.uncounted:
        return config
    starts: dict[str, int] = {}
    ends: dict[str, int] = {}
    waiting = dict(config.stages)
    while waiting:
        name = next((name for name, stage in waiting.items() if not stage.after or stage.after in ends), None)
        if name is None:
            raise ValueError(f"config.stages: {', '.join(waiting)} begin after each other, and none begins first")
        stage = waiting.pop(name)
        starts[name] = ends[stage.after] if stage.after else stage.start
        if name in config.uncounted:
            ends[name] = starts[name] + _steps(config, name)
    order = sorted(starts, key=lambda name: starts[name])
    for first, second in itertools.pairwise(order):
        if ends.get(first, starts[second]) != starts[second]:
            raise ValueError(
                f"config.stages.{second} begins at step {starts[second]}, and the passes of {first!r} before it end at "
                f"{ends[first]}: give config.stages.{second}.after={first!r} in the place of start, or {first!r} data.epochs=0"
            )
    if order[-1] not in ends:
        raise ValueError(
            f"config.stages.{order[-1]} is the last stage, and without data.epochs it has no end: give it some, or give no "
            "stage any, and config.steps"
        )
    stages = {
        name: dataclasses.replace(
            stage, start=starts[name], after="", data={key: v for key, v in stage.data.items() if key != "epochs"}
        )
        for name, stage in config.stages.items()
    }
    data = dataclasses.replace(config.data, epochs=0)
    return dataclasses.replace(config, steps=ends[order[-1]], stages=stages, data=data)


def _steps(config: TrainConfig, name: str) -> int:
    settings = config.in_stage(name)
    data, examples = settings.data, settings.rollout.examples
    questions = len(open_examples(data.train, data.train_range, "config.data.train"))
    steps = -(-data.epochs * questions // examples)
    logging.info(
        "stage %r: %d passes over %d questions, %d in a step: %d steps", name, data.epochs, questions, examples, steps
    )
    return steps
