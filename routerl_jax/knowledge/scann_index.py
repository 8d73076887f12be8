"""Google's ScaNN on the CPU: brute force, asymmetric hashing, or a tree over it, by the number of vectors.

Sources: Guo et al. 2020 (anisotropic quantisation), Sun et al. 2023 (SOAR), and ScaNN's guide to its settings.
"""

from __future__ import annotations

import bisect
import contextlib
import copy
import dataclasses
import math
import os
import pathlib
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any, Self

import numpy as np
from absl import logging
from jax.sharding import Mesh
from jaxtyping import Float32, Int

from routerl_jax.core.config import BelowOne, Count, NonNegative, checked, from_config_dict
from routerl_jax.core.packages import install_hint
from routerl_jax.knowledge.index import SPARE, VectorIndex, VectorSource, jittered, kth_best, recall

_WIDE = 512  # width of vectors from which on four numbers, not two, share a hash code
_MAPPED = 2**30  # bytes of vectors from which on ScaNN's copy is the only one in memory during a build
_BLOCK = 65_536  # vectors copied at a time
_REORDER = 200  # candidates that are scored exactly, if nothing is tuned
# The values that tuning tries: shares of the leaves, and candidates to reorder.
_SHARES = (0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.12, 0.16, 0.25, 0.35, 0.5, 0.75, 1.0)
_REORDERS = (100, 150, 200, 300, 400, 800)  # from 100 on, so that up to k = 10 a smaller k finds the same first ones
_SAMPLE = 256  # queries


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class ScannSettings:
    """ScaNN's settings. The defaults follow its guide: the method depends on the number of vectors."""

    brute_force_below: Count = 20_000  # vectors; fewer are compared one by one
    tree_from: Count = 100_000  # vectors; from here on they are partitioned, in between only hashed
    leaves: Count = 0  # partitions of the tree; 0: about sqrt(N)
    # target for the recall of the 10 nearest, for which the build tunes `leaves_to_search` and `reorder`; 0: these are 15 % of
    # the leaves and 200
    recall_target: BelowOne = 0.97
    leaves_to_search: Count = 0  # partitions that a search looks into; 0: the fewest that reach the target
    # candidates that are scored exactly after hashing (10 k if that is more); 0: the fewest that reach the target
    reorder: Count = 0
    reorder_dtype: str = "float32"  # dtype of the vectors for exact scores: "float32", "bfloat16" or "int8"
    numbers_per_code: Count = 0  # numbers of a vector that share a 4-bit code; 0: 2 up to width 512, 4 beyond
    # SOAR: each vector is put in two leaves; how much their errors must differ in direction
    soar_lambda: NonNegative = 1.5
    threshold: NonNegative = 0.2  # anisotropic quantisation: inner products above this count, errors in them weigh more

    def __post_init__(self) -> None:
        if self.reorder_dtype not in ("float32", "bfloat16", "int8"):
            raise ValueError(f"reorder_dtype={self.reorder_dtype!r} is not one of float32, bfloat16, int8")


class ScannIndex(VectorIndex):
    """ScaNN's three methods of search as a `VectorIndex`. Needs AVX2, so an x86 CPU."""

    def __init__(self, vectors: VectorSource, searcher: Any, settings: ScannSettings) -> None:
        super().__init__(vectors)
        self.settings = settings
        self._searcher = searcher

    @classmethod
    def require(cls) -> None:
        _scann()

    @property
    def regime(self) -> str:
        """`brute_force`, `hashing` or `tree`."""
        if len(self) < self.settings.brute_force_below:
            return "brute_force"
        return "hashing" if len(self) < self.settings.tree_from else "tree"

    @property
    def leaves(self) -> tuple[int, int]:
        """Number of leaves of the tree, and how many of them are searched."""
        leaves = min(self.settings.leaves or round(math.sqrt(len(self))), len(self))
        return leaves, min(self.settings.leaves_to_search or max(20, round(0.15 * leaves)), leaves)

    @classmethod
    def build(cls, vectors: VectorSource, settings: Mapping[str, Any], *, mesh: Mesh | None = None) -> Self:
        scann = _scann()
        chosen = from_config_dict(ScannSettings, settings, path="scann settings")
        index = cls(vectors, None, chosen)
        with _matrix(vectors) as matrix:
            builder = scann.scann_ops_pybind.builder(matrix, 10, "dot_product")
            index._searcher = index._configured(builder).build()
            del builder  # the builder keeps the matrix alive
        if chosen.recall_target and index.regime != "brute_force":
            index.settings = index.tuned(jittered(vectors, _SAMPLE))
        return index

    @classmethod
    def load(
        cls, directory: pathlib.Path, vectors: VectorSource, settings: Mapping[str, Any], *, mesh: Mesh | None = None
    ) -> Self:
        pybind = _scann().scann_ops_pybind
        if not (directory / "scann_assets.pbtxt").is_file():
            raise ValueError(f"{directory / 'scann_assets.pbtxt'} is missing: the ScaNN index was not saved there")
        try:
            searcher = pybind.load_searcher(str(directory))
        except (RuntimeError, ValueError, OSError) as error:
            raise ValueError(f"{directory}: ScaNN can't read its index ({error})") from error
        return cls(vectors, searcher, from_config_dict(ScannSettings, settings, path=str(directory)))

    def save(self, directory: pathlib.Path) -> dict[str, Any]:
        directory.mkdir(parents=True, exist_ok=True)
        self._searcher.serialize(str(directory), relative_path=True)
        return dataclasses.asdict(self.settings)

    def candidates(self, queries: Float32[np.ndarray, "Q D"], count: int) -> Int[np.ndarray, "Q C"]:
        ids, is_result = self._search(queries, count, leaves=self.leaves[1] if self.regime == "tree" else None)
        short = (is_result.sum(1) < min(count, len(self))) if self.regime == "tree" else np.zeros(len(queries), bool)
        if short.any():  # the searched leaves have fewer vectors than asked for
            ids[short], is_result[short] = self._search(queries[short], count, leaves=self.leaves[0])
        return np.where(is_result, ids, -1)

    def tuned(self, queries: Float32[np.ndarray, "Q D"]) -> ScannSettings:
        """The settings with the fewest leaves, and then candidates, with which these queries reach the recall target.

        Values that are set explicitly stay. If nothing reaches the target, the most thorough settings are used, with a warning.
        """
        truth, settings_given = kth_best(self.vectors, queries, 10), self.settings

        def reached(settings: ScannSettings) -> bool:
            trial = copy.copy(self)
            trial.settings = settings
            return recall(trial, self.vectors, queries, truth=truth) >= settings_given.recall_target

        best = dataclasses.replace(settings_given, reorder=settings_given.reorder or _REORDERS[-1])
        if self.regime == "tree" and not settings_given.leaves_to_search:
            leaves = sorted({max(1, round(share * self.leaves[0])) for share in _SHARES})
            tries = [dataclasses.replace(best, leaves_to_search=count) for count in leaves]
            best = _first(tries, reached)
        if not settings_given.reorder:
            best = _first([dataclasses.replace(best, reorder=count) for count in _REORDERS], reached)
        if not reached(best):
            logging.warning("no choice of leaves and candidates reaches a recall of %s", settings_given.recall_target)
        return best

    def _configured(self, builder: Any) -> Any:
        chosen = self.settings
        if self.regime == "brute_force":
            return builder.score_brute_force()
        if self.regime == "tree":
            leaves, searched = self.leaves
            builder = builder.tree(
                num_leaves=leaves,
                num_leaves_to_search=searched,
                training_sample_size=min(len(self), max(100_000, 40 * leaves)),
                min_partition_size=1,  # merging small leaves costs recall, and makes builds differ from run to run
                soar_lambda=chosen.soar_lambda,
                overretrieve_factor=2.0,
            )
        # beyond 256 codes per vector, ScaNN can't keep one list of the best over all leaves, and gets slower
        numbers = chosen.numbers_per_code or (2 if self.vectors.shape[1] <= _WIDE else 4)
        builder = builder.score_ah(numbers, anisotropic_quantization_threshold=chosen.threshold)
        kind = getattr(_scann().scann_ops_pybind.scann_builder.ReorderType, chosen.reorder_dtype.upper())
        return builder.reorder(chosen.reorder or _REORDER, quantize=kind)

    def _search(self, queries: np.ndarray, count: int, leaves: int | None) -> tuple[np.ndarray, np.ndarray]:
        k = count - SPARE  # the k of the caller of `search`, in the first round
        reorder = None if self.regime == "brute_force" else max(self.settings.reorder or _REORDER, 10 * k, count)
        batch = max(1, -(-len(queries) // (os.cpu_count() or 1)))
        ids, scores = self._searcher.search_batched_parallel(queries, count, reorder, leaves, batch_size=batch)
        return ids.astype(np.int64), ~np.isnan(scores)


def _first(tries: list[ScannSettings], reached: Any) -> ScannSettings:
    """The first that reaches the target, if the later ones do better; the last if none does."""
    return tries[min(bisect.bisect_left(tries, True, key=reached), len(tries) - 1)]


@contextlib.contextmanager
def _matrix(vectors: VectorSource) -> Iterator[np.ndarray]:
    """All vectors as one float32 matrix, which ScaNN copies.

    If there are many, the matrix is a mapped file beside the embeddings, whose pages the system can drop, so that memory has
    one copy and not two.
    """
    n, width = vectors.shape
    path = getattr(vectors, "path", None)
    if path is None or 4 * n * width < _MAPPED:
        yield np.ascontiguousarray(vectors.read(0, n), np.float32)
        return
    with tempfile.TemporaryFile(dir=pathlib.Path(path).parent) as file:
        matrix = np.memmap(file, np.float32, "w+", shape=(n, width))
        for start in range(0, n, _BLOCK):
            matrix[start : start + _BLOCK] = vectors.read(start, min(start + _BLOCK, n))
        yield matrix


def _scann() -> Any:
    try:
        import scann
    except ImportError as error:
        raise ValueError(
            f"the scann index needs the package scann, which can't be imported ({error}). Run {install_hint('scann')} "
            f"(wheels for Linux on x86-64), or use index='auto' or 'exact'"
        ) from error
    return scann
