"""Ctrl-C and SIGTERM in the middle of a step: there is a checkpoint of the last whole one, and the run goes on bit for bit."""

import dataclasses
import os
import pathlib
import signal
from collections.abc import Callable
from typing import Any

import pytest

from routerl_jax.core.stopping import Interrupted
from routerl_jax.core.types import Episode
from routerl_jax.engine.engine import Engine
from routerl_jax.learning.checkpoints import saved_steps
from routerl_jax.learning.learner import Learner
from routerl_jax.models.huggingface import save_pretrained
from routerl_jax.parallel.mesh import single_device_mesh
from routerl_jax.training import config as schema
from routerl_jax.training import rl, sft
from routerl_jax.training.callbacks import Callback, Step
from tests import tiny
from tests.training.small_run import make_config, make_sft_config
from tests.training.test_resume import assert_same_run, untimed_rows


def length(episode: Episode) -> float:
    """A reward that even random weights get, and each episode another."""
    return float(sum(len(turn.text) for turn in episode.turns))


class Counting(Callback):
    """Writes how often it has been shown a step, and how long its episodes were, into the step's row."""

    def __init__(self) -> None:
        self.seen = 0

    def on_step_end(self, step: Step) -> None:
        self.seen += 1
        step.metrics["seen"] = self.seen
        step.metrics["said"] = sum(map(length, step.episodes))

    def state(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def restore(self, state: Any) -> None:
        self.seen = state["seen"]


def small_config(home: pathlib.Path, **rollout: Any) -> schema.TrainConfig:
    """Random weights; three steps of two mini-batches; a validation after the second; no checkpoint but the last."""
    run = make_config(home)
    save_pretrained(tiny.model(), home / "policy")
    return dataclasses.replace(
        run,
        model=schema.ModelConfig(path=str(home / "policy")),
        knowledge={"text": run.knowledge["text"]},
        engine=dataclasses.replace(run.engine, rows=4),
        agent=dataclasses.replace(run.agent, max_searches=1, max_turn_tokens=16),
        rollout=schema.RolloutConfig(examples=2, samples=2, **rollout),
        stages={"main": schema.StageConfig(reward={f"{__name__}:length": 1.0})},
        evaluation=dataclasses.replace(run.evaluation, final_examples=1),
        checkpoint=schema.CheckpointConfig(every=0),
        callbacks={f"{__name__}:Counting": {}},
    )


def interrupted(place: str, when: int, train: Callable[[], Any]) -> None:
    """Trains, with a SIGTERM to this process before a decode call with the weights of `when` steps, or in update `when` of the
    session. The run must stop at it."""
    cls, name = (Engine, "step") if place == "decode" else (Learner, "update")
    work, sent, updates = getattr(cls, name), False, 0

    def interrupted_work(self: Any, *arguments: Any) -> Any:
        nonlocal sent, updates
        if not sent and when == (self.version if place == "decode" else updates):
            sent = True
            os.kill(os.getpid(), signal.SIGTERM)
        updates += 1
        return work(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cls, name, interrupted_work)
        with pytest.raises(Interrupted):
            train()


@pytest.mark.parametrize(
    ("rollout", "saved"),
    [
        ({}, [[1], [1, 2], [1, 2]]),
        ({"ahead": 1}, [[1], [1, 2], [1, 2]]),
        pytest.param({"partial": 1}, [[], [], []], marks=pytest.mark.slow),  # no checkpoint holds what is under way
    ],
    ids=["on policy", "ahead", "partial"],
)
def test_a_run_that_is_interrupted_anywhere_goes_on_bit_for_bit(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, rollout: dict[str, Any], saved: list[list[int]]
) -> None:
    """In the second step's rollouts; in its first update, so that it becomes whole and its validation is not begun; and in that
    validation, when the run goes on with it."""
    monkeypatch.setattr(rl, "build_mesh", lambda _: single_device_mesh())
    config = small_config(tmp_path / "home", **rollout)
    rl.train_rl(config, tmp_path / "whole")
    workdir = tmp_path / "interrupted"
    moments = [("decode", 1), ("update", 0), ("decode", 2)]
    for moment, steps in zip(moments, saved):
        interrupted(*moment, lambda: rl.train_rl(config, workdir, resume=workdir.exists()))
        assert saved_steps(workdir / "checkpoints") == steps
        assert not (workdir / "policy").exists()
    rl.train_rl(config, workdir, resume=True)
    assert_same_run(tmp_path / "whole", workdir)
    assert [row["seen"] for row in untimed_rows(workdir)] == [1, 2, 3]


def test_a_supervised_run_that_is_interrupted_goes_on(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sft, "build_mesh", lambda _: single_device_mesh())
    config = make_sft_config(checkpoint=schema.CheckpointConfig(every=0))
    interrupted("update", 1, lambda: sft.train_sft(config, tmp_path / "run"))
    assert saved_steps(tmp_path / "run" / "checkpoints") == [2]
    assert [row["step"] for row in untimed_rows(tmp_path / "run")] == [0, 1]
    sft.train_sft(config, tmp_path / "run", resume=True)
    assert [row["step"] for row in untimed_rows(tmp_path / "run")] == [0, 1, 2]
