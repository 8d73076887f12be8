"""Search over vectors by inner product: what all backends share, the choice of one, and the measurement of its recall.

A backend proposes candidates. Their scores are then computed again in float64 and rounded to float32. Ties go to the lower id
(of more than 16,384 equal vectors, to the lowest that the backend proposes). So the result of a query does not depend on the
rest of the batch, or on the number of devices.

Dimensions: Q queries, D width, N vectors, C candidates per query.
"""

from __future__ import annotations

import abc
import functools
import pathlib
from collections.abc import Mapping
from typing import Any, Protocol, Self

import numpy as np
from absl import logging
from jax.sharding import Mesh
from jaxtyping import Float, Float32, Int

from routerl_jax.core.packages import install_hint
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
        FAISS_IVF: f"{_HERE}.faiss:FaissIVFIndex",
        "scann": f"{_HERE}.scann_index:ScannIndex",
    },
)


AUTO = "auto"  # ScaNN if it is installed, else exact search; few pages are all compared
_BY_AUTO = ("scann", "exact", "maxsim", FAISS_IVF)  # backends that `auto` may choose


def backend_of(requested: str) -> str:
    """The backend for a setting. If `auto` is not ScaNN, a warning says so once."""
    if requested != AUTO:
        return requested
    if has_scann():
        return "scann"
    _warn_once()
    return "exact"


def opening_backend(requested: str | None, built: str) -> str:
    """The backend for searching a knowledge base that was built with `built`.

    It is the requested one. Without one, or for `auto`, it is `built`. If that is ScaNN and ScaNN is not installed, it is exact
    search, which only needs the embeddings.
    """
    if requested and requested != AUTO:
        return requested
    return backend_of(AUTO) if built == "scann" else built


def fits(requested: str, built: str) -> bool:
    """Whether a knowledge base built with a backend fits a setting."""
    return requested == built or (requested == AUTO and built in _BY_AUTO)


def has_scann() -> bool:
    """Whether ScaNN can be imported here."""
    try:
        INDEXES.get("scann").require()
    except ValueError:
        return False
    return True


@functools.cache
def _warn_once() -> None:
    logging.warning(
        "ScaNN is not installed, so all vectors are compared, exactly (slower from some 100,000 on). It has wheels for "
        "Linux on x86-64: %s",
        install_hint("scann"),
    )


_SCAN = 65_536  # vectors read at a time
_ROUNDING = 1e-5  # rounding error of inner products in float32


def kth_best(vectors: VectorSource, queries: Float32[np.ndarray, "Q D"], k: int) -> Float32[np.ndarray, " Q"]:
    """The k-th largest inner product of each query, by a plain scan with NumPy; the smallest one if there are fewer than k."""
    n = vectors.shape[0]
    k = min(k, n)
    best = np.full((len(queries), 0), -np.inf, np.float32)
    for start in range(0, n, _SCAN):
        scores = queries @ vectors.read(start, min(start + _SCAN, n)).T
        scores = -np.partition(-scores, k - 1, axis=1)[:, :k] if scores.shape[1] > k else scores
        best = np.concatenate([best, scores], 1)
        best = -np.partition(-best, k - 1, axis=1)[:, :k] if best.shape[1] > k else best
    return best.min(1)


def recall(
    index: VectorIndex,
    vectors: VectorSource,
    queries: Float32[np.ndarray, "Q D"],
    k: int = 10,
    *,
    truth: Float32[np.ndarray, " Q"] | None = None,
) -> float:
    """Share of the k vectors with the largest inner products that the index finds, compared with a plain scan with NumPy.

    A found vector counts if it is as near as the k-th nearest, so that ties don't matter.

    Args:
      truth: `kth_best` of the same vectors, queries and k, if it is already known.
    """
    least = kth_best(vectors, queries, k) if truth is None else truth
    _, scores = index.search(queries, min(k, vectors.shape[0]))
    return float((scores >= least[:, None] - _ROUNDING).mean())


def jittered(vectors: VectorSource, count: int, *, seed: int = 0) -> Float32[np.ndarray, "Q D"]:
    """Substitutes for questions: some of the vectors, each moved by the difference of two others.

    A move is as long as the vector. This gives a cosine of about 0.7 with the original vector, like that of MiniLM's questions
    with the passages that answer them.

    Returns:
      At most `count` vectors, with the lengths of the original ones.
    """
    n = vectors.shape[0]
    rng = np.random.default_rng(seed)
    starts = vectors.take(np.unique(np.linspace(0, n - 1, min(count, n)).astype(np.int64)))
    moves = vectors.take(rng.integers(n, size=len(starts))) - vectors.take(rng.integers(n, size=len(starts)))
    lengths = np.linalg.norm(starts, axis=1, keepdims=True)
    moves *= lengths / np.maximum(np.linalg.norm(moves, axis=1, keepdims=True), 1e-30)
    queries = starts + moves
    queries *= lengths / np.maximum(np.linalg.norm(queries, axis=1, keepdims=True), 1e-30)
    return queries.astype(np.float32)
