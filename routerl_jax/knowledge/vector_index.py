"""Search over vectors by inner product: the parts that all backends share.

A backend proposes candidates. Their scores are then computed again in float64 and rounded to float32. Ties go to the lower
id (of more than 16,384 equal vectors, to the lowest that the backend proposes). So the result of a query does not depend on
the rest of the batch, or on the number of devices.

Dimensions: Q queries, D width, N vectors, C candidates per query.
"""

from __future__ import annotations

import abc
import pathlib
from collections.abc import Mapping
from typing import Any, Protocol, Self

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float, Float32, Int

from routerl_jax.core.registry import Registry

FAISS_IVF = "faiss_ivf"
SPARE = 16  # further candidates beyond k, so that rounding in a backend can't lose a winner
_TIE = 1e-5  # backends' float32 scores of equal vectors may differ by this much, relative to the best score
_BLOCK = 8192  # candidates scored at a time, which bounds the memory of a large batch
_MOST = 16_384  # most candidates of a query among which equal vectors are ordered


class VectorSource(Protocol):
    """N vectors that can be read in parts, like those of a `store.StoredArray`."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(N, D)."""
        ...

    def read(self, start: int, stop: int) -> np.ndarray:
        """Vectors start..stop."""
        ...

    def take(self, rows: np.ndarray) -> np.ndarray:
        """Vectors of the given rows."""
        ...


class VectorIndex(abc.ABC):
    """Finds the vectors with the largest inner product with a query."""

    def __init__(self, vectors: VectorSource) -> None:
        if len(vectors.shape) != 2 or 0 in vectors.shape:
            raise ValueError(f"an index needs a matrix of at least one vector, got shape {vectors.shape}")
        self.vectors = vectors

    @classmethod  # noqa: B027 - most need nothing
    def require(cls) -> None:
        """Raises ValueError if this machine lacks what the backend needs. Called before a long build begins."""

    @classmethod
    @abc.abstractmethod
    def build(cls, vectors: VectorSource, settings: Mapping[str, Any], *, mesh: Mesh | None = None) -> Self:
        """Makes the index. `settings` are those of the backend ({}: defaults). Raises ValueError that names an unknown key."""

    @classmethod
    def load(
        cls, directory: pathlib.Path, vectors: VectorSource, settings: Mapping[str, Any], *, mesh: Mesh | None = None
    ) -> Self:
        """Opens an index that `save` wrote. A backend whose `save` writes no files makes it anew."""
        return cls.build(vectors, settings, mesh=mesh)

    @abc.abstractmethod
    def save(self, directory: pathlib.Path) -> dict[str, Any]:
        """Writes the files for `load`, and returns its settings (JSON-serialisable)."""

    @abc.abstractmethod
    def candidates(self, queries: Float32[np.ndarray, "Q D"], count: int) -> Int[np.ndarray, "Q C"]:
        """Ids of about the best `count` vectors, in any order; -1 if there are fewer."""

    def __len__(self) -> int:
        return self.vectors.shape[0]

    def search(
        self, queries: Float[np.ndarray, "Q D"], k: int
    ) -> tuple[Int[np.ndarray, "Q K"], Float32[np.ndarray, "Q K"]]:
        """Ids and inner products of the k nearest vectors, best first; ties: the lower id; K = min(k, N).

        If a backend finds fewer (those here never do), the row ends with id -1 and score -inf.

        Raises:
          ValueError: k < 1, or the width of queries is not that of the vectors.
        """
        n, width = self.vectors.shape
        queries = np.ascontiguousarray(queries, np.float32)
        if queries.ndim != 2 or queries.shape[1] != width:
            raise ValueError(f"queries must be [Q, {width}] like the index's vectors, got {queries.shape}")
        if k < 1:
            raise ValueError(f"k={k} must be at least 1")
        k = min(k, n)
        ids, scores = np.zeros((len(queries), k), np.int64), np.zeros((len(queries), k), np.float32)
        open_rows, count, most = np.arange(len(queries)), k + SPARE, min(max(k + SPARE, _MOST), n)
        while len(open_rows):
            count = min(count, most)
            unclear = []
            for rows in np.array_split(open_rows, min(len(open_rows), -(-len(open_rows) * count // _BLOCK))):
                best_ids, best = self._ranked(queries[rows], count)
                ids[rows], scores[rows] = best_ids[:, :k], best[:, :k]
                # Equal vectors beyond the last candidate could have a lower id than the one at rank k: get more candidates.
                unclear.append(rows[best[:, -1] >= best[:, k - 1] - _TIE * np.abs(best[:, 0])])
            open_rows = np.concatenate(unclear) if count < most else np.arange(0)
            count *= 4
        return ids, scores

    def _ranked(self, queries: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        ids_QC = self.candidates(queries, count).astype(np.int64)
        vectors_QCD = self.vectors.take(np.maximum(ids_QC, 0)).astype(np.float64)
        exact_QC = np.einsum("qcd,qd->qc", vectors_QCD, queries.astype(np.float64))
        scores_QC = np.where(ids_QC >= 0, exact_QC, -np.inf).astype(np.float32)
        order_QC = np.lexsort((ids_QC, -scores_QC), axis=-1)
        return np.take_along_axis(ids_QC, order_QC, 1), np.take_along_axis(scores_QC, order_QC, 1)


_HERE = "routerl_jax.knowledge"
INDEXES: Registry[type[VectorIndex]] = Registry(
    "index",
    {
        "exact": f"{_HERE}.exact_index:ExactIndex",
        "exact_bf16": f"{_HERE}.exact_index:ExactBfloat16Index",
        "exact_int8": f"{_HERE}.exact_index:ExactInt8Index",
        FAISS_IVF: f"{_HERE}.faiss_index:FaissIVFIndex",
        "scann": f"{_HERE}.scann_index:ScannIndex",
    },
)
