"""Questions about pictures, asked of a policy that sees and of one that does not."""

import dataclasses
import json
import pathlib

import pytest

from routerl_jax.core.config import to_config_dict
from routerl_jax.data.atlas import flags
from routerl_jax.models.huggingface import save_pretrained
from routerl_jax.training import config as schema
from routerl_jax.training.setup import build_mesh, build_policy
from tests.programs import fine, launch, refusal
from tests.training.small_run import make_config

QUESTION = "What is the capital of the country with this flag?"
SIGHT = {"depth": 1, "embed": 16, "heads": 2, "mlp": 16, "window": 112, "max_pixels": 4 * 28 * 28}


def left_by_a_run(workdir: pathlib.Path, config: schema.TrainConfig) -> pathlib.Path:
    """What launch.ask needs of one: the configuration and the policy, here the one to begin with."""
    save_pretrained(build_policy(config, build_mesh(config.mesh)), workdir / "policy")
    (workdir / "config.json").write_text(json.dumps(to_config_dict(config).to_dict()))
    return workdir


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> schema.TrainConfig:
    made = make_config(tmp_path_factory.mktemp("home"), evaluation=schema.EvaluationConfig(k=2))
    return dataclasses.replace(made, mesh=schema.MeshConfig(cpu_devices=1))


@pytest.fixture
def picture(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "flag.png"
    path.write_bytes(flags.flag("Mali"))
    return path


@pytest.mark.slow
def test_pictures(config: schema.TrainConfig, tmp_path: pathlib.Path, picture: pathlib.Path) -> None:
    """They stand in the prompt, and searches bring as many passages as an evaluation's."""
    seeing = dataclasses.replace(config, model=schema.ModelConfig(path="atlas-warm-start", sight=SIGHT))
    workdir = left_by_a_run(tmp_path / "run", seeing)
    [line] = fine(
        launch("ask", f"--workdir={workdir}", "--json", f"--image={picture}", f"--image={picture}", QUESTION)
    ).splitlines()
    record = json.loads(line)
    assert record["prompt"].count("<|image_pad|>") == 2
    calls = [call for turn in record["turns"] for call in turn["calls"]]
    assert calls
    assert all(len(call["passages"]) == 2 for call in calls)


def test_a_policy_that_sees_nothing(config: schema.TrainConfig, tmp_path: pathlib.Path, picture: pathlib.Path) -> None:
    workdir = left_by_a_run(tmp_path / "run", config)
    ask = ("ask", f"--workdir={workdir}", QUESTION)
    assert refusal(*ask, f"--image={picture}").endswith(f"the policy of {workdir}, a llama model, sees no pictures")
    assert "absent.png: can't be read (No such file" in refusal(*ask, f"--image={tmp_path}/absent.png")
    (tmp_path / "note.png").write_text("not a picture")
    assert f"{tmp_path}/note.png" in refusal(*ask, f"--image={tmp_path}/note.png")
