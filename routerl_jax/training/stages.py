"""The stages of a run, each with its reward, its settings and its questions."""

from __future__ import annotations

import dataclasses
from typing import Any

from routerl_jax.core.types import Example
from routerl_jax.data.overlap import examples_of
from routerl_jax.data.readers import ExampleSource
from routerl_jax.data.trajectories import check_retrievers
from routerl_jax.recipes.recipe import Recipe, Reward
from routerl_jax.rewards.retrieval import gold_passages_of
from routerl_jax.training.config import TrainConfig
from routerl_jax.training.data import ExampleStream
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
    """All stages of a run. Stages on the same questions share one stream of them.

    Raises:
      ValueError: the questions of a stage can't be read, are fewer than one step needs, are golden steps that use an unknown
        knowledge base, or name no gold passage although the reward counts them (`found`).
    """

    def __init__(self, config: TrainConfig, recipe: Recipe) -> None:
        self._streams: dict[str, ExampleStream] = {}  # by the first stage that has it
        self._stages: list[RunStage] = []
        self._steps = config.steps
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
            if 0 < completed < self._steps and any(s.start == completed for s in self._stages)
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
    minibatches = {stage.start: config.in_stage(stage.name).learner.minibatches for stage in recipe.stages}
    return sum(minibatches[max(start for start in minibatches if start <= i)] for i in range(begin, end))
