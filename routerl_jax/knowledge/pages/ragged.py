"""Many vectors per page on disk: one zarr matrix of all vectors, read page by page. A killed build can continue writing it.

    DIR/NAME/values   [all vectors, width], one page after the other
    DIR/NAME/offsets  int64 [P + 1]: the first row of each page

Dimensions: P pages, D width of the vectors.
"""

from __future__ import annotations

import math
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import ml_dtypes
import numpy as np
from absl import logging
from jaxtyping import Float32, Int

from routerl_jax.knowledge.measures import size_on_disk
from routerl_jax.knowledge.store import StoredArray, create_array, open_array
from routerl_jax.knowledge.writer import SAVE_SECONDS, finish, finished

Precision = Literal["float32", "bfloat16", "int8"]
_SHARD_BYTES, _CHUNK_BYTES = 2**25, 2**16
_SCALE = 4  # bytes after an int8 vector: its largest absolute value, float32, little-endian


def encode(vectors: Float32[np.ndarray, "n D"], precision: Precision) -> np.ndarray:
    """Vectors in the stored form: rounded, or int8 with a scale per vector."""
    if precision != "int8":
        return vectors.astype(np.float32 if precision == "float32" else ml_dtypes.bfloat16)
    largest = np.maximum(np.abs(vectors).max(1, keepdims=True), 1e-12).astype("<f4")
    return np.concatenate([np.rint(vectors / largest * 127).astype(np.int8), largest.view(np.int8)], axis=1)


def decode(stored: np.ndarray, precision: Precision) -> np.ndarray:
    """The inverse of `encode`, up to rounding: float32 for int8, otherwise the stored dtype."""
    if precision != "int8":
        return stored
    largest = np.ascontiguousarray(stored[:, -_SCALE:]).view("<f4")
    return stored[:, :-_SCALE].astype(np.float32) * (largest / 127)


class Ragged:
    """The vectors of P pages, read lazily. They are held in memory if all of them take at most `memory_limit` bytes.

    Raises:
      ValueError: files are missing, damaged or inconsistent; the message ends with `hint`.
    """

    def __init__(self, directory: pathlib.Path, precision: Precision, *, memory_limit: int, hint: str) -> None:
        self.precision: Precision = precision
        self._values = StoredArray(directory / "values", memory_limit, hint)
        self.offsets = StoredArray(directory / "offsets", memory_limit, hint).read(0, None)  # type: ignore[arg-type]
        if int(self.offsets[-1]) != len(self._values):
            raise ValueError(
                f"{directory / 'values'} holds {len(self._values)} vectors, but its offsets end at "
                f"{int(self.offsets[-1])}: they are of different builds. {hint}"
            )
        self.width = self._values.shape[1] - (_SCALE if precision == "int8" else 0)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def values(self) -> StoredArray:
        """All vectors in their stored form, one row each."""
        return self._values

    @property
    def bytes(self) -> int:
        """Bytes of all vectors in their stored form."""
        return math.prod(self._values.shape) * self._values.dtype.itemsize

    def lengths(self) -> Int[np.ndarray, " P"]:
        """Number of vectors of each page."""
        return np.diff(self.offsets)

    def take(self, rows: Sequence[int] | Int[np.ndarray, " R"]) -> list[np.ndarray]:
        """The vectors of these pages, each [m, D]. Only these are read."""
        rows = np.asarray(rows, np.int64)
        parts = self._values.ranges(self.offsets[rows].tolist(), self.offsets[rows + 1].tolist())
        return [decode(part, self.precision) for part in parts]

    def read(self, start: int, stop: int) -> list[np.ndarray]:
        """The vectors of pages start..stop, read in one piece."""
        edges = self.offsets[start : stop + 1]
        values = decode(self._values.read(int(edges[0]), int(edges[-1])), self.precision)
        return np.split(values, edges[1:-1] - edges[0])

    def owner(self) -> Int[np.ndarray, " n"]:
        """The page of every vector."""
        return np.repeat(np.arange(len(self), dtype=np.int64), self.lengths())


class RaggedWriter:
    """Writes DIRECTORY/NAME step by step. Steps that a killed build has finished are not repeated.

    Args:
      directory, progress: directory of a `StoreWriter`, and the one of its markers.
      name: name of the array and of its markers.
      count: number of pages.
      step: pages that are committed together; fewer if they take longer than a minute.
      batch: pages that are made together; default: a step.
    """

    def __init__(
        self,
        directory: pathlib.Path,
        progress: pathlib.Path,
        name: str,
        *,
        width: int,
        precision: Precision,
        count: int,
        step: int,
        batch: int | None = None,
    ) -> None:
        self.width = width
        self._precision: Precision = precision
        self._directory, self._progress, self._name = directory / name, progress, name
        self._count, self._step, self._batch = count, step, batch or step
        self._lengths: list[int] = []
        markers, written = [], 0
        while content := finished(self._progress / f"{name}-{len(self._lengths)}"):
            markers.append(self._progress / f"{name}-{len(self._lengths)}")
            self._lengths += content["lengths"]
            written = content.get("bytes", 0)
        values = self._directory / "values"
        if markers and size_on_disk(values) < written:
            logging.warning("%s has lost some of what was written there: it is made again", values)
            for marker in markers:
                marker.unlink()
            self._lengths = []
        self.resumed = len(self._lengths)  # pages of an earlier run

    def write(self, make: Callable[[int, int], list[Float32[np.ndarray, "n D"]]]) -> None:
        """Makes the missing pages. `make(start, stop)` returns the vectors of pages start..stop.

        Raises:
          ValueError: `make` returns a wrong number or shape, or values that are not finite.
        """
        if len(self._lengths) < self._count:
            array: Any = open_array(self._directory / "values") if self._lengths else self._create()
            while (start := len(self._lengths)) < self._count:
                pages: list[np.ndarray] = []
                since, end = time.monotonic(), min(start + self._step, self._count)
                while (row := start + len(pages)) < end and (not pages or time.monotonic() - since < SAVE_SECONDS):
                    stop = min(row + self._batch, end)
                    made = make(row, stop)
                    self._check(made, row, stop)
                    pages += made
                begin, lengths = sum(self._lengths), [len(page) for page in pages]
                array = array.resize(exclusive_max=[begin + sum(lengths), None]).result()
                array[begin:].write(encode(np.concatenate(pages), self._precision)).result()
                self._lengths += lengths
                written = size_on_disk(self._directory / "values")
                finish(self._progress / f"{self._name}-{start}", {"lengths": lengths, "bytes": written})
        self._write_offsets()

    def _create(self) -> Any:
        dtype = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "int8": np.int8}[self._precision]
        width = self.width + (_SCALE if self._precision == "int8" else 0)
        row = width * np.dtype(dtype).itemsize
        chunk = max(1, _CHUNK_BYTES // row)
        return create_array(
            self._directory / "values",
            (0, width),
            np.dtype(dtype).name,
            chunk * max(1, _SHARD_BYTES // (chunk * row)),
            chunk,
            compress=False,
        )

    def _write_offsets(self) -> None:
        offsets = np.cumsum([0, *self._lengths]).astype(np.int64)
        array = create_array(self._directory / "offsets", offsets.shape, "int64", 2**20, 2**12, compress=True)
        array[:].write(offsets).result()

    def _check(self, pages: list[np.ndarray], start: int, stop: int) -> None:
        if len(pages) != stop - start:
            raise ValueError(f"{self._name}: {len(pages)} pages came back for {stop - start}")
        for row, page in enumerate(pages, start):
            if page.ndim != 2 or page.shape[1] != self.width or not len(page):
                raise ValueError(
                    f"{self._name}: page {row} has shape {page.shape}, expected [at least 1, {self.width}]"
                )
            if not np.isfinite(page).all():
                raise ValueError(f"{self._name}: page {row} has values that are not finite")
