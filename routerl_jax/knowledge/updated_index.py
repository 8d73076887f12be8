"""An index together with the changes since it was built: added vectors and deleted rows."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float, Float32, Int

from routerl_jax.knowledge.exact_index import ExactIndex
from routerl_jax.knowledge.vector_index import VectorSource

_SPARE = 16  # further results of the first search, in case some are deleted
_GROWTH = 4


class Searcher(Protocol):
    """The interface of an index for knowledge bases."""

    def search(
        self, queries: Float[np.ndarray, "Q D"], k: int
    ) -> tuple[Int[np.ndarray, "Q K"], Float32[np.ndarray, "Q K"]]:
        """Ids and inner products of the k nearest vectors, best first; id -1 if there are fewer."""
        ...

    def __len__(self) -> int: ...


class UpdatedIndex:
    """Searches both parts and joins the results. Deleted rows are never returned, however many of them rank before the others.

    Args:
      main: index over the rows 0 .. N-1.
      added: vectors of the rows from N on, which are compared one by one; None if there are none.
      deleted: deleted rows of the main part, sorted.
    """

    def __init__(
        self, main: Searcher, added: VectorSource | None, deleted: Int[np.ndarray, " G"], *, mesh: Mesh | None = None
    ) -> None:
        self.main = main
        self.added = None if added is None else ExactIndex.build(added, {}, mesh=mesh)
        self.deleted = np.asarray(deleted, np.int64)

    def __len__(self) -> int:
        return len(self.main) - len(self.deleted) + (len(self.added) if self.added else 0)

    def search(
        self, queries: Float[np.ndarray, "Q D"], k: int
    ) -> tuple[Int[np.ndarray, "Q K"], Float32[np.ndarray, "Q K"]]:
        """Like `VectorIndex.search`; K = min(k, number of vectors without deleted ones)."""
        ids, scores = self._search_main(np.asarray(queries, np.float32), k)
        if self.added is not None:
            more_ids, more_scores = self.added.search(queries, k)
            ids = np.concatenate([ids, np.where(more_ids >= 0, more_ids + len(self.main), -1)], 1)
            scores = np.concatenate([scores, more_scores], 1)
        order = np.lexsort((ids, -scores), axis=-1)[:, : min(k, len(self))]
        return np.take_along_axis(ids, order, 1), np.take_along_axis(scores, order, 1)

    def _search_main(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The k best rows that are not deleted; -1 and -inf if there are fewer."""
        n = len(self.main)
        count = min(k, n - len(self.deleted))
        all_ids = np.full((len(queries), max(count, 0)), -1, np.int64)
        all_scores = np.full(all_ids.shape, -np.inf, np.float32)
        rows, depth = np.arange(len(queries)), min(k + min(_SPARE, len(self.deleted)), n)
        while count > 0 and len(rows):
            ids, scores = self.main.search(queries[rows], depth)
            alive = (ids >= 0) & ~np.isin(ids, self.deleted)
            order = np.argsort(~alive, axis=1, kind="stable")[:, :count]
            alive, ids, scores = (np.take_along_axis(part, order, 1) for part in (alive, ids, scores))
            all_ids[rows, : ids.shape[1]] = np.where(alive, ids, -1)
            all_scores[rows, : ids.shape[1]] = np.where(alive, scores, -np.inf)
            if depth == n:
                break
            rows, depth = rows[alive.sum(1) < count], min(depth * _GROWTH, n)
        return all_ids, all_scores
