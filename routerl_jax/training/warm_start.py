"""The supervised phase before reinforcement learning. It belongs to the same command and workdir, and can be resumed."""

from __future__ import annotations

import dataclasses
import gc
import pathlib
from collections.abc import Mapping

from absl import logging

from routerl_jax.core.buckets import in_bucket, url_of
from routerl_jax.core.files import read_json
from routerl_jax.parallel import multihost
from routerl_jax.training.config import EngineConfig, LearnerConfig, RolloutConfig, TrainConfig, WatchConfig
from routerl_jax.training.run import check_workdir, policy_damage
from routerl_jax.training.sft import train_sft
from routerl_jax.training.snapshots import shared_snapshot

_DIRECTORY = "warm_start"


def warm_start(config: TrainConfig, workdir: pathlib.Path, *, resume: bool = False) -> TrainConfig:
    """Runs the supervised phase that `config.warm_start.steps` asks for, unless it is finished.

    The phase is a run of kind "sft" in `workdir/warm_start`.

    Args:
      resume: continue an interrupted phase.

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
        gc.collect()  # reference cycles still hold the phase's optimiser state; its memory is needed now
    return started(config, workdir)


def started(config: TrainConfig, workdir: pathlib.Path) -> TrainConfig:
    """The configuration of a run in `workdir`. If it has a warm start, the model is the warm start's policy."""
    if not config.warm_start.steps:
        return config
    model = dataclasses.replace(config.model, path=_path(workdir / _DIRECTORY / "policy"), sight={})
    return dataclasses.replace(config, model=model)


def _path(policy: pathlib.Path) -> str:
    """The policy's path for configurations. All processes of a job, and later sessions, find the policy there."""
    path = url_of(policy)
    return path if in_bucket(path) else str(policy)


def supervised(config: TrainConfig) -> TrainConfig:
    """The configuration of the supervised phase as a run of its own.

    Settings without effect on it are left out, so they may change before it resumes. The run's questions and its normaliser
    stay, for launch.evaluate; names of other policies do not.
    """
    shared = ("length_buckets", "micro_tokens", "aggregation", "aggregation_tokens", "remat")
    learner = {name: getattr(config.learner, name) for name in shared}
    return TrainConfig(
        kind="sft",
        recipe=config.recipe,
        seed=config.seed,
        steps=config.warm_start.steps,
        model=dataclasses.replace(config.model, freeze=()) if config.warm_start.train_frozen else config.model,
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
        warm_start=dataclasses.replace(config.warm_start, steps=0, train_frozen=False),
    )


def _of_updates(watch: WatchConfig) -> WatchConfig:
    """The part of config.watch about updates. A supervised phase measures no other metrics of a run."""

    def actor_bounds(bounds: Mapping[str, float]) -> dict[str, float]:
        return {name: bound for name, bound in bounds.items() if name.startswith("actor/")}

    bounds = {field: actor_bounds(getattr(watch, field)) for field in ("least", "most", "falls", "drops")}
    return dataclasses.replace(watch, **bounds)


def _finished(phase: TrainConfig, directory: pathlib.Path) -> bool:
    """True if all steps are done and the policy is written. The main process checks, and all get the result."""
    return multihost.exchange(_complete(phase, directory) if multihost.is_main() else None)[0]


def _complete(phase: TrainConfig, directory: pathlib.Path) -> bool:
    needed = [directory / name for name in ("config.json", "results.json", "policy/config.json")]
    fix = f"remove {directory}, and the warm start is done again"
    if not all(path.is_file() for path in needed) or read_json(needed[0], fix)["steps"] != phase.steps:
        return False
    if damage := policy_damage(directory):
        logging.warning("%s: it is exported again from the warm start's last checkpoint", damage)
    return not damage
