"""The index of the episodes of all runs, as columns of numbers. It grows in the background; records stay in their files."""

from __future__ import annotations

import dataclasses
import pathlib
import threading
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

import numpy as np
from jaxtyping import Bool, Int

from routerl_jax.extras.viewer.runs import Run
from routerl_jax.extras.viewer.summary import FAILURES, Summary

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
_BITS = 63  # knowledge bases that have a bit of their own; further ones share the last

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
        numbers = [min(self.kbs.find(name), _BITS) for name in names if self.kbs.find(name) >= 0]
        return np.uint64(sum(1 << number for number in set(numbers)))

    def _append(self, location: Location, summary: Summary, answer: str | None) -> None:
        row = self._count
        if row == len(self._rows):
            self._rows = np.concatenate([self._rows, np.zeros(row, _ROW)])
        question = self.questions.number((summary.question, summary.text))
        file = self.files.number(str(location.path))
        numbers = [min(self.kbs.number(name), _BITS) for name in sorted(summary.kbs)]
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
        self._retrieved(row, summary.passages)
        self._count += 1

    def _retrieved(self, row: int, passages: Iterable[str]) -> None:
        for text in dict.fromkeys(passages):
            if self._pair_count == len(self._pairs):
                self._pairs = np.concatenate([self._pairs, np.zeros_like(self._pairs)])
            self._pairs[self._pair_count] = (self.passages.number(text), row)
            self._pair_count += 1


def sets_with(index: Index, name: str) -> Int[np.ndarray, " S"]:
    """Numbers of the sets of data sets in which a name is."""
    return np.asarray([number for number, names in enumerate(index.dataset_sets.all) if name in names], int)
