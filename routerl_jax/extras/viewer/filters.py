"""The filter of episodes: as the page's address has it, and the rows of the index that pass it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from routerl_jax.extras.viewer.index import Index, sets_with
from routerl_jax.extras.viewer.summary import FAILURES

RANGES = ("reward", "advantage", "tokens", "turns", "searches", "step")
NO_SEARCH = "(no search)"
_ORDERS = ("new", "old", "reward", "-reward", "advantage", "-advantage", "tokens", "-tokens", "question")
_MANY = ("run", "source", "kb", "failure", "dataset", "correct")
_ONE = ("text", "question", "order", "offset", "limit")
_CORRECT = {"right": 1, "wrong": 0, "unknown": -1}
_LIMIT = 200  # rows of a page, at most


@dataclasses.dataclass(frozen=True, kw_only=True)
class Filter:
    """The condition for an episode to be shown: for each field that is set, one of its values.

    Attributes:
      run, source, kb, failure, dataset, correct: names; () for all. The failure "none" means an episode without any, the
        knowledge base "(no search)" an episode without a search.
      ranges: (least, most) of columns in RANGES. An episode without such a number passes no range.
      text: words in the episode or in a passage that it retrieved.
      question: the id of the question.
      order: one of _ORDERS; "-" means the largest first.
    """

    run: tuple[str, ...] = ()
    source: tuple[str, ...] = ()
    kb: tuple[str, ...] = ()
    failure: tuple[str, ...] = ()
    dataset: tuple[str, ...] = ()
    correct: tuple[str, ...] = ()
    ranges: Mapping[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    text: str = ""
    question: str = ""
    order: str = "new"
    offset: int = 0
    limit: int = 100


def read_filter(pairs: Sequence[tuple[str, str]]) -> Filter:
    """The filter of (name, value) pairs of a query string; `reward_min=0.5` and `reward_max=..` are ranges.

    Raises:
      ValueError: an unknown name, or a value that it can't have.
    """
    multiple: dict[str, list[str]] = {}
    single: dict[str, Any] = {}
    bounds: dict[str, list[float]] = {}
    for name, value in pairs:
        column, _, end = name.rpartition("_")
        if name in _MANY:
            multiple.setdefault(name, []).append(value)
        elif name in ("offset", "limit"):
            single[name] = _count(name, value)
        elif name in _ONE:
            single[name] = value
        elif column in RANGES and end in ("min", "max"):
            bounds.setdefault(column, [-math.inf, math.inf])[end == "max"] = _bound(name, value)
        else:
            ends = [f"{column}_{end}" for column in RANGES for end in ("min", "max")]
            raise ValueError(f"there is no filter {name!r}; there are: {', '.join((*_MANY, *_ONE, *ends))}")
    if single.get("order", "new") not in _ORDERS:
        raise ValueError(f"order={single['order']!r} must be one of {', '.join(_ORDERS)}")
    for name, allowed in (("failure", (*FAILURES, "none")), ("correct", tuple(_CORRECT))):
        if unknown := next((value for value in multiple.get(name, ()) if value not in allowed), None):
            raise ValueError(f"{name}={unknown!r} must be one of {', '.join(allowed)}")
    single["limit"] = min(single.get("limit", 100), _LIMIT)
    ranges = {column: (least, most) for column, (least, most) in bounds.items()}
    return Filter(**{name: tuple(values) for name, values in multiple.items()}, ranges=ranges, **single)


def _bound(name: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if math.isnan(number):
        raise ValueError(f"{name}={value!r} is no number")
    return number


def _count(name: str, value: str) -> int:
    if not value.isdecimal():
        raise ValueError(f"{name}={value!r} must be a whole number from 0 on")
    return int(value)


def masks(index: Index, rows: np.ndarray, chosen: Filter) -> dict[str, Bool[np.ndarray, " R"]]:
    """For each field of the filter that is set, the rows of a snapshot that pass it. The mask "" holds the rows whose file
    still has them."""
    result = {"": rows["alive"].copy()}
    if chosen.run:
        numbers = [number for number, run in enumerate(index.runs) if run.name in chosen.run]
        result["run"] = np.isin(rows["run"], numbers)
    if chosen.source:
        result["source"] = np.isin(rows["source"], [index.sources.find(name) for name in chosen.source])
    if chosen.kb:
        searched = (rows["kbs"] & index.bits(chosen.kb)) != 0
        result["kb"] = searched | (rows["kbs"] == 0) if NO_SEARCH in chosen.kb else searched
    if chosen.failure:
        bits = sum(1 << FAILURES.index(name) for name in chosen.failure if name != "none")
        failed = (rows["failures"] & np.uint16(bits)) != 0
        result["failure"] = failed | (rows["failures"] == 0) if "none" in chosen.failure else failed
    if chosen.dataset:
        numbers = np.concatenate([sets_with(index, name) for name in chosen.dataset])
        result["dataset"] = np.isin(rows["datasets"], numbers)
    if chosen.correct:
        result["correct"] = np.isin(rows["correct"], [_CORRECT[name] for name in chosen.correct])
    for column, (least, most) in chosen.ranges.items():
        result[column] = (rows[column] >= np.asarray(least, np.float32)) & (
            rows[column] <= np.asarray(most, np.float32)
        )
    if chosen.question:
        numbers = [number for number, (name, _) in enumerate(index.questions.all) if name == chosen.question]
        result["question"] = np.isin(rows["question"], numbers)
    if chosen.text:
        result["text"] = index.with_text(chosen.text, rows)
    return result


def passing(field_masks: Mapping[str, Bool[np.ndarray, " R"]], without: str = "") -> Bool[np.ndarray, " R"]:
    """The rows that pass all masks, or all but the mask of one name."""
    return np.logical_and.reduce([mask for name, mask in field_masks.items() if not name or name != without])


def ordered(rows: np.ndarray, passes: Bool[np.ndarray, " R"], order: str) -> Int[np.ndarray, " N"]:
    """Numbers of the rows that pass, in order. Rows without the number that orders them come last."""
    numbers = np.flatnonzero(passes)
    if order in ("new", "old"):
        by_place = np.lexsort((rows["line"][numbers], rows["source"][numbers], rows["run"][numbers]))
        numbers = numbers[by_place]
        steps = rows["step"][numbers].astype(np.float64)
        steps[steps < 0] = np.nan  # evaluations are of no step
        return numbers[np.argsort(-steps if order == "new" else steps, kind="stable")]
    column = rows[order.lstrip("-")][numbers].astype(np.float64)
    return numbers[np.argsort(-column if order.startswith("-") else column, kind="stable")]  # nan sorts last


def facets(
    index: Index, rows: np.ndarray, field_masks: Mapping[str, Bool[np.ndarray, " R"]]
) -> dict[str, list[tuple[str, int]]]:
    """For each value of the filters, the number of rows that it would show beside the other filters that are set."""

    def filtered_values(name: str, column: str) -> np.ndarray:
        return rows[column][passing(field_masks, name)]

    sets = np.bincount(filtered_values("dataset", "datasets"), minlength=len(index.dataset_sets.all))
    of_set: dict[str, int] = {}
    for names, count in zip(index.dataset_sets.all, sets.tolist()):
        for name in names:
            of_set[name] = of_set.get(name, 0) + count
    kbs, failed, correct = (
        filtered_values("kb", "kbs"),
        filtered_values("failure", "failures"),
        filtered_values("correct", "correct"),
    )
    sources = np.bincount(filtered_values("source", "source"), minlength=len(index.sources.all)).tolist()
    runs = np.bincount(filtered_values("run", "run"), minlength=len(index.runs)).tolist()
    return {
        "run": [(run.name, count) for run, count in zip(index.runs, runs)],
        "source": sorted(zip(index.sources.all, sources)),
        "kb": [
            *((name, int(np.count_nonzero(kbs & index.bits([name])))) for name in sorted(index.kbs.all)),
            (NO_SEARCH, int(np.count_nonzero(kbs == 0))),
        ],
        "failure": [
            *((name, int(np.count_nonzero(failed & np.uint16(1 << bit)))) for bit, name in enumerate(FAILURES)),
            ("none", int(np.count_nonzero(failed == 0))),
        ],
        "dataset": sorted(of_set.items()),
        "correct": [(name, int(np.count_nonzero(correct == value))) for name, value in _CORRECT.items()],
    }
