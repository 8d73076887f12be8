"""Rollouts one step ahead: the numbers of a loop that delays the engine's weights by hand; alone or beside; resumed."""

import dataclasses
import json
import pathlib
import threading
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

from routerl_jax.learning.losses import LossConfig
from routerl_jax.learning.optimizer import OptimizerConfig
from routerl_jax.parallel.mesh import make_mesh
from routerl_jax.training import config as schema
from routerl_jax.training.asynchronous import Ahead
from routerl_jax.training.profiler import Clock
from routerl_jax.training.rollouts import RolloutSource
from routerl_jax.training.run import Run
from routerl_jax.training.setup import build_recipe, check_engine_devices, engine_mesh, make_engine
from routerl_jax.training.stages import Stages
from routerl_jax.training.step import learn
from tests import tiny
from tests.training import steps as steps_module
from tests.training.steps import take_step

STEPS = 4
KB = {"text": schema.KnowledgeConfig(), "table": schema.KnowledgeConfig()}
LEARNER = schema.LearnerConfig(
    advantage="dr_grpo",
    minibatches=2,
    micro_tokens=512,
    importance_cap=2.0,
    mask_mean_ratio=1.5,
    loss=LossConfig(measure_entropy=True),
    optimizer=OptimizerConfig(lr=1e-2),
)


class Parts:
    """A run of a tiny policy on the first devices, with its engine on these or on others."""

    def __init__(self, directory: pathlib.Path, learner: int, engine: int, resume: bool = False) -> None:
        directory.mkdir(exist_ok=True)
        rows = [{"id": str(i), "question": "What?", "golden_answers": ["!"]} for i in range(9)]
        (directory / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.config = schema.TrainConfig(
            seed=5,
            steps=STEPS,
            model=schema.ModelConfig(path="tiny"),
            mesh=schema.MeshConfig(engine=engine),
            engine=schema.EngineConfig(rows=16, max_length=128, segment=8),
            agent=schema.AgentConfig(max_searches=1, max_turn_tokens=8, answer_tokens=8),
            knowledge=KB,
            data=schema.DataConfig(train=str(directory / "questions.jsonl")),
            rollout=schema.RolloutConfig(examples=2, samples=4, ahead=1),
            stages={"main": schema.StageConfig(reward={"tests.training.test_rl:small_ids": 1.0})},
            learner=LEARNER,
            log_episodes=0,
        )
        mesh = make_mesh(devices=jax.devices()[:learner])
        model = tiny.model(mesh=mesh)
        recipe = build_recipe(self.config)
        self.agent, self.stages = recipe.agent, Stages(self.config, recipe)
        self.tools = {name: tiny.ScriptedKB(name) for name in KB}
        self.engine = make_engine(self.config, model, mesh=engine_mesh(self.config.mesh, mesh))
        self.run = Run(self.config, directory / "run", model, mesh, LEARNER.loss, STEPS * 2, resume)
        self.engine.update(self.run.served_params(), self.run.start)
        self.source = RolloutSource(self.stages, self.agent, self.engine, self.tools)
        self.ahead = Ahead(self.source, apart=engine > 0)
        if self.run.restored:
            self.stages.restore(self.run.restored["streams"])
            self.ahead.restore(self.run.restored_rollouts)

    def steps(self, start: int, end: int) -> list[dict[str, Any]]:
        rows = []
        for step in range(start, end):
            with (clock := Clock())("step"):
                parts = (self.stages.at(step), self.run, self.engine, self.tools)
                rows.append(take_step(self.ahead, *parts, step, clock))
        return rows

    @property
    def weights(self) -> list[np.ndarray]:
        return [np.array(leaf) for leaf in jax.tree.leaves(self.run.learner.params)]


def by_hand(parts: Parts) -> list[dict[str, Any]]:
    """One thing after another: before each step the engine is given the weights of one step ago."""
    rows, history = [], [jax.tree.map(lambda x: x.copy(), parts.run.served_params())]
    for step in range(STEPS):
        then = max(step - 1, 0)
        parts.engine.update(history[then], then)
        stage = parts.stages.at(step)
        rollouts = parts.source.roll_out(step)
        parts.engine.rest()
        with (clock := Clock())("step"):
            rows.append(learn(stage, parts.run, parts.engine, parts.tools, rollouts, clock))
        history.append(jax.tree.map(lambda x: x.copy(), parts.run.served_params()))
    return rows


def untimed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    left = ("timing_s/", "perf/rollout_tokens_per_s", "perf/update_tokens_per_s", "perf/compilations", "memory/")
    return [{name: value for name, value in row.items() if not name.startswith(left)} for row in rows]


def devices_of(params: nnx.State) -> set[Any]:
    return {device for leaf in jax.tree.leaves(params) for device in leaf.sharding.device_set}


@pytest.fixture(scope="module")
def delayed(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[np.ndarray], list[dict[str, Any]]]:
    """Weights and metrics of the loop by hand, on one device."""
    parts = Parts(tmp_path_factory.mktemp("by_hand"), learner=1, engine=0)
    rows = by_hand(parts)
    return parts.weights, untimed(rows)


@pytest.mark.slow
def test_the_same_devices_in_turns(
    delayed: tuple[list[np.ndarray], list[dict[str, Any]]], tmp_path: pathlib.Path
) -> None:
    """Bit for bit what the loop by hand computes; tokens are one step old from the second step on."""
    parts = Parts(tmp_path, learner=1, engine=0)
    rows = parts.steps(0, STEPS)
    for found, wanted in zip(parts.weights, delayed[0], strict=True):
        np.testing.assert_array_equal(found, wanted)
    assert untimed(rows) == delayed[1]
    assert [row["rollout/staleness/mean"] for row in rows] == [0, 1, 1, 1]
    assert [row["rollout/staleness/max"] for row in rows] == [0, 1, 1, 1]
    assert rows[0]["sampler_gap/max"] < 1e-4  # the first rollouts are the learner's own ..
    assert all(row["sampler_gap/max"] > 1e-3 for row in rows[1:])  # .. the others those of other weights
    for row in rows[1:]:
        assert row["importance/kl"] != 0
        assert 0 <= row["importance/masked_tokens"] <= 1
        assert row["actor/entropy"] > 0
    assert parts.ahead.state() == b""  # nothing is generated beyond the last step
    assert parts.engine.version == STEPS


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_exactly(
    delayed: tuple[list[np.ndarray], list[dict[str, Any]]], tmp_path: pathlib.Path
) -> None:
    """From the checkpoint after two steps, whose rollouts for the third were sampled by the weights after the first."""
    first = Parts(tmp_path, learner=1, engine=0)
    first.steps(0, 2)
    first.run.save(2, rollouts=first.ahead.state(), streams=first.stages.state(), stage="main")
    first.run.checkpoints.wait()
    first.steps(2, 3)  # lost
    second = Parts(tmp_path, learner=1, engine=0, resume=True)
    assert second.run.start == 2
    rows = second.steps(2, STEPS)
    for found, wanted in zip(second.weights, delayed[0], strict=True):
        np.testing.assert_array_equal(found, wanted)
    assert untimed(rows) == delayed[1][2:]


@pytest.mark.slow
def test_beside_each_other_on_two_parts_of_the_mesh(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four devices learn while four others generate, at the same time; bit for bit the loop by hand on the same devices."""
    hand = Parts(tmp_path / "by_hand", learner=4, engine=4)
    expected = by_hand(hand)
    begun: dict[int, threading.Event] = {step: threading.Event() for step in range(STEPS + 1)}
    begun[STEPS].set()  # there is none after the last step

    roll_out = RolloutSource.roll_out

    def rolling(source: RolloutSource, step: int, *, whole: bool) -> Any:
        begun[step].set()
        return roll_out(source, step, whole=whole)

    def learning(*arguments: Any) -> Any:
        assert begun[arguments[4].step + 1].wait(60), "the next rollouts did not begin while the learner worked"
        return learn(*arguments)

    monkeypatch.setattr(RolloutSource, "roll_out", rolling)
    monkeypatch.setattr(steps_module, "learn", learning)
    parts = Parts(tmp_path / "ahead", learner=4, engine=4)
    rows = parts.steps(0, STEPS)
    for found, wanted in zip(parts.weights, hand.weights, strict=True):
        np.testing.assert_array_equal(found, wanted)
    assert untimed(rows) == untimed(expected)
    assert parts.engine._calls.params is not None
    assert devices_of(parts.run.learner.params) == set(jax.devices()[:4])
    assert devices_of(parts.engine._calls.params) == set(jax.devices()[4:])


def test_an_update_that_fails_ends_when_the_rollouts_have(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What goes back to a checkpoint then finds an engine at rest."""
    ended = threading.Event()

    roll_out = RolloutSource.roll_out

    def rolling(source: RolloutSource, step: int, *, whole: bool) -> Any:
        if step == 0:
            return roll_out(source, step, whole=whole)
        threading.Event().wait(0.2)
        ended.set()
        return None

    def learning(*_: Any) -> Any:
        raise ValueError("not finite")

    monkeypatch.setattr(RolloutSource, "roll_out", rolling)
    monkeypatch.setattr(steps_module, "learn", learning)
    parts = Parts(tmp_path, learner=4, engine=4)
    with pytest.raises(ValueError, match="not finite"):
        parts.steps(0, 1)
    assert ended.is_set()


def test_where_the_engine_s_devices_are() -> None:
    mesh = make_mesh(devices=jax.devices()[:6])
    assert engine_mesh(schema.MeshConfig(), mesh) is mesh
    found = engine_mesh(schema.MeshConfig(tensor=2, engine=4), mesh)
    assert isinstance(found, Mesh)
    assert (dict(found.shape), list(found.devices.flat)) == ({"data": 2, "fsdp": 1, "tensor": 2}, jax.devices()[-4:])
    check_engine_devices(schema.MeshConfig())
    with pytest.raises(ValueError, match=r"config.mesh.engine=8 leaves the learner none of 8 devices"):
        check_engine_devices(schema.MeshConfig(engine=8))
    with pytest.raises(ValueError, match=r"config.mesh.engine=3: .* 3 can't be divided by config.mesh.tensor=2"):
        check_engine_devices(schema.MeshConfig(engine=3, tensor=2))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"mesh": schema.MeshConfig(engine=4)}, r"config.mesh.engine=4 with config.rollout.ahead=0"),
        (
            {
                "rollout": schema.RolloutConfig(ahead=1),
                "learner": schema.LearnerConfig(loss=LossConfig(kind="reinforce")),
            },
            r"rollout.ahead=1 with config.learner.loss.kind='reinforce': nothing corrects",
        ),
        ({"kind": "sft", "mesh": schema.MeshConfig(engine=4)}, r"config.mesh.engine=4: a run of kind 'sft'"),
    ],
)
def test_settings_that_do_not_go_together(changes: dict[str, Any], complaint: str) -> None:
    fields: dict[str, Any] = {"model": schema.ModelConfig(path="tiny"), "knowledge": KB}
    with pytest.raises(ValueError, match=complaint):
        schema.TrainConfig(**fields, **changes)
    with pytest.raises(ValueError, match=r"ahead=2"):
        dataclasses.replace(schema.RolloutConfig(), ahead=2)
