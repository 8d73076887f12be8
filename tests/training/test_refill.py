"""Groups without signal are followed by the next questions', in a bounded number of rounds."""

import dataclasses
import pathlib
from collections.abc import Collection
from typing import Any

import numpy as np
import pytest

from routerl_jax.core.types import Episode, Example, Turn
from routerl_jax.training import config as schema
from routerl_jax.training import rollouts as rollouts_module
from routerl_jax.training.profiler import Clock
from routerl_jax.training.rollouts import Rollouts, RolloutSource
from routerl_jax.training.stages import ExampleStream
from tests import tiny
from tests.training.steps import OneStage, take_step
from tests.training.test_rl import KB, make_run

SAMPLES = 4


def by_question(episode: Episode) -> float:
    """A reward term: attempts at question N have equal rewards, but where N is a multiple of 3 one of them is right."""
    return float(int(episode.example.id) % 3 == 0 and episode.sample == 1)


class _InOrder(ExampleStream):
    """The source's questions in order, over and over."""

    def __init__(self, count: int) -> None:
        self.drawn, self._count = 0, count

    def next(self, count: int, under_way: Collection[str] = ()) -> list[Example]:
        ids = [str((self.drawn + i) % self._count) for i in range(count)]
        self.drawn += count
        return [Example(id=name, question="What?", answers=("!",)) for name in ids]


class _Stage:
    """What a source of rollouts reads of a stage."""

    def __init__(self, refill: int, questions: int) -> None:
        self.config = schema.TrainConfig(
            model=schema.ModelConfig(path="tiny"),
            knowledge=KB,
            rollout=schema.RolloutConfig(examples=4, samples=SAMPLES, refill=refill),
        )
        self.stream = _InOrder(questions)

    def examples(self) -> list[Example]:
        return self.stream.next(self.config.rollout.examples)

    def reward(self, episodes: list[Episode]) -> list[dict[str, float]]:
        return [{"total": by_question(episode)} for episode in episodes]


class _Engine:
    stats, version = None, 7


def attempts(examples: list[Example]) -> list[Episode]:
    sequences = iter(tiny.random_sequences(len(examples) * SAMPLES))
    return [
        Episode(
            example=example,
            sample=sample,
            answer=None,
            turns=[Turn(text="?", stop_reason="stop", tokens=1)],
            sequences=[next(sequences)],
        )
        for example in examples
        for sample in range(SAMPLES)
    ]


def rolled(monkeypatch: pytest.MonkeyPatch, refill: int, questions: int = 30) -> tuple[Rollouts, list[list[str]], Any]:
    """The rollouts of a step, the questions of every round, and the stage."""
    rounds: list[list[str]] = []

    def driver(agent: Any, examples: list[Example], *_: Any, **__: Any) -> list[Episode]:
        rounds.append([example.id for example in examples])
        return attempts(examples)

    monkeypatch.setattr(rollouts_module, "run", driver)
    stage: Any = _Stage(refill, questions)
    engine: Any = _Engine()
    return RolloutSource(OneStage(stage), stage, engine, {}).roll_out(2), rounds, stage


def questions_of(found: Rollouts, indices: np.ndarray) -> list[str]:
    return list(dict.fromkeys(found.episodes[i].example.id for i in indices))


@pytest.mark.parametrize(
    ("refill", "rounds", "kept"),
    [
        (0, ["0123"], "0123"),
        (1, ["0123", "45"], "0345"),  # 4 and 5 teach nothing either, but this was the last round
        (2, ["0123", "45", "67"], "0367"),
        (3, ["0123", "45", "67", "8"], "0368"),
        (9, ["0123", "45", "67", "8", "9"], "0369"),  # all teach: no further round
    ],
)
def test_rounds(refill: int, rounds: list[str], kept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found, asked, stage = rolled(monkeypatch, refill)
    assert asked == [list(ids) for ids in rounds]
    assert found.refills == len(rounds) - 1
    assert stage.stream.drawn == sum(map(len, rounds))
    assert questions_of(found, np.arange(len(found.episodes))) == [*"".join(rounds)]
    assert questions_of(found, found.learned) == [*kept]
    numbers = [found.groups[i] for i in range(0, len(found.episodes), SAMPLES)]
    assert numbers == list(range(len(numbers)))
    assert (found.step, found.version) == (2, 7)
    assert all("total" in episode.rewards for episode in found.episodes)


def test_a_question_comes_once_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of five questions, two are asked in place of 1 and 2: 4, and 0 again, which is skipped; 2 then keeps its place."""
    found, asked, _ = rolled(monkeypatch, refill=4, questions=5)
    assert asked == [[*"0123"], ["4"]]  # then 1 is drawn for 4, and it has been asked
    assert questions_of(found, found.learned) == [*"0234"]


def test_replaced_groups_are_measured_and_not_learnt_from(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the bound at one round: of questions 0 to 3, 1 and 2 are replaced; 4 and 5 stay, and are dropped without signal."""
    monkeypatch.setattr(rollouts_module, "run", lambda agent, examples, *_, **__: attempts(examples))
    learner = schema.LearnerConfig(micro_tokens=256, advantage="batch_std")
    stage, agent, run_, engine = make_run(tmp_path, "given", learner, refill=1)
    config = dataclasses.replace(stage.config, rollout=dataclasses.replace(stage.config.rollout, examples=4))
    stage = dataclasses.replace(stage, config=config, reward=_Stage(1, 30).reward, stream=_InOrder(30))
    with (clock := Clock())("step"):
        source = RolloutSource(OneStage(stage), agent, engine, {})
        metrics = take_step(source, stage, run_, engine, {}, 0, clock)
    assert (metrics["rollout/refills"], metrics["rollout/replaced_groups"]) == (1, 2)
    assert metrics["rollout/frac_reward_zero_std"] == pytest.approx(4 / 6)
    assert metrics["reward/total"] == pytest.approx(2 / 24)  # of all that was sampled
    assert metrics["actor/trained_sequences"] == 2 * SAMPLES


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"learner": schema.LearnerConfig(advantage="reinforce_pp")}, r"advantage='reinforce_pp' learns from them"),
        ({"learner": schema.LearnerConfig(drop_no_signal=False)}, r"drop_no_signal=False keeps them"),
        ({"learner": schema.LearnerConfig(credit="turn")}, r"credit='turn' they may teach"),
        ({"learner": schema.LearnerConfig(reward_kl_coef=0.1)}, r"reward_kl_coef=0.1 they teach all the same"),
        ({"data": schema.DataConfig(epochs=2), "steps": 0}, r"config.data.epochs=2 counts steps"),
    ],
)
def test_settings_that_do_not_go_together(changes: dict[str, Any], complaint: str) -> None:
    fields: dict[str, Any] = {"model": schema.ModelConfig(path="tiny"), "knowledge": KB}
    with pytest.raises(ValueError, match=rf"config.rollout.refill=2 replaces groups .*{complaint}"):
        schema.TrainConfig(**fields, rollout=schema.RolloutConfig(refill=2), **changes)
