"""A supervised phase inside a reinforcement run: one workdir, and --resume continues it bit for bit wherever it was killed."""

import dataclasses
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from routerl_jax.parallel.mesh import single_device_mesh
from routerl_jax.training import load, rl, sft, warm_start
from routerl_jax.training.config import TrainConfig, WarmStartConfig
from routerl_jax.training.run import Run
from tests.training.small_run import make_config, make_sft_config
from tests.training.test_resume import assert_same_run, checkpoints, metric_lines

WARM_STEPS = 2


class Killed(BaseException):
    pass


@pytest.fixture(scope="module", autouse=True)
def _small() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sft, "_HELD_OUT", 4)
        patch.setattr(sft, "_VOCABULARY_EXAMPLES", 40)
        for module in (sft, rl, load):
            patch.setattr(module, "build_mesh", lambda _: single_device_mesh())
        yield


def warm_config(home: pathlib.Path) -> TrainConfig:
    """Random weights, two supervised updates, two steps of reinforcement with a KL to where they lead."""
    supervised = make_sft_config()
    config = make_config(home)
    return dataclasses.replace(
        config,
        steps=2,
        model=supervised.model,
        engine=dataclasses.replace(config.engine, max_length=1024),
        learner=dataclasses.replace(config.learner, drop_no_signal=False),
        warm_start=dataclasses.replace(supervised.warm_start, steps=WARM_STEPS, optimizer=supervised.learner.optimizer),
    )


@pytest.fixture(scope="module")
def whole(small_run: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainConfig, pathlib.Path]:
    """An uninterrupted run."""
    config, workdir = warm_config(small_run), tmp_path_factory.mktemp("warm") / "whole"
    results = rl.train_rl(config, workdir)
    assert results["seconds"]["warm_start"] > 0
    return config, workdir


def test_reinforcement_starts_from_the_supervised_policy(whole: tuple[TrainConfig, pathlib.Path]) -> None:
    """The phase is a run of kind sft; the checkpoint's reference, which the KL is taken to, is its policy."""
    config, workdir = whole
    phase = load.load_config(workdir / "warm_start")
    assert (phase.kind, phase.steps) == ("sft", WARM_STEPS)
    assert phase.learner.optimizer == config.warm_start.optimizer
    assert len(metric_lines(workdir / "warm_start")) == WARM_STEPS
    assert len(metric_lines(workdir)) == config.steps
    supervised = load_file(workdir / "warm_start" / "policy" / "model.safetensors")
    trained = load_file(workdir / "policy" / "model.safetensors")
    for name in supervised:  # two steps of 1e-4 and less: near, and not the same
        np.testing.assert_allclose(trained[name], supervised[name], atol=1e-3)
    assert any((trained[name] != supervised[name]).any() for name in trained)
    tokenizers = [
        json.loads((workdir / place / "tokenizer.json").read_text()) for place in ("warm_start/policy", "policy")
    ]
    assert tokenizers[0] == tokenizers[1]
    assert "<sub-question>" in {token["content"] for token in tokenizers[0]["added_tokens"]}
    of_checkpoint = load.load_policy(workdir, config, step=config.steps)  # takes the tokenizer from the warm start
    assert of_checkpoint.tokenizer is not None


def kill_at(patch: pytest.MonkeyPatch, kind: str, step: int) -> None:
    """The save after `step` steps of a run of this kind does not return; an exception stands for the kill."""
    save = Run.save

    def deadly_save(self: Run, done: int, **extra: Any) -> None:
        if (self.config.kind, done) == (kind, step):
            self.checkpoints.wait()
            raise Killed
        save(self, done, **extra)

    patch.setattr(Run, "save", deadly_save)


def test_killed_in_each_phase_and_between(
    whole: tuple[TrainConfig, pathlib.Path], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, workdir = whole[0], tmp_path / "killed"
    with monkeypatch.context() as patch:
        kill_at(patch, "sft", 2)
        with pytest.raises(Killed):
            rl.train_rl(config, workdir)
    assert checkpoints(workdir / "warm_start") == ["1"]
    assert not (workdir / "config.json").exists()
    with pytest.raises(ValueError, match=r"warm_start holds a run already; pass --resume"):
        rl.train_rl(config, workdir)
    longer = dataclasses.replace(config.warm_start, hit=0.1)
    with pytest.raises(
        ValueError, match=r"warm_start/config.json was made with another .*section 'warm_start' differs"
    ):
        rl.train_rl(dataclasses.replace(config, warm_start=longer), workdir, resume=True)

    with monkeypatch.context() as patch:  # between the phases: what comes first after the warm start fails
        patch.setattr(rl, "open_knowledge", lambda *_, **__: (_ for _ in ()).throw(Killed()))
        with pytest.raises(Killed):
            rl.train_rl(config, workdir, resume=True)
    first = metric_lines(workdir / "warm_start")
    assert len(first) == WARM_STEPS
    assert not (workdir / "config.json").exists()

    with monkeypatch.context() as patch:
        kill_at(patch, "rl", 2)
        patch.setattr(warm_start, "train_sft", lambda *_, **__: pytest.fail("the warm start was finished"))
        with pytest.raises(Killed):
            rl.train_rl(config, workdir, resume=True)
        assert checkpoints(workdir) == ["1"]
    rl.train_rl(config, workdir, resume=True)
    assert metric_lines(workdir / "warm_start") == first
    assert_same_run(whole[1] / "warm_start", workdir / "warm_start")
    assert_same_run(whole[1], workdir)


def test_a_supervised_run_has_no_warm_start() -> None:
    with pytest.raises(ValueError, match=r"a run of kind 'sft' has config.steps"):
        make_sft_config(warm_start=WarmStartConfig(steps=3))
