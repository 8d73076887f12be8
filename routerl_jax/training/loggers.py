"""The metrics of a run: metrics.jsonl, one row per step, and the loggers that config.log names: TensorBoard, Weights & Biases,
or your own.

metrics.jsonl is the authority: for a resumed run, a logger gets the rows that are in it.
"""

from __future__ import annotations

import abc
import contextlib
import json
import math
import pathlib
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from absl import logging

from routerl_jax.core.config import naming
from routerl_jax.core.files import read_json_lines, write_json_lines
from routerl_jax.core.packages import needs
from routerl_jax.core.registry import Registry

PROJECT = "routerl_jax"  # project at Weights & Biases, unless WANDB_PROJECT names another
_FLUSH_SECONDS = 10.0


class Logger(abc.ABC):
    """Writes a run's metrics somewhere. Only the main process has one.

    Args:
      workdir: the run's directory.
      rows: the rows of metrics.jsonl if the run is resumed: {"step": .., metric: number or None}.
      config: the run's configuration, in the form of config.json.
    """

    @abc.abstractmethod
    def __init__(self, workdir: pathlib.Path, rows: Sequence[Mapping[str, Any]], config: Mapping[str, Any]) -> None: ...

    @classmethod  # noqa: B027 - most need nothing
    def require(cls) -> None:
        """Raises ValueError if this machine lacks a requirement of the logger. Called before anything slow starts."""

    @abc.abstractmethod
    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Writes one step's metrics, all of them finite."""

    @abc.abstractmethod
    def close(self) -> None:
        """Called after the last step."""


LOGGERS: Registry[type[Logger]] = Registry("logger")


def check_log(names: Sequence[str]) -> None:
    """Raises ValueError, which names config.log, if a logger is unknown or named twice."""
    if repeated := next((name for name in names if list(names).count(name) > 1), None):
        raise ValueError(f"config.log={tuple(names)} names {repeated!r} twice")
    for name in names:
        with naming("config.log"):
            LOGGERS.get(name)


def require_log(names: Sequence[str]) -> None:
    """Raises ValueError, which names config.log, if a logger can't write from this machine."""
    for name in names:
        with naming("config.log"):
            LOGGERS.get(name).require()


@LOGGERS.register("tensorboard")
class TensorBoard(Logger):
    """Event files in WORKDIR/tensorboard, through google-metrax's back end.

    When a run is resumed, they are written again from metrics.jsonl, so that no step comes twice.
    """

    def __init__(self, workdir: pathlib.Path, rows: Sequence[Mapping[str, Any]], config: Mapping[str, Any]) -> None:
        from metrax.logging import TensorboardBackend

        directory = workdir / "tensorboard"
        for earlier in directory.glob("events.out.tfevents.*"):
            earlier.unlink()
        self._backend = TensorboardBackend(str(directory), flush_every_n_steps=1, flush_interval_s=_FLUSH_SECONDS)
        for row in rows:
            self.write(row["step"], scalars_of(row))

    @classmethod
    def require(cls) -> None:
        with needs("'tensorboard'", "tensorboard"):
            import metrax.logging  # noqa: F401

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        for name, value in scalars.items():
            self._backend.log_scalar(name, value, step=step)

    def close(self) -> None:
        self._backend.close()


@LOGGERS.register("wandb")
class WeightsAndBiases(Logger):
    """A run at Weights & Biases, or in WORKDIR/wandb where WANDB_MODE=offline.

    A resumed run continues the same run there; its id is in WORKDIR/wandb_id, and steps logged before stay unchanged. The
    variables of the service apply (WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE, ..). Once a run has begun, no error of the service
    ends it.

    metrax's back end is not used: without a login it logs in anonymously, which publishes the metrics.
    """

    def __init__(self, workdir: pathlib.Path, rows: Sequence[Mapping[str, Any]], config: Mapping[str, Any]) -> None:
        import wandb

        marker = workdir / "wandb_id"
        if not marker.is_file():
            marker.write_text(uuid.uuid4().hex[:8])
        try:
            self._run: Any = wandb.init(
                project=wandb.setup().settings.project or PROJECT,
                id=marker.read_text().strip(),
                name=workdir.resolve().name,
                dir=str(workdir),
                config=dict(config),
                resume="allow",
                reinit="create_new",  # independent of other runs that this process logs
                settings=wandb.Settings(console="off", disable_git=True, save_code=False),
            )
        except wandb.Error as error:
            raise ValueError(f"config.log: Weights & Biases gave no run ({error}). {_OFFLINE}") from error

    @classmethod
    def require(cls) -> None:
        with needs("'wandb'", "wandb"):
            import wandb
        if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False):
            raise ValueError(f"'wandb' is not logged in. Run `wandb login`. {_OFFLINE}")

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        with self._forgiven():
            self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        with self._forgiven():
            self._run.finish()

    @contextlib.contextmanager
    def _forgiven(self) -> Any:
        try:
            yield
        except Exception as error:  # a network and its client raise many classes
            logging.warning("Weights & Biases: %s: %s", type(error).__name__, error)


_OFFLINE = "Without a network set WANDB_MODE=offline, and `wandb sync` what is in WORKDIR/wandb later"


def scalars_of(row: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of a row of metrics.jsonl that are numbers."""
    return {name: value for name, value in row.items() if name != "step" and isinstance(value, int | float)}


class MetricWriter:
    """Appends metrics to `workdir/metrics.jsonl`, and passes them to loggers.

    Args:
      workdir: the run's directory.
      resume_at: rows of this step and later are dropped first (a resumed run writes them again).
      enabled: False on processes that must not write.
      log: names of loggers (`LOGGERS`).
      config: the run's configuration, for the loggers.
    """

    def __init__(
        self,
        workdir: pathlib.Path,
        resume_at: int = 0,
        enabled: bool = True,
        log: Sequence[str] = (),
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self.path = workdir / "metrics.jsonl"
        self._enabled = enabled
        self._loggers: list[Logger] = []
        if not enabled:
            return
        rows = [row for row in read_metrics(workdir) if row["step"] < resume_at]
        write_json_lines(self.path, rows)
        self._file = self.path.open("a", encoding="utf-8")
        self._loggers = [LOGGERS.get(name)(workdir, rows, config or {}) for name in log]

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Writes one step's metrics. Values that are not finite are written as null and logged."""
        if not self._enabled:
            return
        row: dict[str, Any] = {"step": step}
        for name, value in metrics.items():
            if isinstance(value, float) and not math.isfinite(value):
                logging.warning("metric %s is %s at step %d", name, value, step)
                value = None
            row[name] = value
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        for logger in self._loggers:
            logger.write(step, scalars_of(row))

    def close(self) -> None:
        if self._enabled:
            self._file.close()
            for logger in self._loggers:
                logger.close()


def read_metrics(workdir: pathlib.Path) -> list[dict[str, Any]]:
    """All rows of a workdir's metrics.jsonl. An incomplete last line (from a killed run) is left out.

    Raises:
      ValueError: another line is not JSON; names it.
    """
    path = workdir / "metrics.jsonl"
    if not path.is_file():
        return []
    return list(read_json_lines(path))
