"""Finds the best pages for a query by MaxSim. Either all pages are compared, or pooled vectors propose candidates first.

In the first stage, every vector of the query finds its nearest pooled vectors of all pages. A page's estimate is a sum over the
query's vectors: of the best product found for this page, or if there is none, of the worst product found at all (as in XTR,
arXiv 2304.01982). The pages with the highest estimates are read from disk and compared in full.

The returned scores are computed query by query and page by page, whatever proposed the page. Ties go to the page that comes
first. Dimensions: Q queries, n vectors of a query, D width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float, Float32, Int

from routerl_jax.knowledge.pages.maxsim import MaxSim
from routerl_jax.knowledge.pages.ragged import Ragged
from routerl_jax.knowledge.vector_index import VectorIndex

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
