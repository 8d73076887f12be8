"""Search in the lists of a FAISS IndexIVFFlat, as FAISS does: those whose centroids are nearest to the query."""

from __future__ import annotations

import collections
import pathlib
from collections.abc import Mapping
from typing import Any, Self

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float32, Int

from routerl_jax.knowledge.faiss_file import FaissVectors, Lists
from routerl_jax.knowledge.vector_index import FAISS_IVF, VectorIndex, VectorSource


class FaissIVFIndex(VectorIndex):
    """Compares a query with the vectors of `probes` lists.

    Args:
      vectors: of a FAISS file with lists.
      probes: default: the file's `nprobe`, which is 1 unless it was set before the file was written.

    Raises:
      ValueError: the vectors are of no FAISS file with lists, or `probes` is not from 1 to their number.
    """

    def __init__(self, vectors: VectorSource, probes: int = 0) -> None:
        super().__init__(vectors)
        lists = vectors.lists if isinstance(vectors, FaissVectors) else None
        if lists is None or not isinstance(vectors, FaissVectors):
            raise ValueError(f"index={FAISS_IVF!r} searches the lists of a FAISS IndexIVFFlat; these vectors have none")
        self._lists: Lists = lists
        self._file = vectors
        self.probes = probes or lists.probes
        if not 1 <= self.probes <= len(lists.ids):
            raise ValueError(f"probes={probes} must be from 1 to {len(lists.ids)}, the number of lists")

    @property
    def regime(self) -> str:
        """How it searches, for reports."""
        return f"{self.probes} of {len(self._lists.ids)} lists"

    @classmethod
    def build(cls, vectors: VectorSource, settings: Mapping[str, Any], *, mesh: Mesh | None = None) -> Self:
        if unknown := set(settings) - {"probes"}:
            raise ValueError(f"index={FAISS_IVF!r} has no setting {sorted(unknown)[0]!r}; it has probes")
        return cls(vectors, **settings)

    def save(self, directory: pathlib.Path) -> dict[str, Any]:
        return {"probes": self.probes}

    def candidates(self, queries: Float32[np.ndarray, "Q D"], count: int) -> Int[np.ndarray, "Q C"]:
        lists, count = self._lists, min(count, len(self))
        near = queries @ lists.centroids.T
        probed = np.argpartition(-near, self.probes - 1, axis=1)[:, : self.probes]
        rows_of_list: dict[int, list[int]] = collections.defaultdict(list)
        for query, numbers in enumerate(probed.tolist()):
            for number in numbers:
                rows_of_list[number].append(query)
        best: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in queries]
        for number, query_rows in rows_of_list.items():
            if not len(ids := lists.ids[number]):
                continue
            scores = queries[query_rows] @ self._file.of_list(number).T
            for query, row in zip(query_rows, scores):
                nearest = np.argpartition(-row, count - 1)[:count] if len(row) > count else np.arange(len(row))
                best[query].append((row[nearest], ids[nearest]))
        result = np.full((len(queries), count), -1, np.int64)
        for query, parts in enumerate(best):
            if parts:
                scores, ids = (np.concatenate(arrays) for arrays in zip(*parts))
                order = np.argsort(-scores, kind="stable")[:count]
                result[query, : len(order)] = ids[order]
        return result
