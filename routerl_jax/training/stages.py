"""The stages of a run, each with its reward, its settings and its questions.

`ExampleStream` shuffles the questions, and its position is part of the checkpoint. `count_steps` counts the steps of stages
whose length is given in passes over their questions.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import Any, cast

from absl import logging

from routerl_jax.core.types import Example
from routerl_jax.data.overlap import examples_of
from routerl_jax.data.readers import ExampleSource
from routerl_jax.data.trajectories import check_retrievers
from routerl_jax.recipes.recipe import Recipe, Reward
from routerl_jax.rewards.retrieval import gold_passages_of
from routerl_jax.training.config import TrainConfig
from routerl_jax.training.setup import open_examples


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunStage:
    """A stage: its first step `start`, its settings (`TrainConfig.in_stage`), whether it restarts optimiser and schedule
    (`StageConfig.restart`), and the number of updates that the schedule spans, from one restart to the next."""

    name: str
    start: int
    restart: bool
    updates: int
    reward: Reward
    config: TrainConfig
    stream: ExampleStream

    def examples(self) -> list[Example]:
        """The questions of the next step."""
        return self.stream.next(self.config.rollout.examples)


class Stages:
    """All stages of a run. Stages on the same questions share one stream of them. `steps`: the run's number of steps.

    Raises:
      ValueError: the questions of a stage can't be read, are fewer than one step needs, are golden steps that use an unknown
        knowledge base, or name no gold passage although the reward counts them (`found`).
    """

    def __init__(self, config: TrainConfig, recipe: Recipe) -> None:
        self._streams: dict[str, ExampleStream] = {}  # by the first stage that has it
        self._stages: list[RunStage] = []
        self.steps = config.steps
        owners: dict[Any, str] = {}
        sources: dict[str, ExampleSource] = {}
        for stage in recipe.stages:
            settings = config.in_stage(stage.name)
            data, questions_of = settings.data, (settings.data.train, settings.data.train_range)
            owner = owners.setdefault(questions_of, stage.name)
            if owner == stage.name:
                questions = sources[owner] = open_examples(data.train, data.train_range, "config.data.train")
                check_retrievers(
                    (questions[i] for i in range(len(questions))),
                    tuple(config.knowledge),
                    f"config.data.train={data.train}",
                )
                self._streams[owner] = ExampleStream(questions, config.seed)
            rewards_found = "found" in getattr(stage.reward, "terms", ())
            if rewards_found and not any(map(gold_passages_of, examples_of(sources[owner]))):
                raise ValueError(
                    f"config.stages.{stage.name}.reward.found counts gold passages, and no question of config.data.train="
                    f"{data.train} names any ('supporting' or 'path', docs/data.md): every attempt would earn 0. Give "
                    "questions that do, or take the term answer_found"
                )
            self._streams[owner].check(settings.rollout.examples, settings.rollout.partial)
            self._stages.append(
                RunStage(
                    name=stage.name,
                    start=stage.start,
                    restart=config.stages[stage.name].restart,
                    updates=_updates(config, recipe, stage.start),
                    reward=stage.reward,
                    config=settings,
                    stream=self._streams[owner],
                )
            )

    def at(self, step: int) -> RunStage:
        """The stage that a step belongs to."""
        return [stage for stage in self._stages if stage.start <= step][-1]

    def ended(self, completed: int) -> RunStage | None:
        """The stage that ends after `completed` steps with another stage following; None if there is none."""
        return (
            self.at(completed - 1)
            if 0 < completed < self.steps and any(s.start == completed for s in self._stages)
            else None
        )

    @property
    def has_reference(self) -> bool:
        """Whether some stage measures a KL to the initial policy."""
        learners = [stage.config.learner for stage in self._stages]
        return any(learner.loss.kl_coef or learner.reward_kl_coef for learner in learners)

    def state(self) -> dict[str, Any]:
        """The positions of the streams, as JSON-serialisable data."""
        return {name: stream.state() for name, stream in self._streams.items()}

    def restore(self, state: dict[str, Any]) -> None:
        """Moves the streams to saved positions. A stream without one has not been read yet. That happens in a control, if a
        later stage shared its stream with the stage that is left out."""
        for name, stream in self._streams.items():
            if name in state:
                stream.restore(state[name])


def _updates(config: TrainConfig, recipe: Recipe, step: int) -> int:
    """Optimiser updates of the schedule at a step: from the last restart (or the run's start) to the next (or its end)."""
    restarts = [stage.start for stage in recipe.stages if config.stages[stage.name].restart]
    begin = max((start for start in restarts if start <= step), default=0)
    end = min((start for start in restarts if step < start < config.steps), default=config.steps)
    updates = {stage.start: config.in_stage(stage.name).learner.updates for stage in recipe.stages}
    return sum(updates[max(start for start in updates if start <= i)] for i in range(begin, end))


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


class ExampleStream:
    """Endless shuffled batches of distinct examples. Each pass has every example once, in its own order.

    If a pass ends within a batch, the batch is filled from the next pass. An example that would then be in the batch twice is
    deferred to the batch after it, so that it still comes once per pass. Batches may differ in size.

    Args:
      source: examples with random access.
      seed: seed of the shuffle.
    """

    def __init__(self, source: ExampleSource, seed: int) -> None:
        import grain.python as grain  # not with this module: with orbax, it takes more than a second

        self._source = source  # whose examples are fetched when their batch is due: their numbers are shuffled
        self._order = grain.MapDataset.range(len(source)).seed(seed).shuffle().repeat()
        self._position = 0
        self._put_off: list[int] = []  # deferred examples of the present pass

    def check(self, count: int, under_way: int = 0) -> None:
        """Checks that the source has enough examples for a batch of this size besides those that are under way.

        Raises:
          ValueError: the source has fewer examples.
        """
        if len(self._source) < count + under_way:
            beside = f" and config.rollout.partial={under_way} together" if under_way else ""
            raise ValueError(
                f"the training data has {len(self._source)} examples, fewer than config.rollout.examples={count}{beside}"
            )

    def next(self, count: int, under_way: Collection[str] = ()) -> list[Example]:
        """The next batch.

        Args:
          under_way: ids of examples of earlier batches that are still worked on; they are deferred like those that would be in
            the batch twice.

        Raises:
          ValueError: the source has fewer examples.
        """
        self.check(count, len(under_way))
        chosen: list[int] = []
        deferred, self._put_off = self._put_off, []
        order = cast(Sequence[int], self._order)  # grain's elements are only None where something is filtered out
        while deferred or len(chosen) < count:
            if deferred:
                index = deferred.pop(0)
            else:
                index = order[self._position]
                self._position += 1
            now = len(chosen) < count and index not in chosen
            if now and under_way:
                now = self._source[index].id not in under_way
            (chosen if now else self._put_off).append(index)
        return [self._source[index] for index in chosen]

    def first(self, count: int) -> Iterator[Example]:
        """The first examples of the source, at most `count`, whatever the position."""
        return (self._source[i] for i in range(min(count, len(self._source))))

    def state(self) -> dict[str, Any]:
        """The position, as JSON-serialisable data."""
        return {"position": self._position, "put_off": list(self._put_off)}

    def restore(self, state: dict[str, Any]) -> None:
        """Moves to a saved position."""
        if "position" not in state:
            raise ValueError(
                "the checkpoint is of an earlier version of routerl_jax, whose order of questions is kept otherwise"
            )
        self._position, self._put_off = state["position"], list(state.get("put_off", []))
