"""MaxSim on devices: the late-interaction score of every query for every page (ColBERT, arXiv 2004.12832, equation 3).

score(query, page) = sum over the query's vectors of the largest inner product with a vector of the page.

There are no masks and little padding. A page is padded to one of a few lengths with copies of its last vector, which can't
change a maximum. The vectors of all queries are stacked, so that one matrix product per page serves all queries. Sums and
products are float32. If pages are bfloat16 and the queries are representable in bfloat16, bfloat16 units compute the
products, which is also exact and faster.

Dimensions: N vectors of all queries, D width, P pages, L vectors of a page, Q queries.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Float32

from routerl_jax.knowledge.encoders import local_mesh

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
        vectors = np.zeros((_rounded(sum(lengths)), self.width), np.float32)
        vectors[: sum(lengths)] = np.concatenate(queries)
        if dtype == jnp.bfloat16 and np.array_equal(vectors, short := vectors.astype(dtype)):
            vectors = short
        placed = {device: jax.device_put(vectors, device) for device in self._devices}
        best = functools.partial(_best, 1 if alone else self._pages_at_once(len(vectors)))

        def score_block(block: Block) -> None:
            (device,) = block.values.devices()
            best_PN = np.asarray(best(placed[device], block.values))[: len(block.rows)]
            scores_PQ = np.add.reduceat(best_PN, starts, axis=1, dtype=np.float32)
            scores[np.asarray(query_rows)[:, None], block.rows] = scores_PQ.T

        list(_threads().map(score_block, self._blocks))

    def _pages_at_once(self, vectors: int) -> int:
        """Pages of one matrix product."""
        if self._devices[0].platform == "cpu":
            return 1 if vectors > _FEW_VECTORS else 0
        return _TOGETHER


def maxsim(
    queries: Sequence[Float[np.ndarray, "n D"]], pages: Sequence[Float[np.ndarray, "m D"]], *, mesh: Mesh | None = None
) -> Float32[np.ndarray, "Q P"]:
    """Scores of all queries for all pages, for a single use. `MaxSim` keeps the pages on the devices for further queries."""
    return MaxSim(pages, mesh=mesh).scores(queries)


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


def _rounded(count: int) -> int:
    return next((step for step in _STEPS if count <= step), -(-count // _STEPS[-1]) * _STEPS[-1])


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
