"""Questions from files: FlashRAG jsonl, HippoRAG json, and whatever else names a question and its answers."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any, Protocol

from routerl_jax.core.registry import Registry
from routerl_jax.core.rows import Place, read_rows
from routerl_jax.core.types import Example


class ExampleSource(Protocol):
    """Random-access examples, as grain reads them."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Example: ...


DATASETS: Registry[Any] = Registry("dataset")

_ANSWER_KEYS = ("golden_answers", "answers", "answer")


class FileExamples:
    """The questions of one file, in its order.

    Rows are objects with `question`, `golden_answers` (or `answers`, `answer`; a string or a list) and, optionally, `id` and
    `answer_aliases`. An answer that is repeated is kept once.
    A `.jsonl` file has one per line (FlashRAG), a `.json` file has a list (HippoRAG); both may end in `.gz`. All other keys
    go to `metadata`.

    Raises:
      ValueError: names the file and the line or item that cannot be used, and why.
    """

    def __init__(self, path: str | pathlib.Path) -> None:
        self._examples: list[Example] = []
        numbers: dict[str, int] = {}
        for place, row in read_rows(path):
            example = _example(row, place)
            first = numbers.setdefault(example.id, place.number)
            if first != place.number:
                raise place.error(f"id {example.id!r} was used in {place.unit} {first} already; ids must be distinct")
            self._examples.append(example)
        if not self._examples:
            raise ValueError(f"questions file {path} holds no questions")

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> Example:
        return self._examples[index]


class Subset:
    """A stretch of another source: items start, start + 1, ... before stop (None: to the end)."""

    def __init__(self, source: ExampleSource, start: int = 0, stop: int | None = None) -> None:
        length = len(source)
        stop = length if stop is None else stop
        if not 0 <= start < stop <= length:
            raise ValueError(f"items {start}:{stop} were asked for, but the source has {length}")
        self._source, self._start, self._stop = source, start, stop

    def __len__(self) -> int:
        return self._stop - self._start

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self._source[self._start + index]


def open_dataset(name: str) -> ExampleSource:
    """Examples by name: `atlas/train` (validation, test), a registered dataset, a dotted path, or a file.

    Raises:
      ValueError: there is no such dataset or file.
    """
    if name.startswith("atlas/"):
        from routerl_jax.data.atlas.builder import AtlasExamples

        split = name.removeprefix("atlas/")
        if split not in ("train", "validation", "test"):
            raise ValueError(f"dataset {name!r}: Atlas has the splits train, validation and test")
        return AtlasExamples(split)
    if name in DATASETS or (":" in name and not pathlib.Path(name).exists()):
        return DATASETS.get(name)()
    return FileExamples(name)


def _example(row: Mapping[str, Any], place: Place) -> Example:
    question = row.get("question")
    if not isinstance(question, str) or not question.strip():
        raise place.error("key 'question' is missing or empty")
    key = next((key for key in _ANSWER_KEYS if row.get(key)), None)
    if key is None:
        raise place.error("no answers; give them under 'golden_answers'")
    answers = [row[key]] if isinstance(row[key], str) else row[key]
    if not isinstance(answers, list) or not all(isinstance(answer, str) for answer in answers):
        raise place.error(f"key {key!r} must be a string or a list of strings")
    aliases = row.get("answer_aliases") or []  # MuSiQue
    if not isinstance(aliases, list) or not all(isinstance(alias, str) for alias in aliases):
        raise place.error("key 'answer_aliases' must be a list of strings")
    used = ("id", "_id", "question", "answer_aliases", key)
    metadata = {name: value for name, value in row.items() if name not in used}
    name = next((row[k] for k in ("id", "_id") if row.get(k) is not None), place.number)
    return Example(
        id=str(name), question=question, answers=tuple(dict.fromkeys([*answers, *aliases])), metadata=metadata
    )
