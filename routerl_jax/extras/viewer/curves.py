"""The metrics of a run as columns, sent as they grow, and the health panel, their state according to config.watch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from routerl_jax.core.config import from_config_dict
from routerl_jax.extras.viewer.runs import Run
from routerl_jax.training.callbacks import Alarm
from routerl_jax.training.loggers import read_metrics
from routerl_jax.training.sections import WatchConfig
from routerl_jax.training.watch import Watch

# Metrics of the health panel, and what each means. The metrics that config.watch bounds are in the panel, too.
_VITALS = {
    "reward/total": "mean reward of the step",
    "rollout/frac_reward_zero_std": "groups whose attempts are all rewarded alike: nothing to learn from",
    "rollout/entropy": "uncertainty per sampled token, in nats",
    "actor/kl": "distance from the reference policy",
    "actor/grad_norm": "length of the gradient before it is clipped",
    "actor/clip_fraction": "tokens whose ratio was clipped",
    "ratio/effective_sample_share": "how much of the step's data still counts under the current weights",
    "sampler_gap/mean": "sampler and learner disagree on log-probabilities; 0 if numerics agree",
    "importance/kl": "how far the weights that sampled are from the learner's",
    "importance/capped_share": "tokens whose importance was cut off",
    "importance/masked_tokens": "tokens of sequences that were left out, too far off the policy",
    "rollout/well_formed_rate": "episodes that keep to the protocol",
    "rollout/invalid_action_rate": "turns without an action that can be executed",
    "rollout/truncated_rate": "episodes that a token limit ended",
    "rollout/answered_rate": "episodes with an answer",
    "rollout/repeated_search_rate": "searches that ask the same again",
    "rollout/tool_error_rate": "tool calls that failed",
}

_Stamp = tuple[int, ...]  # inode, size and time of change of a file; () where there is none
_Read = tuple[_Stamp, list[dict[str, Any]]]


class Curves:
    """The metrics of one run, read again when their file changes."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._read: _Read = ((), [])
        self._health: tuple[_Stamp, dict[str, Any]] | None = None

    @property
    def rows(self) -> list[dict[str, Any]]:
        """All rows of metrics.jsonl so far."""
        return self._latest()[1]

    def _latest(self) -> _Read:
        """The rows, and which state of the file they are of. Several threads ask, so both are kept as one value."""
        try:
            status = (self.run.path / "metrics.jsonl").stat()
        except OSError:
            return (), []
        stamp = (status.st_ino, status.st_size, status.st_mtime_ns)
        read = self._read
        if stamp != read[0]:
            read = self._read = stamp, read_metrics(self.run.path)
        return read

    def columns(self, after: int, mark: str) -> dict[str, Any]:
        """Steps and values of every metric from row `after` on. From the first row on if the file is no longer the one of
        `mark`: a resumed run writes its last rows again."""
        stamp, rows = self._latest()
        current = str(stamp[0]) if stamp else ""  # an inode may be larger than numbers of JavaScript are exact
        first = after if mark == current and after <= len(rows) else 0
        new = rows[first:]
        names = sorted({name for row in new for name, value in row.items() if _is_number(value) and name != "step"})
        return {
            "mark": current,
            "first": first,
            "count": len(rows),
            "steps": [row["step"] for row in new],
            "stages": [row.get("stage", "") for row in new],
            "values": {name: [_rounded(row.get(name)) for row in new] for name in names},
        }

    def health(self) -> dict[str, Any]:
        """Alarms and vitals.

        `alarms` are the steps at which config.watch stops a run, with the reason. `vitals` has for each metric its last value,
        its bound, its meaning, and whether it is "good", "bad" (out of its bounds now) or "unwatched".
        """
        stamp, rows = self._latest()
        cached = self._health
        if cached is None or cached[0] != stamp:
            try:
                config = from_config_dict(WatchConfig, self.run.config().get("watch", {}))
            except ValueError:  # of another version
                config = WatchConfig()
            cached = self._health = stamp, _health(rows, config)
        return cached[1]


def _health(rows: Sequence[Mapping[str, Any]], config: WatchConfig) -> dict[str, Any]:
    watch = Watch(config)
    alarms = _alarms(watch, rows)
    bad = {name for name, count in watch.state()["bad"].items() if count}
    bounds = _bounds(config)
    vitals = []
    for name in dict.fromkeys((*bounds, *_VITALS)):
        values = [row[name] for row in rows if name in row]
        if values:
            state = "unwatched" if name not in bounds else "bad" if name in bad else "good"
            vitals.append(
                {
                    "metric": name,
                    "last": _rounded(values[-1]),
                    "recent": [_rounded(value) for value in values[-60:]],
                    "bound": bounds.get(name, ""),
                    "meaning": _VITALS.get(name, ""),
                    "state": "bad" if values[-1] is None else state,
                }
            )
    order = {"bad": 0, "good": 1, "unwatched": 2}
    vitals.sort(key=lambda vital: order[vital["state"]])
    return {
        "alarms": [dataclasses.asdict(alarm) for alarm in alarms[:50]],
        "vitals": vitals,
        "patience": config.patience,
    }


def _alarms(watch: Watch, rows: Sequence[Mapping[str, Any]]) -> list[Alarm]:
    """The alarms of these rows. An alarm that lasts is given once, at its beginning."""
    alarms: list[Alarm] = []
    lasting = ""
    for row in rows:
        try:
            # null stands for a value that was not finite (training.loggers)
            numbers = {
                name: math.nan if value is None else value
                for name, value in row.items()
                if value is None or _is_number(value)
            }
            alarm = watch.judge(row["step"], row.get("stage", ""), numbers)
        except ValueError as error:  # a bound of a metric that there isn't
            return [*alarms, Alarm(row["step"], "config.watch", str(error))]
        if alarm is not None and alarm.metric != lasting:
            alarms.append(alarm)
        lasting = alarm.metric if alarm else ""
    return alarms


def _bounds(config: WatchConfig) -> dict[str, str]:
    bounds: dict[str, list[str]] = {}
    for name, least in config.least.items():
        bounds.setdefault(name, []).append(f"≥ {least:g}")
    for name, most in config.most.items():
        bounds.setdefault(name, []).append(f"≤ {most:g}")
    for name, share in config.falls.items():
        bounds.setdefault(name, []).append(f"≥ {share:g} × best")
    for name, drop in config.drops.items():
        bounds.setdefault(name, []).append(f"≥ best − {drop:g}")
    return {name: ", ".join(texts) for name, texts in bounds.items()}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _rounded(value: Any) -> float | None:
    return float(f"{value:.6g}") if _is_number(value) and math.isfinite(value) else None
