"""A supervised phase inside a reinforcement run: one workdir, and --resume continues it wherever it was killed."""

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from routerl_jax.models.decoder import Decoder
from routerl_jax.models.huggingface import save_pretrained
from routerl_jax.parallel.mesh import single_device_mesh
from routerl_jax.training import load, rl, sft
from routerl_jax.training.checks import check_workdir
from routerl_jax.training.config import (
    ControlConfig,
    EvaluationConfig,
    RolloutConfig,
    TrainConfig,
    WarmStartConfig,
    WatchConfig,
)
from routerl_jax.training.run import Run
from tests.training.small_run import make_config, make_sft_config
from tests.training.test_resume import assert_same_run, checkpoints, metric_lines

WARM_STEPS = 2


class Killed(BaseException):
    """Stands for a kill: what survives it is on the disk (real kills are in test_resume)."""


@pytest.fixture(scope="module", autouse=True)
def _small() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sft, "_HELD_OUT", 4)
        patch.setattr(sft, "_VOCABULARY_EXAMPLES", 40)
        for module in (sft, rl, load):
            patch.setattr(module, "build_mesh", lambda _: single_device_mesh())
        yield


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """Random weights, two supervised updates, then one step of reinforcement."""
    supervised, run = make_sft_config(), make_config(tmp_path_factory.mktemp("home"))
    return dataclasses.replace(
        run,
        steps=1,
        model=supervised.model,
        knowledge={"text": run.knowledge["text"]},
        engine=dataclasses.replace(run.engine, rows=4, max_length=640),
        rollout=RolloutConfig(examples=2, samples=2),
        learner=dataclasses.replace(run.learner, drop_no_signal=False, minibatches=1),
        evaluation=EvaluationConfig(every=0, final_examples=1, before=False, baselines=False, normalizer="r1_searcher"),
        warm_start=dataclasses.replace(
            supervised.warm_start, drills=0.0, steps=WARM_STEPS, optimizer=supervised.learner.optimizer
        ),
    )


@pytest.fixture(scope="module")
def whole(config: TrainConfig, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """An uninterrupted run."""
    workdir = tmp_path_factory.mktemp("warm") / "whole"
    assert rl.train_rl(config, workdir)["seconds"]["warm_start"] > 0
    return workdir


def test_reinforcement_starts_from_the_supervised_policy(config: TrainConfig, whole: pathlib.Path) -> None:
    phase = load.load_config(whole / "warm_start")
    assert (phase.kind, phase.steps) == ("sft", WARM_STEPS)
    assert phase.learner.optimizer == config.warm_start.optimizer
    assert (phase.data, phase.evaluation) == (config.data, config.evaluation)  # launch.evaluate judges it as the run
    assert load.load_config(whole) == config  # what the user asked for, not what became of it
    assert len(metric_lines(whole / "warm_start")) == WARM_STEPS
    assert len(metric_lines(whole)) == config.steps
    supervised = load_file(whole / "warm_start" / "policy" / "model.safetensors")
    trained = load_file(whole / "policy" / "model.safetensors")
    for name in supervised:  # one update at 1e-4: near, and not the same
        np.testing.assert_allclose(trained[name], supervised[name], atol=3e-4, err_msg=name)
    assert any((trained[name] != supervised[name]).any() for name in trained)


def test_its_checkpoints_open_with_the_tokenizer_of_the_warm_start(
    config: TrainConfig, whole: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    policy = load.load_policy(whole, config, step=config.steps)
    assert policy.tokenizer is not None
    assert len(policy.tokenizer.encode("<sub-question>")) == 1
    save_pretrained(policy, tmp_path / "exported")
    for name, value in load_file(tmp_path / "exported" / "model.safetensors").items():
        np.testing.assert_array_equal(value, load_file(whole / "policy" / "model.safetensors")[name], err_msg=name)


@pytest.mark.slow
def test_killed_in_the_phase_and_after_it(
    config: TrainConfig, whole: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workdir, save = tmp_path / "killed", Run.save

    def deadly_save(self: Run, step: int, **extra: Any) -> None:
        if step == WARM_STEPS:
            self.checkpoints.wait()
            raise Killed
        save(self, step, **extra)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "save", deadly_save)
        with pytest.raises(Killed):
            rl.train_rl(config, workdir)
    assert checkpoints(workdir / "warm_start") == ["1"]
    assert not (workdir / "config.json").exists()
    with pytest.raises(ValueError, match=r"warm_start holds a run already; pass --resume"):
        rl.train_rl(config, workdir)
    other = dataclasses.replace(config, warm_start=dataclasses.replace(config.warm_start, hit=0.1))
    with pytest.raises(
        ValueError,
        match=r"warm_start/config.json was made with another .*config\.warm_start\.hit was 0\.6, and now it is 0\.1",
    ):
        rl.train_rl(other, workdir, resume=True)

    elsewhere = dataclasses.replace(config, data=dataclasses.replace(config.data, test_range=(18, 19)))
    check_workdir(sft.supervised(elsewhere), workdir / "warm_start", resume=True)

    started_from: list[Decoder] = []

    def deadly_run(_: TrainConfig, __: pathlib.Path, model: Decoder, *___: Any) -> Run:
        started_from.append(model)
        raise Killed

    monkeypatch.setattr(rl, "Run", deadly_run)
    with pytest.raises(Killed):
        rl.train_rl(config, workdir, resume=True)
    assert_same_run(whole / "warm_start", workdir / "warm_start")
    monkeypatch.setattr(sft, "train_sft", lambda *_, **__: pytest.fail("the warm start was finished"))
    with pytest.raises(Killed):
        rl.train_rl(config, workdir, resume=True)
    first, second = (nnx.to_flat_state(nnx.state(model, nnx.Param)) for model in started_from)
    assert len(first) == len(second) > 3
    for (path, a), (_, b) in zip(first, second):
        np.testing.assert_array_equal(a[...], b[...], err_msg=str(path))


def test_searches_of_the_phase_have_the_run_s_time(config: TrainConfig, whole: pathlib.Path) -> None:
    """Also more of it, where they had too little."""
    slow = dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, tool_timeout=600.0))
    assert sft.supervised(slow).rollout.tool_timeout == 600.0
    check_workdir(sft.supervised(slow), whole / "warm_start", resume=True)


def test_what_reinforcement_learning_freezes_the_phase_may_train(config: TrainConfig) -> None:
    frozen = dataclasses.replace(config, model=dataclasses.replace(config.model, freeze=("embedding",)))
    assert sft.supervised(frozen).model.freeze == ("embedding",)
    trained = dataclasses.replace(frozen, warm_start=dataclasses.replace(frozen.warm_start, train_frozen=True))
    assert sft.supervised(trained) == sft.supervised(config)
    with pytest.raises(ValueError, match=r"config\.warm_start\.train_frozen is for the phase before"):
        dataclasses.replace(trained, kind="sft", warm_start=dataclasses.replace(trained.warm_start, steps=0))


def test_the_constant_of_the_loss_is_the_run_s(config: TrainConfig) -> None:
    learner = dataclasses.replace(config.learner, aggregation="constant", aggregation_tokens=500)
    phase = sft.supervised(dataclasses.replace(config, learner=learner))
    assert (phase.learner.aggregation, phase.learner.aggregation_tokens) == ("constant", 500)


def test_what_a_run_says_of_updates_holds_in_the_phase(config: TrainConfig) -> None:
    """Its bounds, and no other, not even by default."""
    watch = WatchConfig(patience=3, most={"actor/grad_norm": 7.0, "sampler_gap/mean": 0.5}, least={"rollout/em": 0.1})
    assert sft.supervised(dataclasses.replace(config, watch=watch)).watch == WatchConfig(
        patience=3, most={"actor/grad_norm": 7.0}, least={}, falls={}
    )


def test_what_is_refused_is_refused_before_anything_is_learnt(config: TrainConfig, tmp_path: pathlib.Path) -> None:
    """Names of agents, questions that are not there, a control that would replace a baseline."""
    evaluation, data = config.evaluation, config.data
    cases = {
        r"config.evaluation.names.trianed: no agent is called so; did you mean trained\?": {
            "evaluation": dataclasses.replace(evaluation, names={"trianed": "grpo"})
        },
        r"config.controls.no_search: call it something else": {
            "controls": {"no_search": ControlConfig(supervised=dataclasses.replace(config.warm_start, steps=1))}
        },
        r"nowhere.jsonl: No such file": {"data": dataclasses.replace(data, overlap="ignore", test="nowhere.jsonl")},
    }
    for message, changes in cases.items():
        with pytest.raises(ValueError, match=message):
            rl.train_rl(dataclasses.replace(config, **changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_supervised_run_has_no_warm_start() -> None:
    with pytest.raises(ValueError, match=r"a run of kind 'sft' has config.steps"):
        make_sft_config(warm_start=WarmStartConfig(steps=3))
    with pytest.raises(ValueError, match=r"^steps=-1 must not be negative"):
        make_sft_config(warm_start=WarmStartConfig(steps=-1))
