"""Stages that switch data, rollouts and the algorithm, and how they show in a run. The stream of examples: shuffled, without
repeats in a batch, and exact about where it stands."""

import dataclasses
import json
import pathlib
from typing import Any

import numpy as np
import pytest

from routerl_jax.core.types import Example
from routerl_jax.learning.losses import LossConfig
from routerl_jax.training import config as schema
from routerl_jax.training import evaluation
from routerl_jax.training.setup import build_recipe
from routerl_jax.training.stages import ExampleStream, Stages

KB = {"text": schema.KnowledgeConfig(directory="unused")}


def make_config(directory: pathlib.Path, **second: Any) -> schema.TrainConfig:
    path = directory / "questions.jsonl"
    rows = [{"id": str(i), "question": f"What is {i}?", "golden_answers": [str(i)]} for i in range(10)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return schema.TrainConfig(
        steps=7,
        model=schema.ModelConfig(path="unused"),
        knowledge=KB,
        data=schema.DataConfig(train=str(path), train_range=(0, 5)),
        rollout=schema.RolloutConfig(examples=2, samples=4),
        learner=schema.LearnerConfig(minibatches=2, loss=LossConfig(clip_high=0.28, kl_coef=0.1)),
        stages={
            "late": schema.StageConfig(start=5),
            "early": schema.StageConfig(reward={"em": 1.0}),
            "middle": schema.StageConfig(start=3, **second),
        },
    )


def test_each_stage_has_the_settings_that_it_names_and_else_the_run_s(tmp_path: pathlib.Path) -> None:
    config = make_config(
        tmp_path,
        data={"train_range": [5, 10]},
        rollout={"temperature": 0.5},
        learner={"advantage": "reinforce_pp_baseline", "minibatches": 1, "loss": {"kl_coef": 0.0}},
    )
    stages = Stages(config, build_recipe(config))
    assert not any(stages.at(step).restart for step in range(7))
    assert [stages.at(step).name for step in range(7)] == ["early"] * 3 + ["middle"] * 2 + ["late"] * 2
    middle = stages.at(3).config
    assert middle.data == dataclasses.replace(config.data, train_range=(5, 10))
    assert middle.rollout == dataclasses.replace(config.rollout, temperature=0.5)
    assert middle.learner == dataclasses.replace(
        config.learner,
        advantage="reinforce_pp_baseline",
        minibatches=1,
        loss=dataclasses.replace(config.learner.loss, kl_coef=0.0),
    )
    for step in (0, 5):
        stage = stages.at(step).config
        assert (stage.data, stage.rollout, stage.learner) == (config.data, config.rollout, config.learner)
    assert [stages.at(step).updates for step in range(7)] == [2 * 5 + 1 * 2] * 7
    assert stages.has_reference
    ended = [stages.ended(done) for done in range(8)]
    assert [stage and stage.name for stage in ended] == [None, None, None, "early", None, "middle", None, None]


def test_which_stages_restart(tmp_path: pathlib.Path) -> None:
    config = make_config(tmp_path, restart=True)
    stages = Stages(config, build_recipe(config))
    assert [stages.at(step).restart for step in range(7)] == [False] * 3 + [True] * 2 + [False] * 2
    assert [stages.at(step).updates for step in range(7)] == [2 * 3] * 3 + [2 * 4] * 4  # what each schedule spans
    shorter = dataclasses.replace(config, steps=2)  # it ends before the stage that restarts
    assert Stages(shorter, build_recipe(shorter)).at(0).updates == 2 * 2


def test_stages_with_the_same_questions_share_a_stream_and_all_go_on_where_they_were(tmp_path: pathlib.Path) -> None:
    config = make_config(tmp_path, data={"train_range": (5, 10)})
    recipe = build_recipe(config)
    whole, resumed = Stages(config, recipe), Stages(config, recipe)

    def ids(stages: Stages, step: int) -> list[str]:
        return [example.id for example in stages.at(step).examples()]

    first = [ids(whole, step) for step in range(4)]
    resumed.restore(json.loads(json.dumps(whole.state())))
    rest = [ids(whole, step) for step in range(4, 7)]
    assert [ids(resumed, step) for step in range(4, 7)] == rest
    assert all(int(i) >= 5 for batch in (first[3], rest[0]) for i in batch)
    assert all(int(i) < 5 for batch in (*first[:3], *rest[1:]) for i in batch)
    config = dataclasses.replace(config, stages={"only": schema.StageConfig()})
    one = Stages(config, build_recipe(config))
    assert [example.id for example in one.at(0).examples()] == first[0]


def test_stages_may_take_different_numbers_of_the_same_questions(tmp_path: pathlib.Path) -> None:
    """One order for all, without repeats; too few for the largest is told at once, by the stage that wants them or not."""
    config = make_config(tmp_path, rollout={"examples": 1})
    stages = Stages(config, build_recipe(config))
    taken = [[example.id for example in stages.at(step).examples()] for step in (0, 3, 4)]
    assert list(map(len, taken)) == [2, 1, 1]
    assert len({name for names in taken for name in names}) == 4
    config = make_config(tmp_path, rollout={"examples": 6})
    with pytest.raises(ValueError, match=r"has 5 examples, fewer than config.rollout.examples=6"):
        Stages(config, build_recipe(config))


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"learner": {"advantag": "grpo"}}, r"config.stages.middle.learner.advantag; did you mean .*advantage"),
        ({"learner": {"optimizer": {"lr": 1.0}}}, r"unknown config key config.stages.middle.learner.optimizer"),
        ({"learner": {"advantage": "gppo"}}, r"config.stages.middle.learner.*unknown advantage 'gppo'"),
        (
            {"learner": {"loss": {"kl_coef": "0"}}},
            r"config.stages.middle.learner.loss.kl_coef='0' must be of type float",
        ),
        ({"data": {"test": "x"}}, r"config.stages.middle.data.test"),
        ({"rollout": {"samples": 1}}, r"config.stages.middle: .*compares attempts"),
    ],
)
def test_what_a_stage_cannot_change(tmp_path: pathlib.Path, second: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_config(tmp_path, **second)


def test_a_stage_may_not_be_called_like_another_policy_of_the_results() -> None:
    with pytest.raises(ValueError, match=r"config.stages.trained: call it something else"):
        schema.TrainConfig(
            model=schema.ModelConfig(path="unused"), knowledge=KB, stages={"trained": schema.StageConfig()}
        )


def test_two_stages_cannot_start_together() -> None:
    """Else the first of them would be passed over without a word."""
    with pytest.raises(ValueError, match=r"config.stages: two stages start at the same step"):
        schema.TrainConfig(
            model=schema.ModelConfig(path="unused"),
            knowledge=KB,
            stages={"one": schema.StageConfig(), "two": schema.StageConfig()},
        )


def test_a_control_begins_the_questions_that_the_stage_it_lacks_would_have_begun(tmp_path: pathlib.Path) -> None:
    """The last two stages share a stream, which is known by the first of them."""
    config = make_config(tmp_path, data={"train_range": (5, 10)})
    stages = {**config.stages, "late": dataclasses.replace(config.stages["late"], data={"train_range": (5, 10)})}
    config = dataclasses.replace(config, stages=stages)
    whole = Stages(config, build_recipe(config))
    for step in range(3):
        whole.at(step).examples()
    without = dataclasses.replace(config, stages={name: stages[name] for name in ("early", "late")})
    control = Stages(without, build_recipe(without))
    control.restore(json.loads(json.dumps(whole.state())))
    assert control.at(3).examples() == whole.at(0).examples()
    assert control.at(5).examples() == whole.at(3).examples()


def test_what_was_measured_with_other_settings_is_left_out(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A resumed run may be evaluated on more questions: rows on fewer are no comparison."""
    asked = {"questions": 4, "k": 2}
    evaluation.save_table(tmp_path, "warm_start", {"warm_start": {"em": 0.5}}, asked)
    evaluation.save_table(tmp_path, "first", {"first": {"em": 0.7}}, {**asked, "questions": 8})
    assert evaluation.saved_tables(tmp_path, ["warm_start", "first", "second"], asked) == {"warm_start": {"em": 0.5}}
    assert "first.json was measured with {'questions': 8, 'k': 2}" in caplog.text


def test_a_run_in_two_stages(small_run: pathlib.Path) -> None:
    """The second of `small_run` has other questions, three samples, no KL and REINFORCE++-baseline."""
    whole = small_run / "whole"
    rows = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert [row["stage"] for row in rows] == ["first"] * 2 + ["second"] * (len(rows) - 2)
    assert ["actor/kl" in row for row in rows] == [True] * 2 + [False] * (len(rows) - 2)
    episodes = [json.loads(line) for line in (whole / "episodes" / "step-000002.jsonl").read_text().splitlines()]
    assert {episode["sample"] for episode in episodes} <= {0, 1, 2}
    assert len(episodes) == 12
    agents = json.loads((whole / "results.json").read_text())["agents"]
    assert list(agents) == ["first", "trained"]
    assert agents["first"]["n"] == agents["trained"]["n"]


class Source:
    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> Example:
        return Example(id=str(index), question="?", answers=("!",))


def take(stream: ExampleStream, count: int) -> list[list[str]]:
    return [[example.id for example in stream.next(5)] for _ in range(count)]


@pytest.mark.parametrize("count", [1, 2, 5, 7, 12, 22, 23])
def test_every_pass_has_every_question_once_and_an_order_of_its_own(count: int) -> None:
    """Also where a pass does not divide by the batch; no batch has a question twice."""
    stream = ExampleStream(Source(), seed=1)
    batches = [[example.id for example in stream.next(count)] for _ in range(-(-7 * 23 // count))]
    assert all(len(set(batch)) == count for batch in batches)
    visited = [id for batch in batches for id in batch]
    passes = [visited[i * 23 : (i + 1) * 23] for i in range(7)]
    assert all(sorted(one, key=int) == [str(i) for i in range(23)] for one in passes)
    assert len({tuple(one) for one in passes}) == 7
    assert passes[0] != sorted(passes[0], key=int)


def test_batches_of_changing_sizes_keep_passes_whole() -> None:
    """What is put off for a large batch may be more than the next one takes."""
    sizes = np.random.default_rng(0).integers(1, 24, 60).tolist()
    stream = ExampleStream(Source(), seed=4)
    batches = [[example.id for example in stream.next(count)] for count in sizes]
    assert all(len(set(batch)) == count for batch, count in zip(batches, sizes))
    visited = [id for batch in batches for id in batch]
    for i in range(len(visited) // 23):
        assert len(set(visited[i * 23 : (i + 1) * 23])) == 23


def test_seeds() -> None:
    assert take(ExampleStream(Source(), seed=1), 6) == take(ExampleStream(Source(), seed=1), 6)
    assert take(ExampleStream(Source(), seed=1), 6) != take(ExampleStream(Source(), seed=2), 6)


@pytest.mark.parametrize("position", [0, 1, 4, 5, 10, 11, 14])
def test_a_restored_stream_continues(position: int) -> None:
    whole = ExampleStream(Source(), seed=3)
    take(whole, position)
    state = json.loads(json.dumps(whole.state()))
    rest = take(whole, 6)
    other = ExampleStream(Source(), seed=3)
    other.restore(state)
    assert take(other, 6) == rest
    assert bool(state["put_off"]) == (position in (10, 14))  # the ends of the second and the third pass


def test_a_position_that_was_asked_for_stays_what_it_was() -> None:
    """With rollouts ahead, that of a step is kept while the next one's questions are drawn."""
    stream = ExampleStream(Source(), seed=3)
    take(stream, 10)
    state = stream.state()
    kept = json.dumps(state)
    take(stream, 2)
    assert json.dumps(state) == kept


def test_a_checkpoint_that_knows_of_nothing_put_off() -> None:
    """Those of before: they passed over the rest of a pass, so nothing is owed."""
    stream, other = (ExampleStream(Source(), seed=3) for _ in range(2))
    other.restore({"position": 10})
    take(stream, 2)
    assert take(other, 3) == take(stream, 3)


def test_batches_may_differ_in_size() -> None:
    """One order for all: what a smaller batch has taken a larger one does not take again within the epoch."""
    stream, other = ExampleStream(Source(), seed=1), ExampleStream(Source(), seed=1)
    first = [example.id for count in (5, 9, 5) for example in stream.next(count)]
    assert len(set(first)) == 19
    assert first[:18] == [example.id for _ in range(2) for example in other.next(9)]
    assert len({example.id for example in stream.next(9)}) == 9  # four were left, five are of the next pass


def test_too_few_examples() -> None:
    with pytest.raises(ValueError, match=r"has 23 examples, fewer than config.rollout.examples=24"):
        ExampleStream(Source(), seed=0).check(24)
    with pytest.raises(ValueError, match=r"has 23 examples"):
        ExampleStream(Source(), seed=0).next(24)


def test_a_position_that_was_kept_otherwise_is_refused() -> None:
    """Checkpoints of earlier versions: going on from the beginning would repeat questions without a word."""
    with pytest.raises(ValueError, match=r"an earlier version of routerl_jax"):
        ExampleStream(Source(), seed=0).restore({"epoch": 1})
