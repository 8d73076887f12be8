"""The supervised phase before reinforcement learning: one command, one workdir, resumable at any moment."""

from __future__ import annotations

import dataclasses
import gc
import json
import pathlib
from collections.abc import Mapping

from routerl_jax.parallel import multihost
from routerl_jax.training.config import EngineConfig, LearnerConfig, RolloutConfig, TrainConfig, WatchConfig
from routerl_jax.training.run import check_workdir
from routerl_jax.training.sft import train_sft
from routerl_jax.training.snapshots import shared_snapshot

_DIRECTORY = "warm_start"


def warm_start(config: TrainConfig, workdir: pathlib.Path, *, resume: bool = False) -> TrainConfig:
    """Runs the supervised phase that `config.warm_start.steps` asks for, unless it is finished.

    It leaves a run of kind "sft" in `workdir/warm_start`.

    Args:
      resume: go on with one that was interrupted.

    Returns:
      The configuration with the policy that reinforcement learning starts from: `started(config, workdir)`.

    Raises:
      ValueError: the directory holds another warm start, or an unfinished one and `resume` is False.
    """
    if config.warm_start.steps:
        phase, directory = supervised(config), workdir / _DIRECTORY
        phase = dataclasses.replace(phase, snapshot=shared_snapshot(config, workdir))
        check_workdir(phase, directory, resume)
        if not _finished(phase, directory):
            train_sft(phase, directory, resume=resume)
        gc.collect()  # the phase's optimiser state is in reference cycles; its memory is needed now
    return started(config, workdir)


def started(config: TrainConfig, workdir: pathlib.Path) -> TrainConfig:
    """The configuration of a run in `workdir` with its warm start's policy, if it has one, as the model."""
    if not config.warm_start.steps:
        return config
    model = dataclasses.replace(config.model, path=str(workdir / _DIRECTORY / "policy"), sight={})
    return dataclasses.replace(config, model=model)


def supervised(config: TrainConfig) -> TrainConfig:
    """The supervised phase as a run of its own. What has no bearing on it is left out, and so may change before it resumes; but
    launch.evaluate finds the run's questions and its normaliser there, and calls the policy by no name of another."""
    shared = ("length_buckets", "micro_tokens", "aggregation", "remat")
    learner = {name: getattr(config.learner, name) for name in shared}
    return TrainConfig(
        kind="sft",
        recipe=config.recipe,
        seed=config.seed,
        steps=config.warm_start.steps,
        model=config.model,
        mesh=config.mesh,
        engine=EngineConfig(max_length=config.engine.max_length),
        agent=config.agent,
        knowledge=config.knowledge,
        data=config.data,
        rollout=RolloutConfig(tool_timeout=config.rollout.tool_timeout),  # of searches for demonstrations
        learner=LearnerConfig(optimizer=config.warm_start.optimizer, **learner),
        judge=config.judge,
        evaluation=dataclasses.replace(config.evaluation, names={}),
        checkpoint=config.checkpoint,
        watch=_of_updates(config.watch),
        log=config.log,
        warm_start=dataclasses.replace(config.warm_start, steps=0),
    )


def _of_updates(watch: WatchConfig) -> WatchConfig:
    """What config.watch says of updates; a supervised phase measures nothing else that a run's bounds are about."""

    def kept(bounds: Mapping[str, float]) -> dict[str, float]:
        return {name: bound for name, bound in bounds.items() if name.startswith("actor/")}

    bounds = {field: kept(getattr(watch, field)) for field in ("least", "most", "falls", "drops")}
    return WatchConfig(patience=watch.patience, **bounds)


def _finished(phase: TrainConfig, directory: pathlib.Path) -> bool:
    """True if all steps are done and the policy lies there. The main process looks, all learn what it saw."""
    return multihost.exchange(_complete(phase, directory) if multihost.is_main() else None)[0]


def _complete(phase: TrainConfig, directory: pathlib.Path) -> bool:
    needed = [directory / name for name in ("config.json", "results.json", "policy/config.json")]
    return all(path.is_file() for path in needed) and json.loads(needed[0].read_text())["steps"] == phase.steps
