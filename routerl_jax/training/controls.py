"""Controls: comparison runs without a stage, with other rewards or questions, or with supervised learning.

A control is a run of its own in `workdir/controls/NAME`. A control without a stage repeats the steps from where that stage
began. It resumes from the state that the main run saved there, with the same data and seeds, so that only the stage differs.
All other controls (without the first stage, with stages or questions of their own, supervised) start from the main run's
initial policy. All controls are evaluated like the main run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from routerl_jax.core.config import naming
from routerl_jax.core.files import write_atomic
from routerl_jax.evaluation.paired import compare_records
from routerl_jax.evaluation.records import read_records
from routerl_jax.evaluation.report import print_table
from routerl_jax.learning.checkpoints import Checkpoints
from routerl_jax.parallel import multihost
from routerl_jax.parallel.workdir import job_directory_lock
from routerl_jax.training.callbacks import Callback, Step
from routerl_jax.training.config import CalibrationConfig, TrainConfig
from routerl_jax.training.demonstrations import check_demonstrations
from routerl_jax.training.evaluation import check_names
from routerl_jax.training.knowledge import shared_snapshot
from routerl_jax.training.run import Run, started
from routerl_jax.training.setup import build_recipe, evaluated_agent, headline
from routerl_jax.training.stages import Stages


def control_directory(workdir: pathlib.Path, name: str) -> pathlib.Path:
    """The workdir of a control."""
    return workdir / "controls" / name


def check_controls(config: TrainConfig, workdir: pathlib.Path) -> None:
    """Raises ValueError if a control's own stages, names, questions or demonstrations can't be used.

    Called before the main run starts.
    """
    for name, control in config.controls.items():
        path = f"config.controls.{name}"
        if name in control.stages:
            raise ValueError(f"{path}.stages.{name}: call the stage something else; the control's policy is so named")
        changed = control_config(config, workdir, name)
        with naming(path):
            recipe = build_recipe(changed)
            check_names(changed, evaluated_agent(changed, recipe))
            if control.stages or control.data or control.agent:
                Stages(changed, recipe)
        if control.supervised.steps:
            check_demonstrations(changed, recipe.agent, f"{path}.supervised")


class ControlStarts(Callback):
    """Saves the run's state for the controls that start from it. Called before a checkpoint is written: a session that resumes
    from that one would be too late.

    Args:
      state: what the controls' first checkpoint keeps beside weights and optimiser, as arguments of `Run.save`.
    """

    saves = True

    def __init__(self, run: Run, state: Callable[[Step], Mapping[str, Any]]) -> None:
        self._run, self._state = run, state

    def on_step_end(self, step: Step) -> None:
        run = self._run
        for name, control in run.config.controls.items():
            if not control.without or run.config.stages[control.without].start != step.completed:
                continue
            directory = control_directory(run.workdir, name) / "checkpoints"
            with contextlib.closing(Checkpoints(directory, run.config.checkpoint.keep)) as checkpoints:
                # else an earlier session saved it and was killed before its next checkpoint
                if checkpoints.latest() is None:
                    run.save(step.completed, into=checkpoints, **self._state(step))


def run_controls(
    config: TrainConfig, workdir: pathlib.Path, results: dict[str, Any], train: Callable[..., dict[str, Any]]
) -> dict[str, Any]:
    """Runs the unfinished controls of a finished main run, and adds all controls to its results.

    Args:
      results: the results of the main run.
      train: trains a configuration in a directory: (config, workdir, resume=..) -> its results.

    Returns:
      The results with `agents.NAME`, the scores of the control's policy on the test questions, and `comparisons.NAME`, the
      paired comparison of the main run's policy with it (evaluation.paired).
    """
    comparisons = {}
    for name in config.controls:
        directory = control_directory(workdir, name)
        gc.collect()  # reference cycles still hold the previous run; its memory is needed now
        with job_directory_lock(directory), naming(f"config.controls.{name}"):
            control_results = train(control_config(config, workdir, name), directory, resume=True)
        results["agents"][name] = control_results["agents"][name]
        results["seconds"][f"controls/{name}"] = control_results["seconds"]["total"]
        results["seconds"]["total"] += control_results["seconds"]["total"]
        if multihost.is_main():
            records = [
                read_records(run_directory / "evaluation" / "trained.jsonl") for run_directory in (workdir, directory)
            ]
            comparisons[name] = compare_records(*records, normalizer=config.evaluation.normalizer)
    if multihost.is_main():
        results["comparisons"] = comparisons
        write_atomic(workdir / "results.json", json.dumps(results, indent=2) + "\n")
        print_table(results["agents"], workdir, headline=headline(config, build_recipe(config)))
    return results


def control_config(config: TrainConfig, workdir: pathlib.Path, name: str) -> TrainConfig:
    """The configuration of a control, which begins with the main run's initial policy.

    A control leaves out a stage, has other stages, questions or agent settings, or is a supervised run.
    """
    control = config.controls[name]
    control_run = dataclasses.replace(
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
        return dataclasses.replace(control_run, steps=0)
    if not control.without:
        return control_run
    stages = {key: stage for key, stage in config.stages.items() if key != control.without}
    if not config.stages[control.without].start:
        heir = config.neighbour(control.without)
        stages[heir] = dataclasses.replace(stages[heir], start=0, restart=False)
    return dataclasses.replace(control_run, stages=stages)
