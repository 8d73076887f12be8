"""Reads a run that was started or finished: its configuration, its policy, its episodes and metrics."""

from __future__ import annotations

import contextlib
import pathlib
from typing import Any

from flax import nnx
from jax.sharding import Mesh

from routerl_jax.core.config import SecretSetting
from routerl_jax.core.files import read_json
from routerl_jax.evaluation.records import read_records
from routerl_jax.learning.checkpoints import Checkpoints, saved_steps
from routerl_jax.learning.learner import trained_parameters
from routerl_jax.models import pretrained
from routerl_jax.models.decoder import Decoder
from routerl_jax.models.embedding import Embedder
from routerl_jax.models.huggingface import load_pretrained
from routerl_jax.models.lora import lora_fields
from routerl_jax.models.peft import CONFIG as ADAPTER_CONFIG
from routerl_jax.models.peft import base_of
from routerl_jax.parallel import multihost
from routerl_jax.training.alignment import ALIGNED, read_tower
from routerl_jax.training.config import TrainConfig, kept_config
from routerl_jax.training.controls import control_directory
from routerl_jax.training.loggers import read_metrics
from routerl_jax.training.run import POLICY, frozen_digest, policy_damage, started
from routerl_jax.training.setup import build_mesh, build_policy, build_recipe, evaluated_agent


def load_config(workdir: pathlib.Path) -> TrainConfig:
    """The configuration of a run.

    Raises:
      ValueError: the directory holds no run.
    """
    path = workdir / "config.json"
    if not path.is_file():
        raise ValueError(f"{workdir} holds no run (config.json is missing); give the --workdir of launch.train")
    kept = read_json(path, "the run can't be used without it")
    try:
        return kept_config(kept)
    except SecretSetting as error:  # of a run that was begun before they were refused
        raise ValueError(f"{path}: {error}") from error


def load_policy(
    workdir: pathlib.Path,
    config: TrainConfig,
    mesh: Mesh | None = None,
    *,
    step: int | None = None,
    adapter: bool = False,
) -> Decoder:
    """The policy of a run: that of checkpoint `step` if given, else the finished policy, else that of the newest checkpoint.

    Args:
      adapter: load it from a checkpoint with the adapter unmerged (the finished policy has it merged).

    Raises:
      ValueError: there is no such checkpoint, the run has saved nothing yet, or the run trained no adapter.
    """
    if adapter and not config.model.lora.rank:
        raise ValueError(f"{workdir} trained all weights: there is no adapter (config.model.lora.rank is 0)")
    mesh = mesh or build_mesh(config.mesh)
    policy = workdir / "policy"
    if step is None and not adapter and (policy / "config.json").is_file():
        if damage := multihost.exchange(policy_damage(workdir) if multihost.is_main() else "")[0]:
            raise ValueError(
                f"{damage}: put back a copy, or finish the run again with --resume, which exports its last checkpoint; if you "
                f"changed it yourself, delete {workdir / POLICY}"
            )
        model = load_pretrained(
            str(policy),
            mesh,
            config.model.dtype,
            compute_dtype=config.model.compute_dtype or config.model.dtype,
            layout=config.mesh.layout,
        )
        assert not isinstance(model, Embedder)
        return model
    if not saved_steps(workdir / "checkpoints"):
        raise ValueError(f"{workdir} has neither a finished policy nor a checkpoint yet")
    with contextlib.closing(Checkpoints(workdir / "checkpoints", config.checkpoint.keep)) as checkpoints:
        step = checkpoints.latest() if step is None else step
        if step is None:
            raise ValueError(f"{workdir} has neither a finished policy nor a checkpoint yet")
        model = build_policy(started(config, workdir), mesh)
        if (workdir / ALIGNED).is_file():
            read_tower(model, workdir / ALIGNED)
        lora = lora_fields(model)
        trained = trained_parameters(model, config.model.freeze)
        frozen = frozen_digest(model, config.model.freeze)
        params = checkpoints.restore_params(step, nnx.state(model, trained), model.config, lora, frozen)
    nnx.update(model, params)
    return model


def steps_done(workdir: pathlib.Path, config: TrainConfig, step: int | None = None) -> int:
    """How many steps the policy that `load_policy` loads has been trained for. That of a stopped run has fewer than planned."""
    if step is not None:
        return step
    if (workdir / "policy" / "config.json").is_file():
        path = workdir / "results.json"
        results = read_json(path, "remove it, and the run counts as finished") if path.is_file() else {}
        return results.get("stopped", {}).get("steps", config.steps)
    return max(saved_steps(workdir / "checkpoints"), default=config.steps)


def adapter_base(workdir: pathlib.Path, config: TrainConfig) -> str:
    """The base model of a run's adapter, as other programs can load it: a hub id or a directory.

    Raises:
      ValueError: the base has random weights.
    """
    path = started(config, workdir).model.path
    if not path:
        raise ValueError(
            "the adapter was trained on random weights (config.model.architecture), which nobody else has; export it merged"
        )
    hub = path.count("/") == 1 and not pathlib.Path(path).expanduser().exists()
    if hub:
        return path
    directory = pretrained.resolve(path).resolve()
    return base_of(directory) if (directory / ADAPTER_CONFIG).is_file() else str(directory)


Records = list[dict[str, Any]]
START, TRAINED = "warm_start", "trained"


def policy_records(config: TrainConfig, workdir: pathlib.Path) -> dict[str, Records]:
    """The episodes of the run's policies on its test questions: the start, the ends of stages, the end, and its controls.

    Raises:
      ValueError: the run is not finished.
    """
    stages = sorted(config.stages, key=lambda name: config.stages[name].start)
    paths = {name: _episodes(workdir, name) for name in (START, *stages, TRAINED)}
    paths |= {name: _episodes(control_directory(workdir, name), TRAINED) for name in config.controls}
    if not paths[TRAINED].is_file():
        raise ValueError(f"{paths[TRAINED]} is not there: the run is not finished. Continue it with --resume")
    return {name: list(read_records(path)) for name, path in paths.items() if path.is_file()}


def workflow_records(config: TrainConfig, workdir: pathlib.Path) -> dict[str, dict[str, Records]]:
    """The recorded episodes of the start and of the trained policy as baselines, by baseline."""
    records: dict[str, dict[str, Records]] = {}
    for name in search_budgets(config):
        paths = {START: _episodes(workdir, f"{START}_{name}"), TRAINED: _episodes(workdir, name)}
        if name != TRAINED and any(path.is_file() for path in paths.values()):
            records[name] = {policy: list(read_records(path)) for policy, path in paths.items() if path.is_file()}
    return records


def search_budgets(config: TrainConfig) -> dict[str, int | None]:
    """The largest number of searches on a question, of the run's policies (as `trained`) and of each baseline."""
    agent, tools = evaluated_agent(config, build_recipe(config)), tuple(config.knowledge)
    agents = {TRAINED: agent, **agent.alternatives(tools)}
    return {name: baseline.search_budget for name, baseline in agents.items()}


def training_rows(config: TrainConfig, workdir: pathlib.Path) -> dict[str, Records]:
    """The rows of metrics.jsonl of the run (as `trained`) and of its controls."""
    directories = {TRAINED: workdir} | {name: control_directory(workdir, name) for name in config.controls}
    return {name: read_metrics(directory) for name, directory in directories.items()}


def kept_calibration(workdir: pathlib.Path) -> dict[str, Any]:
    """`calibration` of results.json; {} if there is none."""
    path = workdir / "results.json"
    results = read_json(path, "remove it, and the calibration is left out") if path.is_file() else {}
    return results.get("calibration", {})


def _episodes(workdir: pathlib.Path, name: str) -> pathlib.Path:
    return workdir / "evaluation" / f"{name}.jsonl"
