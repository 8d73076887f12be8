"""Runs whose length is given as passes over their questions."""

import dataclasses
import json
import pathlib
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from routerl_jax.core.config import from_config_dict, to_config_dict
from routerl_jax.core.types import Example
from routerl_jax.parallel.mesh import single_device_mesh
from routerl_jax.training import config as schema
from routerl_jax.training import rl
from routerl_jax.training.setup import build_recipe
from routerl_jax.training.stages import ExampleStream, Stages, count_steps
from tests.training.test_controls import small_config

KB = {"text": schema.KnowledgeConfig(directory="unused")}


def questions(path: pathlib.Path, count: int) -> str:
    rows = [{"id": str(i), "question": f"What is {i}?", "golden_answers": [str(i)]} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def two_stages(directory: pathlib.Path, **changes: Any) -> schema.TrainConfig:
    """11 questions, four in a step; then 25 others, three in a step, for two passes."""
    fields: dict[str, Any] = {
        "steps": 0,
        "model": schema.ModelConfig(path="unused"),
        "knowledge": KB,
        "data": schema.DataConfig(train=questions(directory / "second.jsonl", 25), epochs=2),
        "rollout": schema.RolloutConfig(examples=3, samples=4),
        "stages": {
            "b": schema.StageConfig(
                data={"train": questions(directory / "first.jsonl", 11), "epochs": 1}, rollout={"examples": 4}
            ),
            "a": schema.StageConfig(after="b"),
        },
    }
    return schema.TrainConfig(**{**fields, **changes})


def test_steps_and_starts_follow_from_the_passes(tmp_path: pathlib.Path) -> None:
    """By hand: 11 / 4 in 3 steps, 2 x 25 / 3 in 17."""
    config = two_stages(tmp_path)
    assert from_config_dict(schema.TrainConfig, to_config_dict(config)) == config
    counted = count_steps(config)
    assert (counted.steps, counted.stages["b"].start, counted.stages["a"].start) == (20, 0, 3)
    assert not counted.uncounted
    assert count_steps(counted) == counted
    again = from_config_dict(schema.TrainConfig, json.loads(json.dumps(dataclasses.asdict(counted))))
    assert again == counted  # what a workdir's config.json holds
    stages = Stages(counted, build_recipe(counted))
    visits = [[example.id for example in stages.at(step).examples()] for step in range(20)]
    first, second = (np.bincount([int(id) for batch in part for id in batch]) for part in (visits[:3], visits[3:]))
    assert (first.min(), first.sum(), second.min(), second.sum()) == (1, 12, 2, 51)
    assert (len(first), len(second)) == (11, 25)


def test_a_start_that_is_given_stays(tmp_path: pathlib.Path) -> None:
    """The first stage is five steps long, whatever its questions are; the second makes its passes."""
    config = two_stages(
        tmp_path,
        data=schema.DataConfig(train=questions(tmp_path / "q.jsonl", 25)),
        stages={"one": schema.StageConfig(), "two": schema.StageConfig(start=5, data={"epochs": 2})},
    )
    counted = count_steps(config)
    assert (counted.stages["two"].start, counted.steps) == (5, 22)


def test_a_supervised_run_has_steps(tmp_path: pathlib.Path) -> None:
    """From the same configuration: it has no stages."""
    supervised = two_stages(tmp_path, kind="sft", steps=9)
    assert count_steps(supervised) == supervised


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 7}, r"config.steps=7 and data.epochs \(stage 'b'\) are both given: set config.steps=0"),
        (
            {"stages": {"b": schema.StageConfig(data={"epochs": 0}), "a": schema.StageConfig(after="b")}},
            "config.stages.a.after='b' is no stage whose data.epochs says where it ends",
        ),
        (
            {"stages": {"b": schema.StageConfig(), "a": schema.StageConfig(after="c")}},
            "config.stages.a.after='c' is no stage whose data.epochs",
        ),
        (
            {"stages": {"b": schema.StageConfig(), "a": schema.StageConfig(start=3, after="b")}},
            "a has both start=3 and after='b'",
        ),
        (
            {"stages": {name: schema.StageConfig(after="b" * (name != "b")) for name in "abc"}},
            "two stages start at the same step",
        ),
        ({"stages": {"b": schema.StageConfig(data={"epochs": -1})}}, r"epochs=-1 must not be negative"),
        (
            {"stages": {"a": schema.StageConfig(after="b"), "b": schema.StageConfig(after="a")}},
            "no stage starts at step 0",
        ),
    ],
)
def test_what_makes_no_sense(changes: dict[str, Any], message: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match=message):
        two_stages(tmp_path, **changes)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (
            {"b": schema.StageConfig(), "a": schema.StageConfig(start=3)},
            "config.stages.a begins at step 3, and the passes of 'b' before it end at 17: give config.stages.a.after='b'",
        ),
        (
            {"b": schema.StageConfig(), "a": schema.StageConfig(after="b", data={"epochs": 0})},
            "config.stages.a is the last stage, and without data.epochs it has no end",
        ),
        (
            {"b": schema.StageConfig(), "a": schema.StageConfig(after="c"), "c": schema.StageConfig(after="a")},
            "config.stages: a, c begin after each other",
        ),
    ],
)
def test_passes_that_do_not_add_up(stages: dict[str, schema.StageConfig], message: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match=message):
        count_steps(two_stages(tmp_path, stages=stages))


def passing(home: pathlib.Path) -> schema.TrainConfig:
    """Five questions, two in a step, one pass; then another; and the control without it, whose ratio is that of sequences."""
    run = small_config(home)
    optimizer = dataclasses.replace(run.learner.optimizer, schedule="constant")
    first, second = run.stages["first"], run.stages["second"]
    loss = dataclasses.replace(run.learner.loss, ratio="sequence")
    return dataclasses.replace(
        run,
        steps=0,
        data=dataclasses.replace(run.data, train_range=(0, 5), epochs=1),
        stages={"first": first, "second": dataclasses.replace(second, start=0, after="first")},
        controls={"first_only": schema.ControlConfig(without="second")},
        learner=dataclasses.replace(run.learner, aggregation="sequence", loss=loss, optimizer=optimizer),
        checkpoint=schema.CheckpointConfig(every=1),
    )


@pytest.mark.slow
def test_a_run_of_passes_its_control_and_its_resume(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped after its fourth step, when a pass is half done, the run goes on to the same weights."""
    monkeypatch.setattr(rl, "build_mesh", lambda _: single_device_mesh())
    config = passing(tmp_path / "home")
    seen: list[str] = []
    following = ExampleStream.next

    def noted(self: ExampleStream, count: int) -> list[Example]:
        examples = following(self, count)
        seen.extend(example.id for example in examples)
        return examples

    monkeypatch.setattr(ExampleStream, "next", noted)
    results = rl.train_rl(config, tmp_path / "run")
    written = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (written["steps"], written["stages"]["second"]["start"], results["steps"]) == (6, 3, 6)
    assert set(results["comparisons"]) == {"first_only"}
    whole, control = seen[:12], seen[12:]
    assert [sorted(whole[i : i + 5]) for i in (0, 5)] == [sorted(set(whole))] * 2
    assert control == whole[6:]

    shorter = dataclasses.replace(count_steps(config), steps=4, controls={})
    rl.train_rl(shorter, tmp_path / "stopped")
    rl.train_rl(dataclasses.replace(config, controls={}), tmp_path / "stopped", resume=True)
    weights = [load_file(tmp_path / name / "policy" / "model.safetensors") for name in ("run", "stopped")]
    assert all(np.array_equal(value, weights[1][name]) for name, value in weights[0].items())
