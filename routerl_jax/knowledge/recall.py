"""Recall of an index: the share of true nearest neighbours that it finds. Also makes queries for the measurement."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float32

from routerl_jax.knowledge.vector_index import VectorIndex, VectorSource

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


def jittered(vectors: VectorSource, count: int, *, noise: float = 1.0, seed: int = 0) -> Float32[np.ndarray, "Q D"]:
    """Substitutes for questions: some of the vectors, each moved by the difference of two others.

    Args:
      noise: length of the move relative to the vector. 1 gives a cosine of about 0.7 with the original vector, like that of
        MiniLM's questions with the passages that answer them.

    Returns:
      At most `count` vectors, with the lengths of the original ones.
    """
    n = vectors.shape[0]
    rng = np.random.default_rng(seed)
    starts = vectors.take(np.unique(np.linspace(0, n - 1, min(count, n)).astype(np.int64)))
    moves = vectors.take(rng.integers(n, size=len(starts))) - vectors.take(rng.integers(n, size=len(starts)))
    lengths = np.linalg.norm(starts, axis=1, keepdims=True)
    moves *= noise * lengths / np.maximum(np.linalg.norm(moves, axis=1, keepdims=True), 1e-30)
    queries = starts + moves
    queries *= lengths / np.maximum(np.linalg.norm(queries, axis=1, keepdims=True), 1e-30)
    return queries.astype(np.float32)
