"""Stops a run that goes wrong, so that it does not waste the rest of its time."""

from __future__ import annotations

import collections
import dataclasses
import difflib
import fnmatch
import math
from collections.abc import Mapping
from typing import Any

from absl import logging

from routerl_jax.parallel import multihost
from routerl_jax.training.callbacks import Alarm, Callback, Step
from routerl_jax.training.sections import WatchConfig

# Metrics that a step may lack: those of some stages, of some questions, ..
_SOMETIMES = (
    "actor/decision_share",
    "actor/entropy",
    "actor/kl",
    "actor/left_out/",
    "actor/promoted_logprob",
    "forks/",
    "importance/",
    "reward/",
    "rollout/judge",
    "rollout/kb/",
    "rollout/routing_accuracy",
    "rollout/searches/",
    "validation/judge",
)
_MEASURED = ("validation/", "canary/", "held_out/")  # .. and those of steps that validate
_LEARNED = "actor/loss"  # every step that trained on a token has it
NO_SIGNAL = "rollout/no_signal"  # 1 if no group gave a signal
WHY_NO_SIGNAL = "why_no_signal"  # the most frequent reason, a text
_EM, _SEARCHES, _FORCED = "rollout/em", "rollout/searches_per_question", "rollout/forced_rate"
_IDLE = (NO_SIGNAL, _EM, _SEARCHES, _FORCED)
# The runs in benchmarks/results keep 30 % of their searches and, while they use 85 % of those allowed, 80 % of their EM.
_FALLEN, _STOPPED, _AT_THE_LIMIT = 0.7, 0.05, 0.9
_USUAL = WatchConfig()  # its metrics exist in some kind of run, so they are not awaited


class RunStopped(RuntimeError):
    """A run that went wrong was stopped. Its policy is that of the last checkpoint before the trouble, if there is one."""


class Watch(Callback):
    """Checks the metrics of every step.

    A value of a metric is bad if it is out of its bounds or not finite, or if the metric has fallen too far below its best in
    this stage. `patience` bad values of one metric in a row raise an alarm; steps without that metric do not count. A loss,
    gradient or reward that is not finite raises an alarm at once. `idle` steps in a row that teach nothing raise one, too.
    """

    def __init__(self, config: WatchConfig) -> None:
        self._given = self._config = config
        self._followed = (*config.falls, *config.drops)
        self._stage = ""
        self._recent: dict[str, list[float]] = {}
        self._best: dict[str, float] = {}
        self._bad: dict[str, int] = {}  # for each metric, bad values since the last good one
        self._idle: dict[str, int] = {}  # for each metric of `_IDLE`, steps in a row that teach nothing
        self._reasons: list[str] = []  # of the last steps without a signal
        usual = {*_USUAL.least, *_USUAL.most, *_USUAL.falls}
        # metrics that no step has had yet; a pattern awaits none
        self._awaited = {name for name in (*config.least, *config.most, *self._followed) if "*" not in name} - usual

    @property
    def worried(self) -> bool:
        """Whether some metric's last value was bad. No checkpoint is written then, to keep those from before the trouble."""
        return any(self._bad.values())

    def on_step_end(self, step: Step) -> Alarm | None:
        return self.see(step.number, step.stage, step.metrics)

    def see(self, step: int, stage: str, metrics: Mapping[str, Any]) -> Alarm | None:
        """Checks a step's metrics; returns an alarm if the run must stop.

        All processes use the metrics of the main process (a collective call): times and memory differ between processes, and a
        process that stops alone would leave the others waiting.

        Raises:
          ValueError: a bound names a metric that does not exist.
        """
        if not self._config.patience:
            return None
        metrics = multihost.exchange(dict(metrics))[0]
        alarm = self.judge(step, stage, metrics)
        if alarm is None and multihost.is_main():
            for name, complaint in self._idle_metrics(metrics).items():
                if self._idle.get(name) == self._config.patience:
                    logging.warning("step %d: %s. The run stops after %d", step + 1, complaint, self._config.idle)
        return alarm

    def judge(self, step: int, stage: str, metrics: Mapping[str, Any]) -> Alarm | None:
        """`see` of these very metrics, without asking other processes: also for reading a finished run."""
        if not self._config.patience:
            return None
        least, most = _named(self._given.least, metrics), _named(self._given.most, metrics)
        self._config = dataclasses.replace(self._given, least=least, most=most)
        if stage != self._stage:
            self._stage, self._best, self._recent, self._idle = stage, {}, {}, {}
            # A new stage may lack the metric; a metric that only some steps measure will come again.
            still_measured = {name for name in self._bad if name in metrics or name.startswith(_MEASURED)}
            self._bad = {name: self._bad[name] for name in still_measured}
        broken = _not_finite(metrics)
        if broken:
            return Alarm(step, broken, f"{broken} is {metrics[broken]}")
        self._awaited -= metrics.keys()
        self._check_names(metrics)
        wrong = self._bad_metrics(metrics)
        for name in (*self._config.least, *self._config.most, *self._followed):
            if name in metrics:
                self._bad[name] = self._bad.get(name, 0) + 1 if name in wrong else 0
        for name, complaint in wrong.items():
            if self._bad[name] >= self._config.patience:
                return Alarm(step, name, f"{complaint}, after {self._bad[name]} bad values in a row")
        return self._idle_alarm(step, metrics)

    def _idle_alarm(self, step: int, metrics: Mapping[str, Any]) -> Alarm | None:
        if not self._config.idle or not all(math.isfinite(metrics.get(name, 0.0)) for name in _IDLE):
            return None
        if metrics.get(NO_SIGNAL):
            self._reasons = [*self._reasons, str(metrics.get(WHY_NO_SIGNAL, ""))][-self._config.idle :]
        elif NO_SIGNAL in metrics:
            self._reasons = []
        for name in _IDLE:
            if name in metrics:
                mean = self._mean(f"idle {name}", metrics[name])
                self._best[f"idle {name}"] = max(self._best.get(f"idle {name}", 0.0), mean)
        idle = self._idle_metrics(metrics)
        self._idle = {name: self._idle.get(name, 0) + 1 for name in idle}
        for name, complaint in self._idle_metrics(metrics).items():
            if self._idle[name] >= self._config.idle:
                return Alarm(step, name, f"{complaint} (config.watch.idle: {self._config.idle})", name == NO_SIGNAL)
        return None

    def _idle_metrics(self, metrics: Mapping[str, Any]) -> dict[str, str]:
        """Which of `_IDLE` say that a step taught nothing, each with what that means and what to do."""
        idle, steps = {}, {name: self._idle.get(name, 0) for name in _IDLE}
        if metrics.get(NO_SIGNAL):
            reasons = collections.Counter(filter(None, self._reasons)).most_common(1)
            why = f": {reasons[0][0]}" if reasons else ""
            idle[NO_SIGNAL] = f"no group has given a signal for {steps[NO_SIGNAL]} steps, so nothing was learnt{why}"
        (em, best_em), (searches, most), (forced, _) = map(self._mean_and_best, (_EM, _SEARCHES, _FORCED))
        if _EM not in metrics or em >= _FALLEN * best_em:
            return idle
        fallen = f"while {_EM} has fallen to {em:.2f} from {best_em:.2f}"
        if searches < _STOPPED * most:
            idle[_SEARCHES] = (
                f"the policy has stopped searching ({searches:.2f} a question, {most:.2f} before), {fallen}: take a smaller lr "
                "or a larger KL coefficient, or let a search cost less in the reward"
            )
        if forced > _AT_THE_LIMIT:
            idle[_FORCED] = (
                f"{forced:.0%} of the attempts search until they are made to answer, {fallen}: take a smaller lr or a larger "
                "KL coefficient, or let a search cost something in the reward"
            )
        return idle

    def _mean_and_best(self, name: str) -> tuple[float, float]:
        recent = self._recent.get(f"idle {name}", [])
        return sum(recent) / max(len(recent), 1), self._best.get(f"idle {name}", 0.0)

    def _check_names(self, metrics: Mapping[str, Any]) -> None:
        """Raises ValueError for a bound on a metric that is missing although others of its kind were measured."""
        for name in sorted(self._awaited):
            kind = next((kind for kind in _MEASURED if name.startswith(kind)), None)
            if not any(metric.startswith(kind) for metric in metrics) if kind else _LEARNED not in metrics:
                continue
            if name.startswith(_SOMETIMES):
                self._awaited.remove(name)
                logging.warning("config.watch bounds %s, which no step has had so far", name)
                continue
            measured = sorted(metric for metric, value in metrics.items() if isinstance(value, int | float))
            close = difflib.get_close_matches(name, measured, n=1)
            hint = f"did you mean {close[0]}?" if close else f"there are: {', '.join(measured)}"
            raise ValueError(f"config.watch bounds {name}, and there is no such metric; {hint}")

    def _bad_metrics(self, metrics: Mapping[str, Any]) -> dict[str, str]:
        """The bad ones among the watched metrics, each with what is wrong."""
        config, wrong = self._config, {}
        finite = {}
        for name in (*config.least, *config.most, *self._followed):
            if name in metrics and math.isfinite(metrics[name]):
                finite[name] = metrics[name]
            elif name in metrics:
                wrong[name] = f"{name} is {metrics[name]}"
        means = {name: self._mean(name, finite[name]) for name in dict.fromkeys(self._followed) if name in finite}
        for name, mean in means.items():
            self._best[name] = max(self._best.get(name, -math.inf), mean)
        for name, share in config.falls.items():
            best = self._best.get(name, 0.0)
            # A share of a negative best would be no bound.
            if name in means and best > 0 and means[name] < share * best:
                wrong[name] = f"{self._fall_text(name, means)} (config.watch.falls: {share:g})"
        for name, drop in config.drops.items():
            if name in means and means[name] < self._best[name] - drop:
                wrong[name] = f"{self._fall_text(name, means)} (config.watch.drops: {drop:g})"
        for name, least in config.least.items():
            if name in finite and finite[name] < least:
                wrong[name] = f"{name} is {finite[name]:.3g} (config.watch.least: {least:g})"
        for name, most in config.most.items():
            if name in finite and finite[name] > most:
                wrong[name] = f"{name} is {finite[name]:.3g} (config.watch.most: {most:g})"
        return wrong

    def _fall_text(self, name: str, means: Mapping[str, float]) -> str:
        return f"{name} has fallen to {means[name]:.3g} from {self._best[name]:.3g}"

    def _mean(self, name: str, value: float) -> float:
        """The mean of the last `patience` values."""
        recent = self._recent[name] = [*self._recent.get(name, []), float(value)][-self._config.patience :]
        return sum(recent) / len(recent)

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint, as JSON-serialisable data."""
        return {"stage": self._stage, "recent": self._recent, "best": self._best, "bad": self._bad} | {
            "idle": self._idle,
            "reasons": self._reasons,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores the state of a checkpoint. Metrics that were not watched then start without history."""
        self._stage = state["stage"]
        watched = (*self._given.least, *self._given.most, *self._followed)
        self._recent, self._best, self._bad = (
            {
                name: value
                for name, value in state[part].items()
                if name.startswith("idle ") or any(fnmatch.fnmatchcase(name, one) for one in watched)
            }
            for part in ("recent", "best", "bad")
        )
        self._idle, self._reasons = dict(state.get("idle", {})), list(state.get("reasons", []))


def _named(bounds: Mapping[str, float], metrics: Mapping[str, Any]) -> dict[str, float]:
    """The bounds of whole names, those of patterns being of the metrics that match."""
    whole = {name: bound for name, bound in bounds.items() if "*" not in name}
    matched = {
        name: bound for pattern, bound in bounds.items() if "*" in pattern for name in fnmatch.filter(metrics, pattern)
    }
    return {**matched, **whole}


def _not_finite(metrics: Mapping[str, Any]) -> str | None:
    watched = (name for name in metrics if name.startswith("actor/") or name == "reward/total")
    return next((name for name in watched if not math.isfinite(metrics[name])), None)
