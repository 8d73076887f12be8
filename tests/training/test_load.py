"""Which policy of a run is opened, and where."""

import dataclasses
import gc
import json
import pathlib
import weakref

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

from routerl_jax.core.config import from_config_dict
from routerl_jax.learning.losses import token_weights
from routerl_jax.models.decoder import Decoder
from routerl_jax.models.huggingface import save_pretrained
from routerl_jax.parallel.mesh import make_mesh, single_device_mesh
from routerl_jax.training.checks import check_workdir
from routerl_jax.training.config import EngineConfig, KnowledgeConfig, MeshConfig, ModelConfig, TrainConfig
from routerl_jax.training.load import load_config, load_policy, steps_done
from routerl_jax.training.run import Run, policy_damage
from tests import tiny


@pytest.fixture
def config(tmp_path: pathlib.Path) -> TrainConfig:
    save_pretrained(tiny.model(), tmp_path / "initial")
    return TrainConfig(
        model=ModelConfig(path=str(tmp_path / "initial")),
        engine=EngineConfig(max_length=64),
        mesh=MeshConfig(fsdp=8, layout="fsdp"),
        kind="sft",
        knowledge={"text": KnowledgeConfig()},
    )


def session(config: TrainConfig, workdir: pathlib.Path, mesh: Mesh, *, resume: bool) -> Run:
    return Run(config, workdir, tiny.model(mesh=mesh, layout="fsdp"), mesh, config.learner.loss, 4, resume)


def final_norm(model: Decoder) -> float:
    return float(np.asarray(model.final_norm[...])[0])


def set_final_norm(run: Run, value: float) -> None:
    params = run.learner.state.params
    params["final_norm"].set_value(params["final_norm"].get_value() * 0 + value)
    run.learner.state = dataclasses.replace(run.learner.state, params=params)


def test_a_resumed_run_is_not_beaten_by_its_earlier_policy(config: TrainConfig, tmp_path: pathlib.Path) -> None:
    """Finished after step 1, resumed for more steps, killed after step 2: the newest weights are the checkpoint's."""
    workdir, mesh = tmp_path / "run", make_mesh({"fsdp": 8})
    first = session(config, workdir, mesh, resume=False)
    set_final_norm(first, 2.0)
    first.save(1)
    first.finish()
    assert final_norm(load_policy(workdir, config, mesh)) == 2.0
    assert (workdir / "policy" / "config.json").is_file()

    second = session(config, workdir, mesh, resume=True)
    assert second.start == 1
    set_final_norm(second, 3.0)
    second.save(2)
    second.checkpoints.close()
    second.writer.close()
    assert final_norm(load_policy(workdir, config, mesh)) == 3.0


def test_a_run_of_eight_devices_opens_on_one(config: TrainConfig, tmp_path: pathlib.Path) -> None:
    """From a checkpoint and from the finished policy, as launch.export_hf does."""
    workdir = tmp_path / "run"
    run = session(config, workdir, make_mesh({"fsdp": 8}), resume=False)
    run.save(1)
    expected = jax.tree.map(np.asarray, run.learner.params)
    run.checkpoints.wait()
    for finished in (False, True):
        if finished:
            run.finish()
        for step in (None, 1):
            model = load_policy(workdir, load_config(workdir), single_device_mesh(), step=step)
            assert len(model.blocks.q[...].sharding.device_set) == 1
            for ours, theirs in zip(jax.tree.leaves(nnx.state(model, nnx.Param)), jax.tree.leaves(expected)):
                np.testing.assert_array_equal(ours, theirs)
    assert json.loads((workdir / "config.json").read_text())["mesh"]["fsdp"] == 8


def test_frozen_weights_are_those_it_was_trained_beside(config: TrainConfig, tmp_path: pathlib.Path) -> None:
    """They are not in the checkpoint: a model directory that has changed since is refused."""
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, freeze=("embedding",)))
    run = session(config, tmp_path / "run", make_mesh({"fsdp": 8}), resume=False)
    run.save(1)
    run.checkpoints.close()
    run.writer.close()
    np.testing.assert_array_equal(load_policy(tmp_path / "run", config).embedding[...], run.model.embedding[...])
    save_pretrained(tiny.model(seed=1), tmp_path / "initial")
    with pytest.raises(ValueError, match="was trained beside other frozen weights than these"):
        load_policy(tmp_path / "run", config)


def test_a_damaged_policy_is_refused(config: TrainConfig, tmp_path: pathlib.Path) -> None:
    """A byte of the weights, the tokenizer or the settings; without the note of an earlier version nobody can tell."""
    run = session(config, tmp_path / "run", make_mesh({"fsdp": 8}), resume=False)
    run.save(1)
    run.finish()
    assert steps_done(tmp_path / "run", config) == config.steps
    stopped = {"stopped": {"steps": 1}}
    (tmp_path / "run" / "results.json").write_text(json.dumps(stopped))
    assert steps_done(tmp_path / "run", config) == 1
    for file in sorted((tmp_path / "run" / "policy").iterdir()):
        content = file.read_bytes()
        for damaged in (content[:-1], content[:-2] + bytes([content[-2] ^ 1]) + content[-1:]):
            file.write_bytes(damaged)
            with pytest.raises(ValueError, match=rf"policy/{file.name} has .*--resume"):
                load_policy(tmp_path / "run", config)
        file.write_bytes(content)
    load_policy(tmp_path / "run", config)
    file.write_bytes(damaged)
    (tmp_path / "run" / "policy.json").unlink()
    assert policy_damage(tmp_path / "run") == ""


def test_a_run_of_an_earlier_version_is_read(config: TrainConfig, tmp_path: pathlib.Path) -> None:
    """Its 0 questions of an evaluation were all. A 0 of today is refused, as it might mean none."""
    kept = json.loads(json.dumps(dataclasses.asdict(config)))
    kept["evaluation"] |= {"every": 0, "examples": 0, "final_examples": 0}
    (tmp_path / "config.json").write_text(json.dumps(kept))
    read = load_config(tmp_path)
    assert (read.evaluation.every, read.evaluation.examples, read.evaluation.final_examples) == (0, -1, -1)
    check_workdir(config, tmp_path, resume=True)
    with pytest.raises(ValueError, match=r"evaluation\.examples=0 must be at least 1, or -1 for all"):
        from_config_dict(TrainConfig, kept)


@pytest.mark.slow
def test_initial_weights_are_not_kept(config: TrainConfig, tmp_path: pathlib.Path) -> None:
    """Unless a reference needs them, which then is these arrays and no copy; the first update changes neither."""
    mesh = make_mesh({"fsdp": 8})
    for kl_coef in (0.0, 0.1):
        model = tiny.model(mesh=mesh, layout="fsdp")
        initial = weakref.ref(model.embedding[...])
        values = np.asarray(model.embedding[...])
        loss = dataclasses.replace(config.learner.loss, kl_coef=kl_coef)
        run = Run(config, tmp_path / str(kl_coef), model, mesh, loss, 4, resume=False)
        gc.collect()
        assert (initial() is not None) == bool(kl_coef)
        sequences = tiny.random_sequences(3, turns=1)
        weights = token_weights([s.loss_mask for s in sequences], "token", 1.0)
        run.learner.update(run.layout.build(sequences, weights, [1.0, -1.0, 1.0])[0])
        assert not np.array_equal(np.asarray(run.policy().embedding[...]), values)
        if run.learner.reference is not None:
            np.testing.assert_array_equal(np.asarray(run.learner.reference["embedding"].get_value()), values)
        run.checkpoints.close()
        run.writer.close()
