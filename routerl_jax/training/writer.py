"""Writes the metrics of a run: one JSON object per step, and to the loggers of config.log (loggers.py)."""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from absl import logging

from routerl_jax.core.files import read_json_lines, write_json_lines
from routerl_jax.training.loggers import LOGGERS, Logger, scalars_of


class MetricWriter:
    """Appends metrics to `workdir/metrics.jsonl`, and passes them to loggers.

    Args:
      workdir: the run's directory.
      resume_at: rows of this step and later are dropped first (a resumed run writes them again).
      enabled: False on processes that must not write.
      log: names of loggers (loggers.LOGGERS).
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
