"""Vector search beside numpy and FAISS: ScaNN's queries per second and recall on a million vectors."""

from __future__ import annotations

import functools
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.passages import dense_kb
from routerl_jax.knowledge.index import jittered
from routerl_jax.knowledge.scann_index import ScannIndex
from routerl_jax.knowledge.store import Store

K, BATCH, REPEATS = 10, 256, 3
_NEIGHBOURS = 10
_ROWS = 65_536


class Memory:
    """A matrix as a VectorSource."""

    def __init__(self, matrix: np.ndarray) -> None:
        self.matrix = matrix
        self.shape = matrix.shape

    def read(self, start: int, stop: int) -> np.ndarray:
        """Vectors start..stop."""
        return self.matrix[start:stop]

    def take(self, rows: np.ndarray) -> np.ndarray:
        """Vectors of the given rows."""
        return self.matrix[rows]


class Mixture:
    """Any number of unit vectors with the distribution of real ones.

    Each is a point between a real vector and one of its ten nearest, moved by noise of the real ones' covariance (half
    as long as the vector, so that copies of one real vector don't form a cluster of their own).
    """

    def __init__(self, real: np.ndarray, seed: int = 0, noise: float = 0.5) -> None:
        self._real = real / np.linalg.norm(real, axis=1, keepdims=True)
        self._rng = np.random.default_rng(seed)
        values, axes = np.linalg.eigh(np.cov((self._real - self._real.mean(0)).T))
        spread = np.sqrt(np.maximum(values, 0))
        self._noise = (noise / np.linalg.norm(spread) * spread[:, None] * axes.T).astype(np.float32)
        self._near = np.concatenate([self._nearest(at) for at in range(0, len(real), 1024)])

    def draw(self, count: int) -> np.ndarray:
        """The next vectors, [count, D] float32."""
        rng = self._rng
        rows = rng.integers(len(self._real), size=count)
        others = self._near[rows, rng.integers(_NEIGHBOURS, size=count)]
        share = 0.5 * rng.random((count, 1), np.float32)
        vectors = (1 - share) * self._real[rows] + share * self._real[others]
        vectors += rng.standard_normal((count, self._real.shape[1]), np.float32) @ self._noise
        return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)

    def many(self, count: int) -> np.ndarray:
        """As `draw`, block by block."""
        result = np.empty((count, self._real.shape[1]), np.float32)
        for start in range(0, count, _ROWS):
            result[start : start + _ROWS] = self.draw(min(_ROWS, count - start))
        return result

    def _nearest(self, at: int) -> np.ndarray:
        scores = self._real[at : at + 1024] @ self._real.T
        return np.argpartition(-scores, _NEIGHBOURS + 1, axis=1)[:, 1 : _NEIGHBOURS + 1]


def real_vectors(directories: Sequence[pathlib.Path], dim: int = 384) -> np.ndarray:
    """All vectors of knowledge bases; without any, 5,000 around 70 random centres."""
    if directories:
        stores = [Store(directory) for directory in directories]
        return np.concatenate([store.embeddings.read(0, store.manifest.count) for store in stores])
    rng = np.random.default_rng(7)
    centres = rng.normal(size=(70, dim))
    return (centres[rng.integers(70, size=5000)] + 0.7 * rng.normal(size=(5000, dim))).astype(np.float32)


def exact_top_k(matrix: np.ndarray, queries: np.ndarray, k: int = K) -> np.ndarray:
    """The peer: one BLAS product, then the k best of each row, unordered."""
    return np.argpartition(-(queries @ matrix.T), k, axis=1)[:, :k]


def measure(quick: bool) -> dict[str, Any]:
    """ScaNN through our index beside exact search with numpy and FAISS's IVF, batches of 256, in turn."""
    count = 100_000 if quick else 1_000_000
    details: dict[str, Any] = {"vectors": "mixtures of MiniLM's of HotpotQA's passages", "count": count}
    matrix = Mixture(real_vectors([dense_kb("hotpotqa")])).many(count)
    result = _compare(matrix, jittered(Memory(matrix), BATCH, seed=9), details)
    rng = np.random.default_rng(0)
    worst = rng.standard_normal((count // 10, 384), np.float32)
    worst /= np.linalg.norm(worst, axis=1, keepdims=True)
    random = _compare(
        worst, rng.standard_normal((BATCH, 384), np.float32), {"vectors": "random normal", "count": len(worst)}
    )
    ratios = {"scann_vs_exact": result["scann_vs_exact"], "scann_recall_at_10": result["scann_recall_at_10"]}
    ratios |= {"scann_vs_faiss_ivf": result["scann_vs_faiss_ivf"]}
    return {"ratios": ratios, "recall": {}, "details": {"clustered": result, "random_worst_case": random}}


def _compare(matrix: np.ndarray, queries: np.ndarray, details: dict[str, Any]) -> dict[str, Any]:
    truth = np.concatenate([exact_top_k(matrix, queries[at : at + 64]) for at in range(0, len(queries), 64)])
    start = time.perf_counter()
    index: Any = ScannIndex.build(Memory(matrix), {"brute_force_below": 5000, "tree_from": 50_000})
    built = time.perf_counter() - start
    start = time.perf_counter()
    faiss, nprobe = _faiss(matrix, queries, truth)
    faiss_built = time.perf_counter() - start
    sides: dict[str, Callable[[], np.ndarray]] = {
        "exact": functools.partial(exact_top_k, matrix, queries),
        "scann": lambda: index.search(queries, K)[0],
        "faiss_ivf": lambda: faiss.search(queries, K)[1],
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    neighbours: dict[str, np.ndarray] = {}
    for _ in range(REPEATS):
        for name, run in sides.items():
            start = time.perf_counter()
            neighbours[name] = run()
            seconds[name].append(time.perf_counter() - start)
    rates = {name: len(queries) / float(np.median(times)) for name, times in seconds.items()}
    recalls = {name: _recall(neighbours[name], truth) for name in ("scann", "faiss_ivf")}
    return {
        **details,
        "queries_per_second": rates,
        "scann_vs_exact": rates["scann"] / rates["exact"],
        "scann_vs_faiss_ivf": rates["scann"] / rates["faiss_ivf"],
        "scann_recall_at_10": recalls["scann"],
        "faiss_recall_at_10": recalls["faiss_ivf"],
        "faiss_nprobe": nprobe,
        "build_seconds": {"scann": built, "faiss_ivf": faiss_built},
        "leaves_to_search": index.settings.leaves_to_search,
        "reorder": index.settings.reorder,
    }


def _faiss(matrix: np.ndarray, queries: np.ndarray, truth: np.ndarray) -> tuple[Any, int]:
    """FAISS's IVF with as many lists as ScaNN has leaves, and the fewest probes that find 95 %."""
    import faiss

    lists = round(len(matrix) ** 0.5)
    index: Any = faiss.index_factory(matrix.shape[1], f"IVF{lists},Flat", faiss.METRIC_INNER_PRODUCT)
    index.train(matrix[: 100 * lists])
    index.add(matrix)
    nprobe = 1
    while nprobe < lists:
        index.nprobe = nprobe
        if _recall(index.search(queries, K)[1], truth) >= 0.95:
            break
        nprobe *= 2
    return index, nprobe


def _recall(neighbours: np.ndarray, truth: np.ndarray) -> float:
    return float(np.mean([len(set(a.tolist()) & set(b.tolist())) / len(b) for a, b in zip(neighbours, truth)]))
