"""A control is the run that would have been without the stage, to the bit."""

import dataclasses
import json
import pathlib

import numpy as np
import pytest
from safetensors.numpy import load_file

from routerl_jax.training import config as schema
from routerl_jax.training.rl import train_rl
from tests.training.small_run import make_config
from tests.training.test_resume import untimed_rows

CONTROL = {"first_only": schema.ControlConfig(without="second")}


def weights(workdir: pathlib.Path) -> dict[str, np.ndarray]:
    return load_file(workdir / "policy" / "model.safetensors")


def test_a_control_continues_where_the_stage_began(small_run: pathlib.Path, tmp_path: pathlib.Path):
    config = make_config(small_run, controls=CONTROL, rollout=schema.RolloutConfig(examples=4, samples=2))
    results = train_rl(config, tmp_path / "run")
    control = tmp_path / "run" / "controls" / "first_only"
    plain = dataclasses.replace(config, controls={}, stages={"first": config.stages["first"]})
    train_rl(plain, tmp_path / "plain")

    rows = untimed_rows(control)
    assert [(row["step"], row["stage"]) for row in rows] == [(2, "first")]
    assert rows == untimed_rows(tmp_path / "plain")[2:]
    for name, tensor in weights(tmp_path / "plain").items():
        np.testing.assert_array_equal(tensor, weights(control)[name])
    assert any((tensor != weights(control)[name]).any() for name, tensor in weights(tmp_path / "run").items())

    alone = json.loads((control / "results.json").read_text())
    assert results["agents"]["first_only"] == alone["agents"]["trained"]
    assert {"em_difference", "mcnemar_p", "cost_reduction"} <= results["comparisons"]["first_only"].keys()
    assert results == json.loads((tmp_path / "run" / "results.json").read_text())

    again = train_rl(config, tmp_path / "run", resume=True)  # finished: nothing is trained, the same is found
    assert untimed_rows(control) == rows
    assert again["agents"] == results["agents"]
    assert again["comparisons"] == results["comparisons"]


@pytest.mark.parametrize(
    ("without", "message"),
    [
        ("third", r"controls.c.without='third' is no stage; there are: first, second"),
        ("first", "must begin after step 0"),
    ],
)
def test_what_a_control_can_be(without: str, message: str):
    stages = {"first": schema.StageConfig(), "second": schema.StageConfig(start=2)}
    with pytest.raises(ValueError, match=message):
        schema.TrainConfig(
            model=schema.ModelConfig(path="somewhere"),
            knowledge={"text": schema.KnowledgeConfig()},
            stages=stages,
            controls={"c": schema.ControlConfig(without=without)},
        )
