"""Metrics of a run: one JSON object a step, always; TensorBoard through clu where TensorFlow is installed."""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any

from absl import logging

from routerl_jax.core.files import write_json_lines


class MetricWriter:
    """Appends to `workdir/metrics.jsonl` and, where possible, writes TensorBoard events.

    Args:
      workdir: the run's directory.
      resume_at: rows of this step and later are dropped first (a resumed run writes them again).
      enabled: False on processes that must not write.
    """

    def __init__(self, workdir: pathlib.Path, resume_at: int = 0, enabled: bool = True) -> None:
        self.path = workdir / "metrics.jsonl"
        self._enabled = enabled
        self._tensorboard: Any = None
        if not enabled:
            return
        write_json_lines(self.path, [row for row in read_metrics(workdir) if row["step"] < resume_at])
        self._file = self.path.open("a", encoding="utf-8")
        self._tensorboard = _tensorboard_writer(workdir)

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
        if self._tensorboard is not None:
            scalars = {name: value for name, value in row.items() if isinstance(value, int | float)}
            self._tensorboard.write_scalars(step, scalars)

    def close(self) -> None:
        if self._enabled:
            self._file.close()
            if self._tensorboard is not None:
                self._tensorboard.close()


def read_metrics(workdir: pathlib.Path) -> list[dict[str, Any]]:
    """All rows of a workdir's metrics.jsonl; a half-written last line (a killed run) is left out."""
    path = workdir / "metrics.jsonl"
    if not path.is_file():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def _tensorboard_writer(workdir: pathlib.Path) -> Any:
    try:
        from clu import metric_writers  # needs TensorFlow
    except ImportError:
        logging.info("TensorFlow is not installed: metrics go to metrics.jsonl only")
        return None
    return metric_writers.SummaryWriter(str(workdir / "tensorboard"))
