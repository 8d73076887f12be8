"""Stages that switch data, rollouts and the algorithm, and how they show in a run."""

import dataclasses
import json
import pathlib
from typing import Any

import pytest

from routerl_jax.learning.objective import LossConfig
from routerl_jax.training import config as schema
from routerl_jax.training import evaluation
from routerl_jax.training.setup import build_recipe
from routerl_jax.training.stages import Stages

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
