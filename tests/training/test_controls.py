"""A control is the run that would have been without the stage, to the bit."""

import dataclasses
import json
import pathlib
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from routerl_jax.core.config import from_config_dict
from routerl_jax.core.types import Episode
from routerl_jax.learning.checkpoints import Checkpoints
from routerl_jax.learning.optimizer import OptimizerConfig
from routerl_jax.models.huggingface import save_pretrained
from routerl_jax.parallel.mesh import single_device_mesh
from routerl_jax.training import config as schema
from routerl_jax.training import rl
from routerl_jax.training.controls import control_config
from routerl_jax.training.run import Run
from tests import tiny
from tests.training.small_run import make_config
from tests.training.test_resume import untimed_rows


def length(episode: Episode) -> float:
    """A reward that even random weights get, and each episode another."""
    return float(sum(len(turn.text) for turn in episode.turns))


def weights(workdir: pathlib.Path) -> dict[str, np.ndarray]:
    return load_file(workdir / "policy" / "model.safetensors")


def small_config(home: pathlib.Path, **changes: Any) -> schema.TrainConfig:
    """Random weights, a step for long episodes and one for short ones."""
    run = make_config(home)
    save_pretrained(tiny.model(), home / "policy")
    return dataclasses.replace(
        run,
        steps=2,
        model=schema.ModelConfig(path=str(home / "policy")),
        knowledge={"text": run.knowledge["text"]},
        engine=dataclasses.replace(run.engine, rows=4),
        agent=dataclasses.replace(run.agent, max_searches=1, max_turn_tokens=16),
        rollout=schema.RolloutConfig(examples=2, samples=2),
        stages={
            "first": schema.StageConfig(reward={f"{__name__}:length": 1.0}),
            "second": schema.StageConfig(start=1, reward={f"{__name__}:length": -1.0}),
        },
        learner=dataclasses.replace(run.learner, minibatches=1),
        evaluation=schema.EvaluationConfig(every=0, final_examples=1, before=False, baselines=False),
        **changes,
    )


@pytest.mark.slow
def test_a_control_continues_where_the_stage_began(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rl, "build_mesh", lambda _: single_device_mesh())
    config = small_config(tmp_path / "home", controls={"first_only": schema.ControlConfig(without="second")})
    results = rl.train_rl(config, tmp_path / "run")
    control = tmp_path / "run" / "controls" / "first_only"
    plain = dataclasses.replace(config, controls={}, stages={"first": config.stages["first"]})
    rl.train_rl(plain, tmp_path / "plain")

    rows = untimed_rows(control)
    assert [(row["step"], row["stage"]) for row in rows] == [(1, "first")]
    assert rows == untimed_rows(tmp_path / "plain")[1:]
    for name, tensor in weights(tmp_path / "plain").items():
        np.testing.assert_array_equal(tensor, weights(control)[name])
    assert any((tensor != weights(control)[name]).any() for name, tensor in weights(tmp_path / "run").items())

    alone = json.loads((control / "results.json").read_text())
    assert results["agents"]["first_only"] == alone["agents"]["first_only"]
    assert {"em_difference", "mcnemar_p", "cost_reduction"} <= results["comparisons"]["first_only"].keys()
    assert results == json.loads((tmp_path / "run" / "results.json").read_text())

    again = rl.train_rl(config, tmp_path / "run", resume=True)  # finished: nothing is trained, the same is found
    assert untimed_rows(control) == rows
    assert again["agents"] == results["agents"]
    assert again["comparisons"] == results["comparisons"]


@pytest.mark.slow
def test_a_control_without_the_first_stage_is_the_second_one_alone(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    """R1-Searcher's "without stage 1" (section 4.2), over as many steps as the run has."""
    monkeypatch.setattr(rl, "build_mesh", lambda _: single_device_mesh())
    config = small_config(tmp_path / "home", controls={"second_only": schema.ControlConfig(without="first")})
    results = rl.train_rl(config, tmp_path / "run")
    alone = dataclasses.replace(config.stages["second"], start=0)
    plain = rl.train_rl(dataclasses.replace(config, controls={}, stages={"second": alone}), tmp_path / "plain")
    control = tmp_path / "run" / "controls" / "second_only"
    assert [(row["step"], row["stage"]) for row in untimed_rows(control)] == [(0, "second"), (1, "second")]
    assert untimed_rows(control) == untimed_rows(tmp_path / "plain")
    for name, tensor in weights(tmp_path / "plain").items():
        np.testing.assert_array_equal(tensor, weights(control)[name])
    assert results["agents"]["second_only"] == plain["agents"]["trained"]
    assert results["comparisons"].keys() == {"second_only"}


@pytest.mark.slow
def test_a_control_with_other_rewards_and_questions_begins_where_the_run_began(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(rl, "build_mesh", lambda _: single_device_mesh())
    shorter = {"main": schema.StageConfig(reward={f"{__name__}:length": -1.0})}
    control = schema.ControlConfig(stages=shorter, data={"train_range": (4, 16)})
    config = small_config(tmp_path / "home", controls={"shorter": control})
    assert from_config_dict(schema.TrainConfig, json.loads(json.dumps(dataclasses.asdict(config)))) == config
    results = rl.train_rl(config, tmp_path / "run")
    data = dataclasses.replace(config.data, train_range=(4, 16))
    plain = rl.train_rl(dataclasses.replace(config, controls={}, stages=shorter, data=data), tmp_path / "plain")
    alone = tmp_path / "run" / "controls" / "shorter"
    assert [(row["step"], row["stage"]) for row in untimed_rows(alone)] == [(0, "main"), (1, "main")]
    assert untimed_rows(alone) == untimed_rows(tmp_path / "plain")
    for name, tensor in weights(tmp_path / "plain").items():
        np.testing.assert_array_equal(tensor, weights(alone)[name])
    assert results["agents"]["shorter"] == plain["agents"]["trained"]
    assert results["comparisons"].keys() == {"shorter"}


def test_a_control_with_another_agent_changes_these_settings_alone(tmp_path: pathlib.Path) -> None:
    control = schema.ControlConfig(agent={"k": 1, "settings": {"force_answer": False}})
    config = small_config(tmp_path / "home", controls={"c": control})
    config = dataclasses.replace(config, agent=dataclasses.replace(config.agent, settings={"thoughts": True}))
    assert from_config_dict(schema.TrainConfig, json.loads(json.dumps(dataclasses.asdict(config)))) == config
    changed = control_config(config, tmp_path / "run", "c")
    assert changed.agent == dataclasses.replace(config.agent, k=1, settings={"thoughts": True, "force_answer": False})
    assert (changed.stages, changed.data, changed.steps) == (config.stages, config.data, config.steps)


@pytest.mark.parametrize(
    ("control", "message"),
    [
        ({"agent": {"turns": 3}}, r"config.controls.c.agent.turns"),
        ({"agent": {"k": 3}, "without": "first"}, r"config.controls.c: give one of `without`"),
        ({"data": {"test": "x"}}, r"config.controls.c.data.test"),
        ({"stages": {"main": schema.StageConfig(data={"test": "x"})}}, r"config.controls.c: .*config.stages.main.data"),
        ({"stages": {"main": schema.StageConfig(data={"epochs": 2})}}, r"c.stages.main: a control takes as many steps"),
        ({"data": {"train": "x"}, "without": "first"}, r"config.controls.c: give one of `without`"),
        ({}, r"config.controls.c: give one of `without`"),
    ],
)
def test_what_a_control_may_change(tmp_path: pathlib.Path, control: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        small_config(tmp_path, controls={"c": schema.ControlConfig(**control)})


@pytest.mark.parametrize(
    ("control", "message"),
    [
        ({"stages": {"main": schema.StageConfig(reward={"bleu": 1.0})}}, r"config.controls.c: .*'bleu'"),
        ({"data": {"train": "gone.jsonl"}}, r"gone.jsonl"),
        ({"agent": {"settings": {"looks": False}}}, r"config.controls.c: .*looks"),
        ({"stages": {"c": schema.StageConfig(reward={"em": 1.0})}}, r"config.controls.c.stages.c: call the stage"),
        ({"stages": {"no_search": schema.StageConfig(reward={"em": 1.0})}}, r"config.controls.c: .*stages.no_search"),
        (
            {"supervised": schema.WarmStartConfig(steps=1, demonstrations="gone.jsonl")},
            r"config.controls.c.supervised.demonstrations='gone.jsonl' is neither",
        ),
        (
            {"supervised": schema.WarmStartConfig(steps=1, demonstrations=__file__, select={"bleu": 1.0})},
            r"config.controls.c.supervised.select: .*'bleu'",
        ),
        ({"data": {"train_range": (0, 1)}}, r"1 examples, fewer than config.rollout.examples=2"),
    ],
)
def test_a_control_is_looked_at_before_the_run_begins(
    tmp_path: pathlib.Path, control: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(rl, "build_policy", lambda *_: pytest.fail("the run has begun"))
    config = small_config(tmp_path / "home", controls={"c": schema.ControlConfig(**control)})
    with pytest.raises(ValueError, match=message):
        rl.train_rl(config, tmp_path / "run")


def test_of_several_stages_any_may_be_left_out(tmp_path: pathlib.Path):
    stages = {
        "third": schema.StageConfig(start=9, restart=True),
        "first": schema.StageConfig(reward={"em": 1.0}),
        "second": schema.StageConfig(start=4, restart=True, reward={"f1": 1.0}),
    }
    run = schema.TrainConfig(
        steps=12,
        model=schema.ModelConfig(path="somewhere"),
        knowledge={"text": schema.KnowledgeConfig()},
        stages=stages,
        controls={f"no_{name}": schema.ControlConfig(without=name) for name in stages},
    )
    without = {
        name: {key: (stage.start, stage.restart) for key, stage in control_config(run, tmp_path, name).stages.items()}
        for name in run.controls
    }
    assert without == {
        "no_first": {"second": (0, False), "third": (9, True)},
        "no_second": {"first": (0, False), "third": (9, True)},
        "no_third": {"first": (0, False), "second": (4, True)},
    }


@pytest.mark.slow
def test_the_control_s_beginning_is_there_before_the_run_s_own_checkpoint(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    """A run that is killed between the two and resumed from its own would pass the stage's beginning by."""
    monkeypatch.setattr(rl, "build_mesh", lambda _: single_device_mesh())
    save = Run.save
    saved: list[str] = []

    def deadly_save(self: Run, step: int, *, into: Checkpoints | None = None, **extra: Any) -> None:
        save(self, step, into=into, **extra)
        saved.append(f"{'control' if into else 'run'} {step}")
        if into is None:
            raise KeyboardInterrupt

    monkeypatch.setattr(Run, "save", deadly_save)
    config = small_config(tmp_path / "home", controls={"first_only": schema.ControlConfig(without="second")})
    with pytest.raises(KeyboardInterrupt):
        rl.train_rl(config, tmp_path / "run")
    assert saved == ["control 1", "run 1"]
    assert Checkpoints(tmp_path / "run" / "controls" / "first_only" / "checkpoints", keep=2).latest() == 1


def test_a_control_has_the_main_run_s_schedule():
    """Without a stage that restarts it would have a longer one."""
    fields = {"model": schema.ModelConfig(path="somewhere"), "knowledge": {"text": schema.KnowledgeConfig()}}
    stages = {"first": schema.StageConfig(), "second": schema.StageConfig(start=2, restart=True)}
    control = {"c": schema.ControlConfig(without="second")}
    linear = schema.LearnerConfig(optimizer=OptimizerConfig(schedule="linear"))
    with pytest.raises(ValueError, match=r"'second' and 'first', .* take config.learner.optimizer.schedule='const"):
        schema.TrainConfig(stages=stages, controls=control, learner=linear, **fields)
    with pytest.raises(ValueError, match=r"'first' and 'second', which has its steps"):
        schema.TrainConfig(
            stages=stages, controls={"c": schema.ControlConfig(without="first")}, learner=linear, **fields
        )
    assert schema.TrainConfig(stages=stages, controls=control, **fields).controls == control
    for minibatches, fine in ((1, True), (2, False)):
        stages["second"] = schema.StageConfig(start=2, learner={"minibatches": minibatches})
        if fine:
            assert schema.TrainConfig(stages=stages, controls=control, learner=linear, **fields).controls == control
            continue
        with pytest.raises(ValueError, match=r"'second' and 'first', .* or they make other numbers of updates a step"):
            schema.TrainConfig(stages=stages, controls=control, learner=linear, **fields)


@pytest.mark.parametrize(
    ("without", "stages", "message"),
    [
        ("third", {"second": 2}, r"controls.c.without='third' is no stage; there are: first, second"),
        ("second", {"second": 100}, r"'second' must begin before the run's end, config.steps=100"),
        ("first", {}, "'first' is the only stage"),
    ],
)
def test_what_a_control_can_be(without: str, stages: dict[str, int], message: str):
    starts = {"first": 0, **stages}
    with pytest.raises(ValueError, match=message):
        schema.TrainConfig(
            model=schema.ModelConfig(path="somewhere"),
            knowledge={"text": schema.KnowledgeConfig()},
            stages={name: schema.StageConfig(start=start) for name, start in starts.items()},
            controls={"c": schema.ControlConfig(without=without)},
        )
