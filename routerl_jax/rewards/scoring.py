"""Scores a file of predictions of any system: reads rows, applies every answer metric, and bootstraps intervals."""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from routerl_jax.core.progress import Bar
from routerl_jax.core.rows import RowLocation, read_rows
from routerl_jax.data.formats.format import distinct, strings
from routerl_jax.rewards.metrics import ANSWER_METRICS, NORMALIZERS

_PREDICTION_KEYS = ("prediction", "pred_answer")
_UNREAD = ("answer_eval", "answer_ranges", "possible_answers", "candidate_answers")  # other keys of accepted answers
_RESAMPLES = 1000
_Z = 1.959964  # of a standard normal variable, 95 % are nearer to 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """One answer to score. `group` holds the row's values of the fields that the caller groups by."""

    id: str | None
    prediction: str | None
    golds: tuple[str, ...]
    group: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """Mean of each metric over `n` predictions, in [0, 1], with its 95 % interval (low, high; `bootstrap_intervals`)."""

    n: int
    means: Mapping[str, float]
    intervals: Mapping[str, tuple[float, float]]

    def to_json(self) -> dict[str, Any]:
        """`{"n", <metric>: mean, ..., "intervals": {<metric>: [low, high]}}`."""
        intervals = {name: list(interval) for name, interval in self.intervals.items()}
        return {"n": self.n, **self.means, "intervals": intervals}


def read_predictions(path: str | pathlib.Path, group: Sequence[str] = ()) -> list[Prediction]:
    """Reads `{id, prediction | pred_answer, golden_answers, ...}` rows of a file (`core.rows`).

    A prediction may be null (no answer); `golden_answers` and `answer_aliases` are strings or lists of strings.

    Raises:
      ValueError: a row is wrong, or an id occurs twice in a group; names the file, the line, the key and the fix.
    """
    predictions: list[Prediction] = []
    numbers: dict[tuple[str, ...], int] = {}
    for location, row in read_rows(path):
        prediction = _prediction(row, group, location)
        if prediction.id is not None:
            first = numbers.setdefault((prediction.id, *prediction.group), location.number)
            if first != location.number:
                raise location.error(
                    f"duplicate id {prediction.id!r}, first seen in {location.unit} {first}; keep one row per question, "
                    "or group by the field that tells the systems apart (--group=model)"
                )
        predictions.append(prediction)
    if not predictions:
        raise ValueError(f"{path} holds no predictions; write one JSON object per line")
    return predictions


def score_rows(rows: Sequence[Prediction], normalizer: str, progress: bool = False) -> Float[np.ndarray, "N M"]:
    """Every metric of `ANSWER_METRICS`, in its order, of every row; `progress` shows a bar on stderr after a second."""
    NORMALIZERS.get(normalizer)
    bar = Bar(rows, desc="scoring", unit="row", delay=1.0, leave=False, file=sys.stderr, disable=not progress)
    metrics = ANSWER_METRICS.values()
    return np.asarray([[metric(row.prediction, row.golds, normalizer) for metric in metrics] for row in bar])


def bootstrap_intervals(scores: Float[np.ndarray, "*S N M"], *, differences: bool = False) -> Float[np.ndarray, "2 M"]:
    """95 % interval (low, high) of each column's mean over the N rows: percentile bootstrap. nan is left out of the means.

    With several seeds (the first axis), seeds are drawn as well as rows, so that the interval has the variance between them.
    If all scores of a column are equal, all resamples are, too. There the interval is a score interval: Wilson's (JASA 22,
    1927) for scores in [0, 1], such as a share of 0 or 100 %, and Tango's (Statistics in Medicine 17, 1998) for `differences`
    of two such scores.
    """
    rng = np.random.default_rng(0)
    scores = np.asarray(scores, float).reshape(-1, *scores.shape[-2:])
    seeds, n, _ = scores.shape
    present = ~np.isnan(scores)
    values, drawn = np.where(present, scores, 0.0), []
    sums, counts = values.sum(axis=0), present.sum(axis=0)
    with np.errstate(invalid="ignore"):  # a resample without any score
        for _ in range(_RESAMPLES):
            if seeds > 1:
                chosen = rng.integers(seeds, size=seeds)
                sums, counts = values[chosen].sum(axis=0), present[chosen].sum(axis=0)
            weights = np.bincount(rng.integers(n, size=n), minlength=n)
            drawn.append(weights @ sums / (weights @ counts))
    intervals = np.full((2, scores.shape[-1]), np.nan)
    for i in np.flatnonzero(present.any(axis=(0, 1))):
        column, rows = scores[..., i][present[..., i]], int(present[..., i].any(axis=0).sum())
        value, least = float(column[0]), -1.0 if differences else 0.0
        if (column == value).all() and least <= value <= 1:
            reach = _Z**2 / (rows + _Z**2) * (1 + abs(value) if differences else 1)
            intervals[:, i] = max(least, value - reach), min(1.0, value + reach)
        else:
            intervals[:, i] = np.nanquantile([means[i] for means in drawn], (0.025, 0.975))
    return intervals


def summarize(scores: Float[np.ndarray, "N M"]) -> Report:
    """Means and intervals of `score_rows`' result."""
    low, high = bootstrap_intervals(scores).tolist()
    return Report(
        n=len(scores),
        means=dict(zip(ANSWER_METRICS, scores.mean(axis=0).tolist())),
        intervals=dict(zip(ANSWER_METRICS, zip(low, high))),
    )


def summarize_groups(rows: Sequence[Prediction], scores: Float[np.ndarray, "N M"]) -> dict[str, Report]:
    """One report per distinct group, named by its values joined with "/", sorted; empty if the rows have no groups."""
    members: dict[tuple[str, ...], list[int]] = {}
    for index, row in enumerate(rows):
        if row.group:
            members.setdefault(row.group, []).append(index)
    return {"/".join(key): summarize(scores[members[key]]) for key in sorted(members)}


def _prediction(row: Mapping[str, Any], group: Sequence[str], location: RowLocation) -> Prediction:
    missing = [key for key in group if row.get(key) is None]
    if missing:
        raise location.error(f"key {missing[0]!r} of --group is missing; add it to the row or drop it from --group")
    return Prediction(
        id=None if row.get("id") is None else str(row["id"]),
        prediction=_parse_prediction(row, location),
        golds=_parse_golds(row, location),
        group=tuple(str(row[key]) for key in group),
    )


def _parse_prediction(row: Mapping[str, Any], location: RowLocation) -> str | None:
    keys = [key for key in _PREDICTION_KEYS if key in row]
    if len(keys) != 1:
        fault = "both are present" if keys else "neither is present"
        raise location.error(f"give one of the keys {' and '.join(map(repr, _PREDICTION_KEYS))}; {fault}")
    value = row[keys[0]]
    if value is not None and not isinstance(value, str):
        raise location.error(f"key {keys[0]!r} must be a string, or null for no answer, got {value!r}")
    return value


def _parse_golds(row: Mapping[str, Any], location: RowLocation) -> tuple[str, ...]:
    if unread := [key for key in _UNREAD if row.get(key)]:
        raise location.error(f"key {unread[0]!r} is not read here; put the accepted answers under 'golden_answers'")
    if row.get("golden_answers") is None:
        raise location.error("key 'golden_answers' is missing; give a string or a list of strings")
    keys = ("golden_answers", "answer_aliases")
    golds = distinct(*(strings(row.get(key), location, key) for key in keys))
    if not golds:
        raise location.error("key 'golden_answers' holds no answer; give at least one")
    return golds
