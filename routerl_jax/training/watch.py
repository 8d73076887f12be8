"""Stops a run that goes wrong, before it has spent what is left of its time on nothing."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from routerl_jax.training.config import WatchConfig


class RunStopped(RuntimeError):
    """The watch has stopped a run; its policy is that of the last checkpoint from before the trouble."""


@dataclasses.dataclass(frozen=True)
class Alarm:
    """Why a run is stopped: which metric, and what was wrong with it."""

    step: int
    metric: str
    complaint: str


class Watch:
    """Looks at the metrics of every step.

    A step is bad where a metric is out of its bounds, or has fallen too far below the best that it was in this stage. So many
    bad steps in a row are an alarm; a loss, gradient or reward that is not finite is one at once.
    """

    def __init__(self, config: WatchConfig) -> None:
        self._config = config
        self._stage = ""
        self._recent: dict[str, list[float]] = {name: [] for name in config.falls}
        self._best: dict[str, float] = {}
        self._bad = 0

    @property
    def worried(self) -> bool:
        """The last step was bad: no time for a checkpoint, or none might be left from before the trouble."""
        return self._bad > 0

    def see(self, step: int, stage: str, metrics: Mapping[str, Any]) -> Alarm | None:
        """Takes note of a step's metrics."""
        if not self._config.patience:
            return None
        if stage != self._stage:
            self._stage, self._best = stage, {}
            self._recent = {name: [] for name in self._config.falls}
        broken = _not_finite(metrics)
        if broken:
            return Alarm(step, broken, f"{broken} is {metrics[broken]}")
        wrong = self._wrong(metrics)
        self._bad = self._bad + 1 if wrong else 0
        if wrong is None or self._bad < self._config.patience:
            return None
        name, complaint = wrong
        return Alarm(step, name, f"{complaint}, after {self._bad} bad steps in a row")

    def _wrong(self, metrics: Mapping[str, Any]) -> tuple[str, str] | None:
        wrong: tuple[str, str] | None = None
        for name, share in self._config.falls.items():
            if name in metrics:
                mean = self._mean(name, metrics[name])
                best = self._best[name] = max(self._best.get(name, -math.inf), mean)
                if best > 0 and mean < share * best:  # a share of nothing, or of a penalty, is no bound
                    wrong = name, f"{name} has fallen to {mean:.3g} from {best:.3g} (config.watch.falls: {share:g})"
        for name, least in self._config.least.items():
            if name in metrics and metrics[name] < least:
                wrong = name, f"{name} is {metrics[name]:.3g} (config.watch.least: {least:g})"
        for name, most in self._config.most.items():
            if name in metrics and metrics[name] > most:
                wrong = name, f"{name} is {metrics[name]:.3g} (config.watch.most: {most:g})"
        return wrong

    def _mean(self, name: str, value: float) -> float:
        """Of the last `patience` steps."""
        recent = self._recent[name] = [*self._recent[name], float(value)][-self._config.patience :]
        return sum(recent) / len(recent)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, as JSON-serialisable data."""
        return {"stage": self._stage, "recent": self._recent, "best": self._best}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from what a checkpoint kept; metrics that are watched since then begin anew."""
        self._stage = state["stage"]
        self._recent = {name: state["recent"].get(name, []) for name in self._config.falls}
        self._best = {name: best for name, best in state["best"].items() if name in self._config.falls}


def _not_finite(metrics: Mapping[str, Any]) -> str | None:
    watched = (name for name in metrics if name.startswith("actor/") or name == "reward/total")
    return next((name for name in watched if not math.isfinite(metrics[name])), None)
