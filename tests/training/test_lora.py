"""Runs that train an adapter: they learn, serve it, resume bit for bit, and leave what others load."""

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from routerl_jax.engine.engine import Engine
from routerl_jax.learning.optimizer import OptimizerConfig
from routerl_jax.models.decoder import Decoder
from routerl_jax.models.huggingface import load_pretrained, save_pretrained
from routerl_jax.models.lora import LoraConfig, adapters
from routerl_jax.models.peft import base_of
from routerl_jax.parallel.mesh import single_device_mesh
from routerl_jax.training import config as schema
from routerl_jax.training import sft
from routerl_jax.training.profiler import Clock
from routerl_jax.training.run import Run
from routerl_jax.training.setup import build_policy, build_recipe, make_engine
from routerl_jax.training.stages import Stages
from tests import tiny
from tests.programs import launch_here, refusal
from tests.training.small_run import make_sft_config
from tests.training.steps import train_step
from tests.training.test_resume import assert_same_run
from tests.training.test_rl import EXAMPLES, KB

LORA = LoraConfig(rank=4, alpha=8.0, tile_size=8)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A random policy as a Hugging Face directory; its head, which stays as it is, is large enough to be sure of a token."""
    directory = tmp_path_factory.mktemp("base") / "policy"
    save_pretrained(tiny.model(max_length=1024, init_scale=0.4, tied_embeddings=False), directory)
    return directory


@pytest.mark.slow
def test_a_trivial_reward_rises(base: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A random policy that is paid for the lower half of its vocabulary; the engine samples from each update's weights."""
    config = schema.TrainConfig(
        seed=5,
        steps=14,
        model=schema.ModelConfig(path=str(base), lora=LORA),
        engine=schema.EngineConfig(rows=40, max_length=64, segment=8),
        agent=schema.AgentConfig(max_searches=1, max_turn_tokens=8, answer_tokens=8),
        knowledge=KB,
        rollout=schema.RolloutConfig(examples=len(EXAMPLES), samples=12),
        stages={"main": schema.StageConfig(reward={"tests.training.test_rl:small_ids": 1.0})},
        learner=schema.LearnerConfig(minibatches=2, micro_tokens=512, optimizer=OptimizerConfig(lr=3e-2)),
        log_episodes=0,
    )
    mesh = single_device_mesh()
    model = build_policy(config, mesh)
    run_ = Run(config, tmp_path, model, mesh, config.learner.loss, config.steps * config.learner.minibatches, False)
    engine = make_engine(config, model)
    tools = {name: tiny.ScriptedKB(name) for name in KB}
    rows, recipe = [], build_recipe(config)
    stage, agent = Stages(config, recipe).at(0), recipe.agent
    for step in range(config.steps):
        with (clock := Clock())("step"):
            rows.append(train_step(stage, agent, run_, engine, tools, EXAMPLES, step, clock))
    assert all(row["sampler_gap/max"] < 1e-4 for row in rows)
    rewards = [row["reward/total"] for row in rows]
    assert (
        np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.12
    )  # 500 tokens a step: its mean has a standard error of 0.02
    assert len({row["perf/compilations"] for row in rows[3:]}) == 1

    def has_adapter(engine: Engine) -> bool:
        assert engine._calls.params is not None
        return any("lora" in str(path) for path, _ in nnx.to_flat_state(engine._calls.params))

    assert not has_adapter(engine)
    beside = dataclasses.replace(config, engine=dataclasses.replace(config.engine, lora="adapter"))
    assert has_adapter(make_engine(beside, model))


class Killed(BaseException):
    pass


@pytest.fixture(scope="module")
def config(base: pathlib.Path) -> schema.TrainConfig:
    return make_sft_config(
        model=schema.ModelConfig(path=str(base), lora=LORA),
        learner=schema.LearnerConfig(optimizer=OptimizerConfig(lr=1e-2)),
        evaluation=schema.EvaluationConfig(every=0),
    )


@pytest.fixture(scope="module")
def workdir(config: schema.TrainConfig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[pathlib.Path]:
    """A supervised run without interruption."""
    workdir = tmp_path_factory.mktemp("lora") / "whole"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sft, "build_mesh", lambda _: single_device_mesh())
        sft.train_sft(config, workdir)
        yield workdir


@pytest.mark.slow
def test_a_killed_run_continues_bit_for_bit(
    config: schema.TrainConfig, workdir: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception stands for the kill (real kills are in test_resume); other adapters are refused."""
    save = Run.save

    def deadly_save(self: Run, step: int, **extra: Any) -> None:
        if step == 2:
            self.checkpoints.wait()
            raise Killed
        save(self, step, **extra)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "save", deadly_save)
        with pytest.raises(Killed):
            sft.train_sft(config, tmp_path / "killed")
    other = dataclasses.replace(config.model, lora=dataclasses.replace(LORA, rank=2))
    with pytest.raises(ValueError, match=r"config\.model\.lora\.rank was 4, and now it is 2"):
        sft.train_sft(dataclasses.replace(config, model=other), tmp_path / "killed", resume=True)
    sft.train_sft(config, tmp_path / "killed", resume=True)
    assert_same_run(workdir, tmp_path / "killed")


def test_what_a_run_exports(config: schema.TrainConfig, workdir: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """The adapter alone, on the run's base, computes what the merged weights do; and a run goes on from either."""
    arguments = f"--workdir={workdir}", f"--output={tmp_path / 'adapter'}"
    assert not launch_here("export_hf", *arguments, "--lora=adapter")
    merged = f"--workdir={workdir}", f"--output={tmp_path / 'merged'}", "--step=3"
    assert "--base is for --lora=adapter" in refusal("export_hf", *merged, "--base=org/base")
    assert not launch_here("export_hf", *merged)
    named = f"--workdir={workdir}", f"--output={tmp_path / 'named'}"
    assert not launch_here("export_hf", *named, "--lora=adapter", "--base=org/base")
    assert base_of(tmp_path / "named") == "org/base"
    stored, policy = (load_file(path / "model.safetensors") for path in (tmp_path / "merged", workdir / "policy"))
    initial = load_file(pathlib.Path(config.model.path) / "model.safetensors")
    for name, value in policy.items():
        np.testing.assert_array_equal(stored[name], value, err_msg=name)
        assert (value != initial[name]).any() == ("proj" in name), name
    adapted, plain = load_pretrained(str(tmp_path / "adapter")), load_pretrained(str(tmp_path / "merged"))
    assert isinstance(adapted, Decoder)
    assert len(adapters(adapted)) == 7
    tokens = jnp.arange(16)[None]
    np.testing.assert_allclose(adapted(tokens), plain(tokens), atol=1e-4)

    def policy_of(**lora: Any) -> Decoder:
        model = dataclasses.replace(
            config.model, path=str(tmp_path / "adapter"), lora=dataclasses.replace(LORA, **lora)
        )
        return build_policy(dataclasses.replace(config, model=model), single_device_mesh())

    for ours, theirs in zip(*(jax.tree.leaves(nnx.state(m, nnx.LoRAParam)) for m in (policy_of(), adapted))):
        np.testing.assert_array_equal(ours, theirs)
    assert not adapters(policy_of(rank=0))
    np.testing.assert_array_equal(policy_of(rank=0).blocks.q[...], plain.blocks.q[...])  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"config.model.lora: the model has the adapter .* but the rules ask for"):
        policy_of(rank=8)


def test_a_run_without_an_adapter_exports_none(base: pathlib.Path, tmp_path: pathlib.Path) -> None:
    config = make_sft_config(model=schema.ModelConfig(path=str(base)))
    mesh = single_device_mesh()
    Run(config, tmp_path / "run", build_policy(config, mesh), mesh, config.learner.loss, 1, False).finish()
    message = refusal("export_hf", f"--workdir={tmp_path / 'run'}", f"--output={tmp_path / 'x'}", "--lora=adapter")
    assert "trained all weights: there is no adapter (config.model.lora.rank is 0)" in message
