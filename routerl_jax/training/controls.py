"""Controls: what would have become of the run without a stage, with other rewards or questions, or with supervised learning?

A control is a run of its own in `workdir/controls/NAME`. Without a stage it is the same steps again, from where that stage
began: it resumes from the state that the main run left there, and data and seeds are the main run's, so that only the stage
tells the two apart. All others (without the first stage, with stages or questions of its own, supervised) begin where the main
run began. All are evaluated as that is.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import pathlib
from collections.abc import Callable
from typing import Any

from routerl_jax.core.config import naming
from routerl_jax.core.files import write_whole
from routerl_jax.evaluation.paired import compare_records
from routerl_jax.evaluation.records import read_records
from routerl_jax.evaluation.report import print_table
from routerl_jax.learning.checkpoints import Checkpoints
from routerl_jax.parallel import multihost
from routerl_jax.parallel.workdir import alone_as_job
from routerl_jax.training.config import CalibrationConfig, TrainConfig
from routerl_jax.training.demonstrations import check_demonstrations
from routerl_jax.training.judging import check_names
from routerl_jax.training.run import Run
from routerl_jax.training.setup import build_recipe, evaluated_agent, headline
from routerl_jax.training.snapshots import shared_snapshot
from routerl_jax.training.stages import Stages
from routerl_jax.training.warm_start import started


def control_directory(workdir: pathlib.Path, name: str) -> pathlib.Path:
    """The workdir of a run's control."""
    return workdir / "controls" / name


def check_controls(config: TrainConfig, workdir: pathlib.Path) -> None:
    """Raises ValueError if a control's own stages, names, questions or demonstrations can't be used, as long as the main run
    has not begun."""
    for name, control in config.controls.items():
        path = f"config.controls.{name}"
        if name in control.stages:
            raise ValueError(f"{path}.stages.{name}: call the stage something else; the control's policy is so named")
        changed = control_config(config, workdir, name)
        with naming(path):
            recipe = build_recipe(changed)
            check_names(changed, evaluated_agent(changed, recipe))
            if control.stages or control.data:
                Stages(changed, recipe)
        if control.supervised.steps:
            check_demonstrations(changed, recipe.agent, f"{path}.supervised")


def fork(run: Run, done: int, **extra: Any) -> None:
    """Leaves the run's state after `done` steps to the controls that begin there; `extra` as in a checkpoint of the run."""
    for name, control in run.config.controls.items():
        if not control.without or run.config.stages[control.without].start != done:
            continue
        checkpoints = Checkpoints(control_directory(run.workdir, name) / "checkpoints", run.config.checkpoint.keep)
        if checkpoints.latest() is None:  # else an earlier sitting, killed before its own next checkpoint, has left it
            run.save(done, into=checkpoints, **extra)
        checkpoints.close()


def run_controls(
    config: TrainConfig, workdir: pathlib.Path, results: dict[str, Any], train: Callable[..., dict[str, Any]]
) -> dict[str, Any]:
    """Runs the controls that are not finished, and puts all of them into the results of the main run, which is.

    Args:
      results: of the main run.
      train: trains a configuration in a directory: (config, workdir, resume=..) -> its results.

    Returns:
      The results with `agents.NAME`, the control's policy on the test questions, and `comparisons.NAME`, in what the main
      run's policy differs from it (evaluation.paired).
    """
    comparisons = {}
    for name in config.controls:
        directory = control_directory(workdir, name)
        gc.collect()  # the run before this one is in reference cycles; its memory is needed now
        with alone_as_job(directory), naming(f"config.controls.{name}"):
            found = train(control_config(config, workdir, name), directory, resume=True)
        results["agents"][name] = found["agents"][name]
        results["seconds"][f"controls/{name}"] = found["seconds"]["total"]
        results["seconds"]["total"] += found["seconds"]["total"]
        records = [read_records(place / "evaluation" / "trained.jsonl") for place in (workdir, directory)]
        if multihost.is_main():
            comparisons[name] = compare_records(*records, normalizer=config.evaluation.normalizer)
    if multihost.is_main():
        results["comparisons"] = comparisons
        write_whole(workdir / "results.json", json.dumps(results, indent=2) + "\n")
        print_table(results["agents"], workdir, headline=headline(config, build_recipe(config)))
    return results


def control_config(config: TrainConfig, workdir: pathlib.Path, name: str) -> TrainConfig:
    """The configuration of a control: the main run's without the stage, with other stages or questions, or with a supervised
    phase alone, from the policy that the main run started from."""
    control = config.controls[name]
    found = dataclasses.replace(
        config.otherwise(name),
        profile="",
        model=started(config, workdir.resolve()).model,
        snapshot=shared_snapshot(config, workdir),
        warm_start=control.supervised,
        evaluation=dataclasses.replace(
            config.evaluation,
            before=False,
            before_baselines=(),
            calibration=CalibrationConfig(),
            stages=False,
            baselines=False,
            names={"trained": name},
        ),
    )
    if control.supervised.steps:
        return dataclasses.replace(found, steps=0)
    if not control.without:
        return found
    stages = {key: stage for key, stage in config.stages.items() if key != control.without}
    if not config.stages[control.without].start:
        heir = config.neighbour(control.without)
        stages[heir] = dataclasses.replace(stages[heir], start=0, restart=False)
    return dataclasses.replace(found, stages=stages)
