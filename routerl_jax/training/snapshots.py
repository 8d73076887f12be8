"""Snapshots of the web for a run: their directories, and checks that the run can be recorded or replayed."""

from __future__ import annotations

import dataclasses
import pathlib
import shutil
from collections.abc import Mapping

from routerl_jax.core.buckets import fetched, in_bucket, path_of, url_of
from routerl_jax.core.config import naming
from routerl_jax.knowledge.store import Manifest, built_at
from routerl_jax.knowledge.web.config import SnapshotConfig
from routerl_jax.knowledge.web.snapshot import MANIFEST as RECORDED
from routerl_jax.knowledge.web.snapshot import holds_records
from routerl_jax.parallel import multihost
from routerl_jax.training.config import KnowledgeConfig, TrainConfig, WebSnapshotConfig


def snapshots(config: TrainConfig, workdir: pathlib.Path | None) -> dict[str, SnapshotConfig]:
    """The snapshot of every web knowledge base of a run, by name; {} if the run has no snapshot.

    Args:
      workdir: the run's directory; may be None if config.snapshot names a directory.
    """
    mode, directory = config.snapshot.mode, config.snapshot.directory
    if not mode:
        if directory:
            raise ValueError(
                f"config.snapshot.directory={directory!r} without config.snapshot.mode: say record, auto or replay"
            )
        return {}
    names = _web_names(config.knowledge)
    if not names:
        raise ValueError(
            f"config.snapshot.mode={mode!r}: none of config.knowledge is a web knowledge base ({', '.join(config.knowledge)}); "
            "leave it out"
        )
    root = _root(config, workdir)
    # A run's snapshot is started once (check_snapshot); all later processes, sessions and evaluations continue it.
    how = "replay" if mode == "replay" else "auto"
    return {name: SnapshotConfig(directory=str(root / name), mode=how) for name in names}


def check_snapshot(config: TrainConfig, workdir: pathlib.Path, *, resume: bool) -> None:
    """Checks that the run can be recorded or replayed. The main process checks, and all get the result (a collective call).

    Args:
      resume: continue an existing snapshot.

    Raises:
      ValueError: a directory is given without a mode; the run has no web knowledge base; there is no snapshot to replay; or
        there already is one where a new one is to be recorded.
    """
    multihost.on_main(lambda: _check(config, workdir, resume))


def shared_snapshot(config: TrainConfig, workdir: pathlib.Path) -> WebSnapshotConfig:
    """config.snapshot for a warm start or a control, which has its own workdir but uses the run's snapshot."""
    if not config.snapshot.mode:
        return config.snapshot
    return dataclasses.replace(config.snapshot, directory=url_of(_root(config, workdir).resolve()))


def _check(config: TrainConfig, workdir: pathlib.Path, resume: bool) -> None:
    for name, spec in snapshots(config, workdir).items():
        directory = pathlib.Path(spec.directory)
        if spec.mode == "replay" and not (directory / RECORDED).is_file():
            deeper = directory.parent / "snapshot"
            hint = f"; did you mean config.snapshot.directory={str(deeper)!r}?" if deeper.is_dir() else ""
            raise ValueError(
                f"config.snapshot.mode='replay': {directory} holds no snapshot of the knowledge base {name!r}. Record one "
                f"(config.snapshot.mode='auto'), or say in config.snapshot.directory where it lies{hint}"
            )
        if config.snapshot.mode == "record" and not resume and (directory / RECORDED).is_file():
            if holds_records(directory):
                raise ValueError(
                    f"config.snapshot.mode='record': {directory} holds a snapshot already. Go on with it "
                    "(config.snapshot.mode='auto', or --resume), or use another --workdir"
                )
            shutil.rmtree(directory)  # left by a run that was refused before it began, perhaps with other settings


def _root(config: TrainConfig, workdir: pathlib.Path | None) -> pathlib.Path:
    directory = config.snapshot.directory
    if in_bucket(directory):
        if (path := path_of(directory)) is None and config.snapshot.mode != "replay":
            raise ValueError(
                f"config.snapshot.directory={directory}: a snapshot in a bucket can be replayed alone; leave it out to record "
                "into the --workdir, or give a directory on this machine"
            )
        return path or fetched(directory)
    if directory:
        return pathlib.Path(directory).expanduser()
    if workdir is None:
        raise ValueError(f"config.snapshot.mode={config.snapshot.mode!r} needs config.snapshot.directory here")
    return workdir / "snapshot"


def _web_names(knowledge: Mapping[str, KnowledgeConfig]) -> list[str]:
    names = []
    for name, spec in knowledge.items():
        if spec.directory and (directory := built_at(spec.directory)):
            with naming(f"config.knowledge.{name}"):
                if Manifest.read(directory).kind == "web":
                    names.append(name)
    return names
