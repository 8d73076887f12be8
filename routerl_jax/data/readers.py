"""Questions by name: a file in any known format, a part of one, several as one, Atlas, or a data set of another package."""

from __future__ import annotations

import collections
import dataclasses
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from jaxtyping import Int

from routerl_jax.core.buckets import in_bucket
from routerl_jax.core.registry import Registry
from routerl_jax.core.types import Example
from routerl_jax.data.formats.known import FORMATS, distinct_examples, split_name
from routerl_jax.data.formats.tables import is_pattern
from routerl_jax.data.hub import on_this_machine

_PART = re.compile(r"(.+?)\[([^\[\]]*)\]")
_RANGE = re.compile(r"(\d*):(\d*)")
_PREPARED = "tfds/"
_TRAJECTORIES = ("trajectories", "trajectories/text")


class ExampleSource(Protocol):
    """Random-access examples, as grain reads them."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Example: ...


DATASETS: Registry[Any] = Registry("dataset")


class FileExamples(list[Example]):
    """The questions of one file, in its order, held in memory.

    A `.jsonl` file has one row per line (FlashRAG, MuSiQue), a `.json` file a list (HotpotQA, HippoRAG). `.tsv` and `.csv` name
    their columns (PopQA). All of these may be compressed. `.parquet` holds verl's rows and the hub's. The keys of a row decide
    its format (data.formats), unless `form` names it. Rows without an answer are left out if their data set has such rows
    (MuSiQue-Full, test sets); in other data sets they are an error. A repeated answer is kept once. With `pictures`, rows
    without a readable picture are left out.

    Attributes:
      left_out: number of rows that are left out, by what they lack (`answer`, `picture`).

    Raises:
      ValueError: a row cannot be used; names the file and the line or item, and says why.
    """

    def __init__(self, path: str | pathlib.Path, form: str = "", *, pictures: bool = False) -> None:
        self.left_out = collections.Counter[str]()
        super().__init__(distinct_examples(path, form, pictures=pictures, left_out=self.left_out))


class Subset:
    """A range of another source: the items from `start` up to, not including, `stop` (None: to the end)."""

    def __init__(self, source: ExampleSource, start: int = 0, stop: int | None = None) -> None:
        length = len(source)
        stop = length if stop is None else stop
        if not 0 <= start < stop <= length:
            raise ValueError(f"items {start}:{stop} were asked for, but the source has {length}")
        self._source = source
        self._items: Sequence[int] = range(start, stop)
        self.left_out = rows_left_out(source)

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self._source[self._items[index]]

    @classmethod
    def with_pictures(cls, source: ExampleSource) -> Subset:
        """The items that have a picture. Raises ValueError if none has one."""
        subset = cls(source)
        subset._items = [i for i in range(len(source)) if source[i].images]
        if not subset._items:
            raise ValueError(f"none of the {len(source)} examples has a picture")
        return subset


class Joined:
    """Several sources in turns: one example of each, until the short ones are used up. So the first few examples represent
    all sources.

    An example's id becomes `NAME/id`, and `metadata["dataset"]` is the name, because data sets use the same numbers as ids.

    Raises:
      ValueError: two sources have the same name.
    """

    def __init__(self, sources: Sequence[tuple[str, ExampleSource]]) -> None:
        names = [name for name, _ in sources]
        repeated = next((name for name in names if names.count(name) > 1), None)
        if repeated is not None:
            raise ValueError(
                f"two of the joined data sets are called {repeated!r}; rename a file, or join them in one file"
            )
        self._sources = list(sources)
        self.left_out = sum(
            (collections.Counter(rows_left_out(source)) for _, source in sources), collections.Counter()
        )
        self._turns = in_turns([len(source) for _, source in sources])

    def __len__(self) -> int:
        return len(self._turns)

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < len(self):
            raise IndexError(index)
        number, item = self._turns[index].tolist()
        name, source = self._sources[number]
        example = source[item]
        return dataclasses.replace(example, id=f"{name}/{example.id}", metadata={**example.metadata, "dataset": name})


def rows_left_out(source: ExampleSource) -> Mapping[str, int]:
    """Number of rows that the file of a data set has more than the data set, by what they lack; {} if it keeps no count."""
    return getattr(source, "left_out", {})


def in_turns(sizes: Sequence[int]) -> Int[np.ndarray, "N 2"]:
    """(list, item) for all items of lists of these sizes: the first of each, the second of each that has one, and so on."""
    lists = np.repeat(np.arange(len(sizes)), sizes)
    items = np.concatenate([np.arange(size) for size in (0, *sizes)])
    return np.stack([lists, items], axis=1)[np.lexsort((lists, items))]


def open_dataset(name: str) -> ExampleSource:
    """Opens examples by name. A name has one of these forms:

      `atlas/SPLIT`: Atlas; SPLIT is train, validation or test. `atlas/train/single+multi` are the questions that need a search,
        `atlas/train/visual` those that show a flag.
      a registered data set, or a dotted path (`package.module:attribute`).
      `FILE`: a file of questions. `FORMAT:FILE` names the format (data.formats.known.FORMATS) if the keys of the rows don't
        decide it, such as `hotpotqa:FILE`.
      `tfds/FILE`, `tfds/FORMAT:FILE`: the file is converted once to array_record files in the cache, and read from those. This
        takes no memory.
      `trajectories:FILE`: the steps of golden trajectories (data.trajectories). `trajectories/text:FILE`: of trajectories
        without images.

    A FILE with * or ? is all such files (`data/train-*.parquet`). `hf://datasets/ORG/NAME/FILE` is a file on the hub
    (data.hub). `NAME[0:200]`, `NAME[200:]` and `NAME[:200]` are a part of NAME, and `NAME[pictures]` its examples with a
    picture. Several names with commas between them are one data set (`Joined`).

    Raises:
      ValueError: there is no such dataset or file, or a row of it can't be used.
    """
    if "," in name and not pathlib.Path(name).exists():
        parts = [part.strip() for part in name.split(",")]
        return Joined(list(zip(short_names(parts), map(open_dataset, parts))))
    name = on_this_machine(name)
    whole, part = _split_part(name)
    if part:
        return _open_part(whole, part)
    if name.startswith("atlas/"):
        from routerl_jax.data.atlas.questions import ALL_KINDS, KINDS, AtlasExamples

        split, _, kinds = name.removeprefix("atlas/").partition("/")
        if split not in ("train", "validation", "test"):
            raise ValueError(f"dataset {name!r}: Atlas has the splits train, validation and test")
        chosen = kinds.split("+") if kinds else KINDS
        if unknown := [kind for kind in chosen if kind not in ALL_KINDS]:
            raise ValueError(
                f"dataset {name!r}: no questions of Atlas are {unknown[0]!r}; there are: {', '.join(ALL_KINDS)}"
            )
        return AtlasExamples(split, chosen)
    if name in DATASETS:
        return _made(name)
    if name.startswith(_PREPARED) and not pathlib.Path(name).exists():
        from routerl_jax.data.prepared import PreparedExamples

        form, path = split_name(name.removeprefix(_PREPARED))
        return PreparedExamples(path, form)
    kind, _, path = name.partition(":")
    if kind in _TRAJECTORIES and path:
        from routerl_jax.data.trajectories import StepExamples

        return StepExamples(path, text_only=kind == _TRAJECTORIES[1])
    form, path = split_name(name)
    if not form and ":" in name and not in_bucket(name) and not pathlib.Path(name).exists():
        if "." not in name.partition(":")[0] and name.partition(":")[2].count("."):  # a misspelt format
            FORMATS.get(name.partition(":")[0])  # raises ValueError that lists them
        return _made(name)
    return FileExamples(path, form)


def _made(name: str) -> ExampleSource:
    """The data set that a registered function, or one of another package, returns."""
    source = DATASETS.get(name)()
    if not (hasattr(source, "__len__") and hasattr(source, "__getitem__")):
        raise ValueError(
            f"data set {name!r} is a {type(source).__name__}; its function must return a list of Example, or an object with "
            "__len__ and __getitem__"
        )
    if len(source) and not isinstance(first := source[0], Example):
        raise ValueError(
            f"data set {name!r} holds a {type(first).__name__} instead of an Example (routerl_jax.Example)"
        )
    return source


def _split_part(name: str) -> tuple[str, str]:
    """(name, text in the last brackets after it). The text is "" if there are no brackets, or if they are part of a file's
    name."""
    match = _PART.fullmatch(name)
    return (match[1], match[2]) if match and not pathlib.Path(name).exists() else (name, "")


def _without_parts(name: str) -> str:
    """A name without the parts in brackets after it."""
    shorter, part = _split_part(name)
    return _without_parts(shorter) if part else name


def _open_part(whole: str, part: str) -> ExampleSource:
    name = f"{whole}[{part}]"
    form, path = split_name(whole)
    if part == "pictures" and (pathlib.Path(path).is_file() or is_pattern(path)):
        return FileExamples(path, form, pictures=True)
    limits = _RANGE.fullmatch(part)
    if limits is None and part != "pictures":
        raise ValueError(
            f"data set {name!r}: a part is written [0:200], [200:] or [:200], from the first to before the last"
        )
    source = open_dataset(whole)
    try:
        if limits is None:
            return Subset.with_pictures(source)
        return Subset(source, int(limits[1] or 0), int(limits[2]) if limits[2] else None)
    except ValueError as error:
        raise ValueError(f"data set {name!r}: {error}") from error


def short_names(parts: Sequence[str]) -> list[str]:
    """A short name for each name: that of its file, without directory and extensions, or of its function. If these repeat, the
    directory's name is added."""
    paths = [pathlib.Path(split_name(_without_parts(part).removeprefix(_PREPARED))[1]) for part in parts]
    short = [path.name.rpartition(":")[2].split(".")[0] for path in paths]
    if len(set(short)) == len(short):
        return short
    return [f"{path.parent.name}-{name}" for path, name in zip(paths, short)]
