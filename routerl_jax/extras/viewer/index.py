"""The index of the episodes of all runs, as columns of numbers. It grows in the background; records stay in their files."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import pathlib
import threading
import time
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import orjson
from absl import logging
from jaxtyping import Bool, Int

from routerl_jax.core.files import parse_json
from routerl_jax.extras.viewer.runs import Run, controls_of
from routerl_jax.rewards.metrics import exact_match

# --- The summary of an episode record for the index: the numbers to filter by, and the words to search. ---


FAILURES = (
    "no answer",
    "truncated",
    "invalid action",
    "malformed",
    "tool error",
    "repeated search",
    "picture not shown",
    "refusal",
    "endpoint",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary:
    """The numbers and words of an episode.

    Attributes:
      reward, advantage: nan where the record has none.
      correct: 1 or 0 by exact match, -1 where there is no gold answer.
      trained: 1 if the step learnt from the episode, 0 if not, -1 where the record does not say.
      tokens: sampled tokens of all turns.
      kbs: names of the knowledge bases that were searched.
      failures: of FAILURES.
      datasets: data set, kind and type of the question, from its metadata.
      search_text: question, gold answers, answer, thoughts and queries in lower case.
      passages: texts of the retrieved passages in lower case, titles included.
    """

    question: str
    text: str
    sample: int
    step: int
    reward: float
    advantage: float
    correct: int
    trained: int
    turns: int
    searches: int
    tokens: int
    forked: bool
    kbs: frozenset[str]
    failures: frozenset[str]
    datasets: frozenset[str]
    search_text: str
    passages: tuple[str, ...]


def summarise(record: Mapping[str, Any], normalizer: str) -> Summary:
    """The summary of a record as `evaluation.records` writes them.

    Raises:
      KeyError, TypeError, AttributeError, ValueError: it is no such record.
    """
    turns = record["turns"]
    calls = [call for turn in turns for call in turn["calls"]]
    actions = [turn["action"] or {} for turn in turns]
    golds = tuple(record["golden_answers"])
    rewards = record.get("rewards") or {}
    words = [record["id"], record["question"], *golds, record["prediction"] or ""]
    for turn, action in zip(turns, actions):
        words += [action.get("thought") or "", action.get("query") or "", action.get("error") or ""]
        words += [] if action.get("thought") or action.get("query") else [turn["text"]]
    words += [call["query"] for call in calls]
    return Summary(
        question=str(record["id"]),
        text=record["question"],
        sample=_count(record["sample"]),
        step=_count(record.get("step", -1)),
        reward=_number(rewards.get("total")),
        advantage=_number(record.get("advantage")),
        correct=int(_exact_match(record["prediction"], golds, normalizer)) if golds else -1,
        trained=int(bool(record["trained"])) if "trained" in record else -1,
        turns=len(turns),
        searches=len(calls),
        tokens=_count(sum(turn["tokens"] for turn in turns)),
        forked=bool(record.get("branches")),
        kbs=frozenset(call["tool"] for call in calls),
        failures=frozenset(_failures(record, calls, actions)),
        datasets=frozenset(_datasets(record.get("metadata") or {})),
        search_text="\n".join(dict.fromkeys(words)).lower(),
        passages=tuple(f"{p['title']}\n{p['text']}".lower() for call in calls for p in call["passages"]),
    )


def _failures(record: Mapping[str, Any], calls: list[dict[str, Any]], actions: list[dict[str, Any]]) -> list[str]:
    asked = [(call["tool"], call["query"], call.get("image")) for call in calls]
    shown = [item for turn in record["turns"] for item in turn.get("shown", ())]
    happened = {
        "no answer": record["prediction"] is None,
        "truncated": record["truncated"],
        "invalid action": any(action.get("kind") == "invalid" or action.get("error") for action in actions),
        "malformed": any(not turn["well_formed"] for turn in record["turns"]),
        "tool error": any(call["error"] is not None for call in calls),
        "repeated search": len(set(asked)) < len(asked),
        "picture not shown": any(item["error"] for item in shown),
        "refusal": any(action.get("kind") == "refusal" for action in actions),
        "endpoint": bool(record.get("failure")),
    }
    return [name for name in FAILURES if happened[name]]


def _datasets(metadata: Mapping[str, Any]) -> list[str]:
    """ "kind: mixed", "dataset: hotpotqa", ..; of several values each."""
    names = []
    for key, value in metadata.items():
        values = value if isinstance(value, list) else [value]
        names += [f"{key}: {text}" for text in values if isinstance(text, str)]
    return names


@functools.lru_cache(65536)
def _exact_match(prediction: str | None, golds: tuple[str, ...], normalizer: str) -> float:
    return exact_match(prediction, list(golds), normalizer)


def _count(value: Any) -> int:
    if not -(2**31) <= value < 2**31:
        raise ValueError(f"{value!r} is no number that the index can hold")
    return int(value)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else math.nan


# --- The index of the episodes of all runs, as columns of numbers. It grows in the background; records stay in their files. ---


_ROW = np.dtype(
    [
        ("alive", "?"),  # its file still holds it
        ("run", "i2"),
        ("source", "i4"),
        ("file", "i4"),
        ("line", "i4"),
        ("offset", "i8"),
        ("size", "i8"),
        ("question", "i4"),
        ("sample", "i4"),
        ("step", "i4"),
        ("reward", "f4"),
        ("advantage", "f4"),
        ("correct", "i1"),
        ("trained", "i1"),
        ("turns", "i4"),
        ("searches", "i4"),
        ("tokens", "i4"),
        ("forked", "?"),
        ("kbs", "u8"),  # a bit each
        ("failures", "u2"),  # a bit each
        ("datasets", "i4"),  # which set of them
    ]
)
LAST_BIT = 63  # knowledge bases that have a bit of their own; further ones share the last

K = TypeVar("K", bound=Hashable)


class Names(Generic[K]):
    """Numbers for names, in the order in which they come."""

    def __init__(self) -> None:
        self.all: list[K] = []
        self._numbers: dict[K, int] = {}

    def number(self, name: K) -> int:
        """The name's number, a new one if it has none."""
        if name not in self._numbers:
            self._numbers[name] = len(self.all)
            self.all.append(name)
        return self._numbers[name]

    def find(self, name: K) -> int:
        """The name's number, -1 if it has none."""
        return self._numbers.get(name, -1)


@dataclasses.dataclass(frozen=True)
class Location:
    """The place of a record: its run, file, line, first byte and number of bytes."""

    run: int
    source: str
    path: pathlib.Path
    line: int
    offset: int
    size: int


class Index:
    """The columns. One thread adds rows. Other threads read a `snapshot`, which later additions do not change.

    Attributes:
      runs: by their number in the column `run`.
      questions: (id, text) of each. Data sets number their questions from 0 on, so an id alone may be that of several.
    """

    def __init__(self, runs: list[Run]) -> None:
        self.runs = runs
        self.sources, self.files, self.kbs = Names[str](), Names[str](), Names[str]()
        self.questions = Names[tuple[str, str]]()
        self.dataset_sets = Names[frozenset[str]]()
        self.search_texts: list[str] = []  # of each row, the text that searches look at
        self.answers: list[str | None] = []  # of each row
        self.passages = Names[str]()  # texts
        self._lock = threading.Lock()
        self._rows = np.zeros(1024, _ROW)
        self._count = 0
        self._pairs = np.zeros((1024, 2), np.int32)  # passage, row
        self._pair_count = 0
        self._lines: dict[tuple[int, int], int] = {}  # (file, line) -> row
        self.version = 0  # grows with every change

    def __len__(self) -> int:
        return self._count

    def add(self, episodes: Iterable[tuple[Location, Summary, str | None]]) -> None:
        """Appends episodes, each with its location, summary and answer."""
        with self._lock:
            for location, summary, answer in episodes:
                self._append(location, summary, answer)
            self.version += 1

    def forget(self, path: pathlib.Path) -> None:
        """Drops the rows of a file that was replaced or is gone."""
        with self._lock:
            file = self.files.find(str(path))
            rows = self._rows[: self._count]
            rows["alive"][rows["file"] == file] = False
            self._lines = {key: row for key, row in self._lines.items() if key[0] != file}
            self.version += 1

    def snapshot(self) -> np.ndarray:
        """The rows so far, a structured array."""
        with self._lock:
            return self._rows[: self._count]

    def row(self, path: pathlib.Path, line: int) -> int | None:
        """The row of a record; None where the index has none (any more)."""
        return self._lines.get((self.files.find(str(path)), line))

    def location_of(self, row: int) -> Location:
        """The location of a row's record: its file, line and bytes."""
        entry = self._rows[row]
        path = pathlib.Path(self.files.all[entry["file"]])
        source = self.sources.all[entry["source"]]
        return Location(int(entry["run"]), source, path, int(entry["line"]), int(entry["offset"]), int(entry["size"]))

    def with_text(self, needle: str, rows: np.ndarray) -> Bool[np.ndarray, " R"]:
        """The rows that have these words in their own texts or in a retrieved passage. Case does not matter."""
        needle = needle.lower()
        hits = np.fromiter((needle in text for text in self.search_texts[: len(rows)]), bool, len(rows))
        with self._lock:
            pairs, passages = self._pairs[: self._pair_count], self.passages.all[:]
        of_passage = np.fromiter((needle in text for text in passages), bool, len(passages))
        retrieved = pairs[of_passage[pairs[:, 0]], 1] if passages else np.zeros(0, np.int32)
        hits[retrieved[retrieved < len(rows)]] = True
        return hits

    def bits(self, names: Iterable[str]) -> np.uint64:
        """The bits of these knowledge bases in the column `kbs`. Names that no episode has searched have none."""
        numbers = [min(self.kbs.find(name), LAST_BIT) for name in names if self.kbs.find(name) >= 0]
        return np.uint64(sum(1 << number for number in set(numbers)))

    def _append(self, location: Location, summary: Summary, answer: str | None) -> None:
        row = self._count
        if row == len(self._rows):
            self._rows = np.concatenate([self._rows, np.zeros(row, _ROW)])
        question = self.questions.number((summary.question, summary.text))
        file = self.files.number(str(location.path))
        numbers = [min(self.kbs.number(name), LAST_BIT) for name in sorted(summary.kbs)]
        self._rows[row] = (
            True,
            location.run,
            self.sources.number(location.source),
            file,
            location.line,
            location.offset,
            location.size,
            question,
            summary.sample,
            summary.step,
            summary.reward,
            summary.advantage,
            summary.correct,
            summary.trained,
            summary.turns,
            summary.searches,
            summary.tokens,
            summary.forked,
            sum(1 << number for number in set(numbers)),
            sum(1 << FAILURES.index(name) for name in summary.failures),
            self.dataset_sets.number(summary.datasets),
        )
        self.search_texts.append(summary.search_text)
        self.answers.append(answer)
        self._lines[(file, location.line)] = row
        self._count += 1
        for text in dict.fromkeys(summary.passages):
            if self._pair_count == len(self._pairs):
                self._pairs = np.concatenate([self._pairs, np.zeros_like(self._pairs)])
            self._pairs[self._pair_count] = (self.passages.number(text), row)
            self._pair_count += 1


# --- Fills the index from the files of the runs, and follows the files as they grow. ---


_BATCH = 256  # records that are added at a time
_PAUSE = 1.0  # seconds between two looks at the files


@dataclasses.dataclass
class _File:
    """How far a file was read, in bytes and lines, and its inode and time of change then."""

    inode: int
    changed: int
    offset: int = 0
    lines: int = 0


class Follower:
    """A thread that reads the files of the runs, and looks every second for new records.

    A file that has grown is read from where it ended; an incomplete last line is left for later. A file that was replaced is
    read again from its beginning. Controls that a run begins meanwhile are added to `runs`.

    Attributes:
      skipped: for each file, the number of its lines that are no episode records.
      settled: whether the first look at all files is done.
    """

    def __init__(self, runs: list[Run], index: Index) -> None:
        self._runs, self._index = runs, index
        self._files: dict[pathlib.Path, _File] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="viewer index", daemon=True)
        self.skipped: dict[str, int] = {}
        self.settled = False

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread, after the batch that it is at."""
        self._ended.set()
        self._thread.join()

    def look(self) -> None:
        """One look at all files of all runs."""
        seen: set[pathlib.Path] = set()
        known_paths = {run.path for run in self._runs}
        self._runs += [new for run in list(self._runs) for new in controls_of(run) if new.path not in known_paths]
        for number, run in enumerate(self._runs):
            for path, source in run.record_files():
                if self._ended.is_set():
                    return
                seen.add(path)
                try:
                    self._read(number, run, path, source)
                except OSError as error:  # it may be back at the next look
                    logging.warning("%s: %s", path, error)
        for path in self._files.keys() - seen:
            del self._files[path]
            self._index.forget(path)
        self.settled = True

    def _follow(self) -> None:
        while not self._ended.is_set():
            try:
                self.look()
            except Exception:  # the page goes on with the current index
                logging.exception("the index could not be brought up to date; next try in %g s", _PAUSE)
            self._ended.wait(_PAUSE)

    def _read(self, number: int, run: Run, path: pathlib.Path, source: str) -> None:
        status = os.stat(path)
        progress = self._files.get(path)
        if progress is not None and (progress.inode != status.st_ino or status.st_size < progress.offset):
            self._index.forget(path)
            progress = None
        if progress is None:
            progress = self._files[path] = _File(status.st_ino, 0)
            self.skipped.pop(str(path), None)
        if progress.changed == status.st_mtime_ns and progress.offset == status.st_size:
            return
        progress.changed = status.st_mtime_ns
        batch: list[tuple[Location, Summary, str | None]] = []
        with path.open("rb") as file:
            for line, offset, content in _whole_lines(file, progress):
                record = _record(content)
                try:
                    summary = summarise(record, run.normalizer)
                    location = Location(number, source, path, line, offset, len(content))
                    batch.append((location, summary, record["prediction"]))
                except (KeyError, TypeError, AttributeError, ValueError):
                    self.skipped[str(path)] = self.skipped.get(str(path), 0) + 1
                if len(batch) == _BATCH:
                    self._index.add(batch)
                    batch = []
                    if self._ended.is_set():
                        return
                    time.sleep(0)  # let requests in
        if batch:
            self._index.add(batch)


def _whole_lines(file: Any, progress: _File) -> Iterator[tuple[int, int, bytes]]:
    """(number from 0, first byte, content) of each line from where the file was read to. Advances `progress`."""
    file.seek(progress.offset)
    for content in file:
        if not content.endswith(b"\n"):
            return
        line, offset = progress.lines, progress.offset
        progress.lines, progress.offset = line + 1, offset + len(content)
        if content.strip():
            yield line, offset, content


def _record(content: bytes) -> Any:
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError:  # it knows no NaN, which the numbers of a run that goes wrong may be
        with contextlib.suppress(ValueError):
            return parse_json(content)
        return None


def read_record(location: Location) -> dict[str, Any]:
    """The record at a location. Raises ValueError if it is no longer there."""
    try:
        with location.path.open("rb") as file:
            file.seek(location.offset)
            record = _record(file.read(location.size))
    except OSError as error:
        raise ValueError(f"{location.path}: can't be read ({error.strerror}); reload the page") from error
    if not isinstance(record, dict):
        raise ValueError(
            f"{location.path}, line {location.line + 1}: the record has changed meanwhile; reload the page"
        )
    return record


# --- The filter of episodes: as the page's address has it, and the rows of the index that pass it. ---


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
            single[name] = whole_number(name, value)
        elif name in _ONE:
            single[name] = value
        elif column in RANGES and end in ("min", "max"):
            try:
                bound = float(value)
            except ValueError:
                bound = math.nan
            if math.isnan(bound):
                raise ValueError(f"{name}={value!r} is no number")
            bounds.setdefault(column, [-math.inf, math.inf])[end == "max"] = bound
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


def whole_number(name: str, value: str) -> int:
    """A parameter's value. Raises ValueError that names it."""
    if not value.isdecimal() or len(value) > 15:  # JavaScript counts so far
        raise ValueError(f"{name}={value[:40]!r} must be a whole number from 0 to 10^15 - 1")
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
        numbers = [number for number, names in enumerate(index.dataset_sets.all) if names & set(chosen.dataset)]
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
