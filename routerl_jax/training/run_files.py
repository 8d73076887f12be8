"""What a finished run left that tells how its policy changed: episodes of its policies and workflows, metrics, calibration."""

from __future__ import annotations

import pathlib
from typing import Any

from routerl_jax.core.files import read_json
from routerl_jax.evaluation.records import read_records
from routerl_jax.training.config import TrainConfig
from routerl_jax.training.controls import control_directory
from routerl_jax.training.setup import build_recipe, evaluated_agent
from routerl_jax.training.writer import read_metrics

Records = list[dict[str, Any]]
START, TRAINED = "warm_start", "trained"


def policy_records(config: TrainConfig, workdir: pathlib.Path) -> dict[str, Records]:
    """The episodes of the run's policies on its test questions: at its start, after its stages, at its end, of its controls.

    Raises:
      ValueError: the run is not finished.
    """
    stages = sorted(config.stages, key=lambda name: config.stages[name].start)
    places = {name: _episodes(workdir, name) for name in (START, *stages, TRAINED)}
    places |= {name: _episodes(control_directory(workdir, name), TRAINED) for name in config.controls}
    if not places[TRAINED].is_file():
        raise ValueError(f"{places[TRAINED]} is not there: the run is not finished. Continue it with --resume")
    return {name: list(read_records(path)) for name, path in places.items() if path.is_file()}


def workflow_records(config: TrainConfig, workdir: pathlib.Path) -> dict[str, dict[str, Records]]:
    """The episodes of the baselines that the run was scored as, by baseline: of the start, and of the trained policy; those
    that are there."""
    found: dict[str, dict[str, Records]] = {}
    for name in search_budgets(config):
        places = {START: _episodes(workdir, f"{START}_{name}"), TRAINED: _episodes(workdir, name)}
        if name != TRAINED and any(path.is_file() for path in places.values()):
            found[name] = {policy: list(read_records(path)) for policy, path in places.items() if path.is_file()}
    return found


def search_budgets(config: TrainConfig) -> dict[str, int | None]:
    """Searches that the run's policies, as `trained`, and each of its baselines may make on a question."""
    agent, tools = evaluated_agent(config, build_recipe(config)), tuple(config.knowledge)
    agents = {TRAINED: agent, **agent.baselines(tools), **agent.vanilla_rag(tools)}
    return {name: one.search_budget for name, one in agents.items()}


def training_rows(config: TrainConfig, workdir: pathlib.Path) -> dict[str, Records]:
    """The rows of metrics.jsonl of the run, as `trained`, and of its controls."""
    places = {TRAINED: workdir} | {name: control_directory(workdir, name) for name in config.controls}
    return {name: read_metrics(place) for name, place in places.items()}


def kept_calibration(workdir: pathlib.Path) -> dict[str, Any]:
    """`calibration` of results.json; {} where there is none."""
    path = workdir / "results.json"
    found = read_json(path, "remove it, and the calibration is left out") if path.is_file() else {}
    return found.get("calibration", {})


def _episodes(workdir: pathlib.Path, name: str) -> pathlib.Path:
    return workdir / "evaluation" / f"{name}.jsonl"
