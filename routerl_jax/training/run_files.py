"""Reads the files of a finished run: episodes of its policies and of baselines, metrics and calibration."""

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
