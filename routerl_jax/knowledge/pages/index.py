"""Pages by MaxSim: their vectors on disk, pooled vectors, the score on devices, and the search, perhaps in two stages.

Many vectors per page are one zarr matrix of all vectors, read page by page. A killed build can continue writing it.

    DIR/NAME/values   [all vectors, width], one page after the other
    DIR/NAME/offsets  int64 [P + 1]: the first row of each page

Pooled vectors of a page are means of similar vectors, or of neighbours on the page. Ward's clusters are the token pooling of
ColPali's authors (arXiv 2409.14683). The means of neighbours cost almost nothing.

MaxSim is the late-interaction score of every query for every page (ColBERT, arXiv 2004.12832, equation 3):

    score(query, page) = sum over the query's vectors of the largest inner product with a vector of the page.

There are no masks and little padding. A page is padded to one of a few lengths with copies of its last vector, which can't
change a maximum. The vectors of all queries are stacked, so that one matrix product per page serves all queries. Sums and
products are float32. If pages are bfloat16 and the queries are representable in bfloat16, bfloat16 units compute the
products, which is also exact and faster.

Either all pages are compared, or pooled vectors propose candidates first. In this first stage, every vector of the query
finds its nearest pooled vectors of all pages. A page's estimate is a sum over the query's vectors: of the best product found
for this page, or if there is none, of the worst product found at all (as in XTR, arXiv 2304.01982). The pages with the
highest estimates are read from disk and compared in full.

The returned scores are computed query by query and page by page, whatever proposed the page. Ties go to the page that comes
first.

Dimensions: P pages, L vectors of a page, D width, Q queries, n vectors of a query, N vectors of all queries.
"""

from __future__ import annotations

import functools
import math
import os
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from absl import logging
from jax.sharding import Mesh
from jaxtyping import Array, Float, Float32, Int

from routerl_jax.core.progress import Bar
from routerl_jax.knowledge.encoders import local_mesh
from routerl_jax.knowledge.index import VectorIndex
from routerl_jax.knowledge.store import StoredArray, create_array, open_array
from routerl_jax.knowledge.writer import SAVE_SECONDS, finish, finished, size_on_disk

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

    def __init__(
        self, directory: pathlib.Path, precision: Precision, *, memory_limit: int = 2**30, hint: str = ""
    ) -> None:
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

    def bar(self, desc: str, progress: bool) -> Bar:
        """A bar of the pages, on which those of an earlier run are done. `progress`: whether it is shown."""
        done = self.resumed
        return Bar(total=self._count, initial=done, desc=desc, unit="page", disable=not progress, smoothing=0.05)

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
        offsets = np.cumsum([0, *self._lengths]).astype(np.int64)
        stored = create_array(self._directory / "offsets", offsets.shape, "int64", 2**20, 2**12, compress=True)
        stored[:].write(offsets).result()

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


Pooling = Literal["ward", "runs"]


def pool(vectors: Float32[np.ndarray, "m D"], count: int, method: Pooling = "ward") -> Float32[np.ndarray, "c D"]:
    """At most `count` vectors that represent a page's: means of groups, not normalised.

    Args:
      method: "ward" merges step by step the groups that increase the variance least; "runs" cuts the vectors, which are in
        reading order of the patches, into runs of equal length.
    """
    vectors = np.asarray(vectors, np.float32)
    if count == 1:
        return vectors.mean(0, keepdims=True)
    if len(vectors) <= count:
        return vectors
    if method == "runs":
        return np.stack([part.mean(0) for part in np.array_split(vectors, count)])
    from scipy.cluster.hierarchy import fcluster, linkage

    groups = fcluster(linkage(vectors, "ward"), count, "maxclust")
    _, groups, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    sums = np.zeros((len(sizes), vectors.shape[1]), np.float32)
    np.add.at(sums, groups, vectors)
    return sums / sizes[:, None].astype(np.float32)


_MOST_VECTORS = 1024  # most query vectors in one device call
_FEW_VECTORS = (
    64  # up to this number, a block is one product; beyond it, products are page by page, to stay in the cache
)
_STEPS = (16, 32, 64)  # numbers of query vectors are rounded up to these, and to multiples of the last
_BLOCK_BYTES = 2**24  # bytes of pages that one call reads
_TOGETHER = 64  # pages of one product on an accelerator


class Block(NamedTuple):
    """Pages of one padded length on one device. Those beyond `rows` are padding."""

    rows: np.ndarray  # row numbers of the pages
    values: Array  # [P, L, D]


class MaxSim:
    """Pages on this process's devices, distributed block by block, to be scored for any queries.

    Args:
      pages: each [m, D], m >= 1, of float32, bfloat16 or another dtype, which is kept.
      mesh: the devices; default: all of this process.

    Raises:
      ValueError: there is no page, a page has no vectors, or widths differ.
    """

    def __init__(self, pages: Sequence[np.ndarray], *, mesh: Mesh | None = None) -> None:
        if not len(pages):
            raise ValueError("MaxSim needs at least one page")
        self.count, self.width = len(pages), pages[0].shape[-1]
        for i, page in enumerate(pages):
            if page.ndim != 2 or page.shape[1] != self.width or not len(page):
                raise ValueError(f"page {i} has shape {page.shape}, expected [at least 1, {self.width}]")
        self._devices = list(local_mesh(mesh).devices.flat)
        self._blocks = [
            Block(rows, jax.device_put(values, self._devices[i % len(self._devices)]))
            for i, (rows, values) in enumerate(_blocks(pages, _BLOCK_BYTES))
        ]

    def __len__(self) -> int:
        return self.count

    def scores(self, queries: Sequence[Float[np.ndarray, "n D"]], *, alone: bool = False) -> Float32[np.ndarray, "Q P"]:
        """Scores of all queries for all pages.

        Args:
          alone: compute query by query and page by page, which is slower. A score then depends only on its query and page, to
            the last bit. Otherwise its rounding may depend on what else is scored.

        Raises:
          ValueError: a query has another width.
        """
        for i, query in enumerate(queries):
            if query.ndim != 2 or query.shape[1] != self.width:
                raise ValueError(
                    f"query {i} has shape {query.shape}, expected [n, {self.width}] like the pages' vectors"
                )
        totals = np.zeros((len(queries), self.count), np.float32)
        for batch in _calls([len(query) for query in queries], 1 if alone else _MOST_VECTORS):
            self._score([queries[i] for i in batch], totals, batch, alone)
        return totals

    def _score(self, queries: list[np.ndarray], scores: np.ndarray, query_rows: list[int], alone: bool) -> None:
        lengths = [len(query) for query in queries]
        starts = np.cumsum([0, *lengths[:-1]])
        dtype = self._blocks[0].values.dtype
        total = sum(lengths)
        rows = next((step for step in _STEPS if total <= step), -(-total // _STEPS[-1]) * _STEPS[-1])
        vectors = np.zeros((rows, self.width), np.float32)
        vectors[:total] = np.concatenate(queries)
        if dtype == jnp.bfloat16 and np.array_equal(vectors, short := vectors.astype(dtype)):
            vectors = short
        placed = {device: jax.device_put(vectors, device) for device in self._devices}
        at_once = _TOGETHER  # pages of one matrix product
        if self._devices[0].platform == "cpu":
            at_once = 1 if len(vectors) > _FEW_VECTORS else 0
        best = functools.partial(_best, 1 if alone else at_once)

        def score_block(block: Block) -> None:
            (device,) = block.values.devices()
            best_PN = np.asarray(best(placed[device], block.values))[: len(block.rows)]
            scores_PQ = np.add.reduceat(best_PN, starts, axis=1, dtype=np.float32)
            scores[np.asarray(query_rows)[:, None], block.rows] = scores_PQ.T

        list(_threads().map(score_block, self._blocks))


def padded_length(length: int) -> int:
    """The length to which a page with this many vectors is padded: at most 1/16 more, or 15 vectors."""
    step = 16
    while step * 32 < length:
        step *= 2
    return -(-length // step) * step


def _blocks(pages: Sequence[np.ndarray], most_bytes: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(row numbers, [P, L, D]) of pages of one padded length. P is a power of two, or what fits."""
    lengths = np.asarray([padded_length(len(page)) for page in pages])
    for length in np.unique(lengths):
        rows = np.flatnonzero(lengths == length)
        page_bytes = int(length) * pages[0].shape[1] * pages[0].dtype.itemsize
        most = 1 << max(0, (most_bytes // page_bytes).bit_length() - 1)
        for start in range(0, len(rows), most):
            part = rows[start : start + most]
            size = most if len(rows) > most else 1 << (len(part) - 1).bit_length()
            values = np.empty((size, length, pages[0].shape[1]), pages[0].dtype)
            for target, row in zip(values, part):
                target[: len(pages[row])], target[len(pages[row]) :] = pages[row], pages[row][-1]
            values[len(part) :] = values[0]
            yield part, values


@functools.cache
def _threads() -> ThreadPoolExecutor:
    """Threads that each wait for the program of one block, so that devices, or several programs on a CPU, run in parallel."""
    return ThreadPoolExecutor(max(jax.local_device_count(), os.cpu_count() or 1), thread_name_prefix="maxsim")


def _calls(lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    """Groups of queries that are scored together: at most `most` vectors, or a single query. Queries without vectors are left
    out; they score 0 everywhere."""
    batch, total = [], 0
    for i, length in enumerate(lengths):
        if not length:
            continue
        if batch and total + length > most:
            yield batch
            batch, total = [], 0
        batch.append(i)
        total += length
    if batch:
        yield batch


@functools.partial(jax.jit, static_argnums=0)
def _best(pages_at_once: int, queries_ND: Array, pages_PLD: Array) -> Array:
    """The largest inner product of every query vector with the vectors of each page, [P, N]. `pages_at_once` pages at a time;
    0: all."""

    def best(page_LD: Array) -> Array:
        if queries_ND.dtype == jnp.float32:
            page_LD = page_LD.astype(jnp.float32)
        # HIGHEST, because GPUs and TPUs would otherwise multiply float32 in TF32 or bfloat16
        products = jnp.einsum(
            "ld,nd->ln",
            page_LD,
            queries_ND,
            precision=jax.lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )
        return products.max(0)

    if not pages_at_once:
        return jax.vmap(best)(pages_PLD)
    return jax.lax.map(best, pages_PLD, batch_size=pages_at_once if pages_at_once > 1 else None)


_SPARE = 16  # further pages beyond k that are scored again, so that rounding can't lose a winner
_PER_K = 4  # fewest candidates for each page asked for
_SCAN_BYTES = 2**28  # bytes of vectors that are on the devices at a time, if not all fit


class FirstStage(NamedTuple):
    """The first stage: pooled vectors and its settings.

    Attributes:
      index: index over all pooled vectors.
      owner: the page of each of them.
      depth: number of pooled vectors that each vector of a query looks up.
      candidates: number of pages that are compared in full.
    """

    index: VectorIndex
    owner: Int[np.ndarray, " R"]
    depth: int
    candidates: int


class PageIndex:
    """Searches the vectors of pages.

    Args:
      vectors: the vectors of all pages.
      first: proposes candidates; None: all pages are compared.
      resident_bytes: up to this size, all vectors are kept on the devices after their first use.
      mesh: the devices; default: all of this process.
    """

    def __init__(
        self, vectors: Ragged, first: FirstStage | None = None, *, resident_bytes: int = 2**32, mesh: Mesh | None = None
    ) -> None:
        self.vectors, self.first = vectors, first
        self._resident_bytes, self._mesh = resident_bytes, mesh
        self._resident: MaxSim | None = None

    def search(
        self, queries: Sequence[Float[np.ndarray, "n D"]], k: int
    ) -> list[tuple[Int[np.ndarray, " K"], Float32[np.ndarray, " K"]]]:
        """Rows and scores of the k best pages for each query, best first; K = min(k, pages)."""
        k = min(k, len(self.vectors))
        if self.first is None:
            return self.exact(queries, k)
        candidates = self.candidates(queries, max(self.first.candidates, _PER_K * k))
        return [self._ranked(query, self._best(query, rows, k), k) for query, rows in zip(queries, candidates)]

    def exact(
        self, queries: Sequence[Float[np.ndarray, "n D"]], k: int
    ) -> list[tuple[Int[np.ndarray, " K"], Float32[np.ndarray, " K"]]]:
        """Like `search`, with all pages compared."""
        k = min(k, len(self.vectors))
        best_rows = np.zeros((len(queries), 0), np.int64)
        best = np.zeros((len(queries), 0), np.float32)
        for start, pages in self._everything():
            scores = pages.scores(queries)
            best = np.concatenate([best, scores], axis=1)
            rows = np.broadcast_to(np.arange(start, start + scores.shape[1]), scores.shape)
            best_rows = np.concatenate([best_rows, rows], axis=1)
            if best.shape[1] > k + _SPARE:
                best_columns = np.argpartition(-best, k + _SPARE - 1, axis=1)[:, : k + _SPARE]
                best, best_rows = (np.take_along_axis(part, best_columns, 1) for part in (best, best_rows))
        return [self._ranked(query, rows, k) for query, rows in zip(queries, best_rows)]

    def candidates(self, queries: Sequence[Float[np.ndarray, "n D"]], count: int) -> list[Int[np.ndarray, " C"]]:
        """The first stage alone: rows of about `count` pages with the highest estimates, best first."""
        if self.first is None:
            raise ValueError("this index has no first stage")
        index, owner = self.first.index, self.first.owner
        filled = [np.asarray(query, np.float32) for query in queries]
        ids, scores = index.search(np.concatenate(filled), min(max(self.first.depth, count), len(index)))
        edges = np.cumsum([len(query) for query in filled])[:-1]
        return [
            _estimated(owner[vector_rows], similarities)[:count]
            for vector_rows, similarities in zip(np.split(ids, edges), np.split(scores, edges))
        ]

    def _best(self, query: np.ndarray, rows: Int[np.ndarray, " C"], k: int) -> Int[np.ndarray, " B"]:
        if len(rows) <= k + _SPARE:
            return rows
        scores = MaxSim(self.vectors.take(rows), mesh=self._mesh).scores([query])[0]
        return rows[np.argpartition(-scores, k + _SPARE - 1)[: k + _SPARE]]

    def _ranked(
        self, query: np.ndarray, rows: Int[np.ndarray, " B"], k: int
    ) -> tuple[Int[np.ndarray, " K"], Float32[np.ndarray, " K"]]:
        scores = MaxSim(self.vectors.take(rows), mesh=self._mesh).scores([query], alone=True)[0]
        order = np.lexsort((rows, -scores))[:k]
        return rows[order], scores[order]

    def _everything(self) -> Iterator[tuple[int, MaxSim]]:
        """(first row, pages) of consecutive blocks of all pages."""
        if self.vectors.bytes <= self._resident_bytes:
            if self._resident is None:
                self._resident = MaxSim(self.vectors.read(0, len(self.vectors)), mesh=self._mesh)
            yield 0, self._resident
            return
        step = max(1, len(self.vectors) * _SCAN_BYTES // self.vectors.bytes)
        for start in range(0, len(self.vectors), step):
            pages = self.vectors.read(start, min(start + step, len(self.vectors)))
            yield start, MaxSim(pages, mesh=self._mesh)


def page_recall(
    index: PageIndex, queries: Sequence[Float[np.ndarray, "n D"]], counts: Sequence[int], k: int = 10
) -> dict[int, float]:
    """For each number of candidates, the share of the k best pages by exact MaxSim that is among them."""
    exact = [set(rows.tolist()) for rows, _ in index.exact(queries, k)]
    proposed = index.candidates(queries, max(counts))
    return {
        count: float(
            np.mean([len(best & set(rows[:count].tolist())) / len(best) for best, rows in zip(exact, proposed)])
        )
        for count in counts
    }


def _estimated(pages_NM: Int[np.ndarray, "n M"], scores_NM: Float32[np.ndarray, "n M"]) -> Int[np.ndarray, " C"]:
    """Pages by estimate, best first; ties: the lower row. Each row of `scores_NM` goes from best to worst."""
    pages, numbers = np.unique(pages_NM, return_inverse=True)
    numbers = numbers.reshape(pages_NM.shape)
    estimates = np.zeros(len(pages), np.float64)
    for row, score in zip(numbers, scores_NM):
        present, first = np.unique(row, return_index=True)  # the first is the best
        missing = np.full(len(pages), score[-1], np.float64)
        missing[present] = score[first]
        estimates += missing
    return pages[np.lexsort((pages, -estimates))]
