"""Search over vectors by inner product: one interface, two backends.

A backend proposes candidates; their scores are then computed anew in float64 and rounded to float32, and ties go to the
lower id (of more than 16,384 equal vectors, to the lowest that the backend proposes). What is returned for a query is
therefore the same whatever else is in the batch, on any number of devices.

Dimensions: Q queries, D width, N vectors, C candidates per query.
"""

from __future__ import annotations

import abc
import dataclasses
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any, Protocol, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Float32, Int

from routerl_jax.core.config import from_config_dict
from routerl_jax.core.registry import Registry
from routerl_jax.knowledge.encoders import local_mesh

_SPARE = 16  # candidates beyond k: rounding in a backend can't push a winner out
_TIE = 1e-5  # backends' float32 scores of equal vectors may differ by this much, relative to the best score
_BLOCK = 8192  # candidates scored at a time, which bounds the memory of a large batch
_MOST = 16_384  # candidates of a query among which equal vectors are put in order
_QUERY_BUCKETS = (1, 8, 64)  # compiled numbers of queries


class VectorSource(Protocol):
    """N vectors that can be read piece by piece, as those of a `store.StoredArray`."""

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
    """Finds the vectors of largest inner product with a query."""

    def __init__(self, vectors: VectorSource) -> None:
        if len(vectors.shape) != 2 or 0 in vectors.shape:
            raise ValueError(f"an index needs a matrix of at least one vector, got shape {vectors.shape}")
        self.vectors = vectors

    @classmethod  # noqa: B027 - most need nothing
    def require(cls) -> None:
        """Raises ValueError if this machine lacks what the backend needs; asked before a long build begins."""

    @classmethod
    @abc.abstractmethod
    def build(cls, vectors: VectorSource, settings: Mapping[str, Any], *, mesh: Mesh | None = None) -> Self:
        """Makes the index. `settings` are the backend's own ({}: defaults); ValueError names a key it doesn't know."""

    @classmethod
    @abc.abstractmethod
    def load(
        cls, directory: pathlib.Path, vectors: VectorSource, settings: Mapping[str, Any], *, mesh: Mesh | None = None
    ) -> Self:
        """Opens what `save` wrote."""

    @abc.abstractmethod
    def save(self, directory: pathlib.Path) -> dict[str, Any]:
        """Writes what `load` needs and returns settings for it (JSON-serialisable)."""

    @abc.abstractmethod
    def candidates(self, queries: Float32[np.ndarray, "Q D"], count: int) -> Int[np.ndarray, "Q C"]:
        """Ids of about the best `count` vectors, in any order, -1 where there are fewer."""

    def __len__(self) -> int:
        return self.vectors.shape[0]

    def search(
        self, queries: Float[np.ndarray, "Q D"], k: int
    ) -> tuple[Int[np.ndarray, "Q K"], Float32[np.ndarray, "Q K"]]:
        """Ids and inner products of the k nearest vectors, best first, ties by lower id; K = min(k, N).

        Where a backend finds fewer (those here never do), the row ends in id -1, score -inf.

        Raises:
          ValueError: k < 1, or queries of another width than the vectors.
        """
        n, width = self.vectors.shape
        queries = np.ascontiguousarray(queries, np.float32)
        if queries.ndim != 2 or queries.shape[1] != width:
            raise ValueError(f"queries must be [Q, {width}] like the index's vectors, got {queries.shape}")
        if k < 1:
            raise ValueError(f"k={k} must be at least 1")
        k = min(k, n)
        ids, scores = np.zeros((len(queries), k), np.int64), np.zeros((len(queries), k), np.float32)
        open_rows, count, most = np.arange(len(queries)), k + _SPARE, min(max(k + _SPARE, _MOST), n)
        while len(open_rows):
            count = min(count, most)
            unclear = []
            for rows in np.array_split(open_rows, min(len(open_rows), -(-len(open_rows) * count // _BLOCK))):
                best_ids, best = self._ranked(queries[rows], count)
                ids[rows], scores[rows] = best_ids[:, :k], best[:, :k]
                # Equal vectors beyond the last candidate could hold a lower id than the one at rank k: look further.
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


INDEXES: Registry[type[VectorIndex]] = Registry("index")


@INDEXES.register("exact")
class ExactIndex(VectorIndex):
    """All inner products on this process's accelerators: vectors split by rows over the devices, float32 throughout.

    Settings: `recall_target` (default 1). Below 1, each device's best are found by `lax.approx_max_k`, which is faster
    on TPU and exact elsewhere.
    """

    def __init__(self, vectors: VectorSource, *, recall_target: float = 1.0, mesh: Mesh | None = None) -> None:
        super().__init__(vectors)
        if not 0 < recall_target <= 1:
            raise ValueError(f"recall_target={recall_target} must lie in (0, 1]")
        self.recall_target = recall_target
        self._mesh = local_mesh(mesh)
        n, width = vectors.shape
        padded = -(-n // self._mesh.size) * self._mesh.size

        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            start, stop, _ = (index or (slice(None),))[0].indices(padded)
            values = vectors.read(min(start, n), min(stop, n))
            missing = stop - start - len(values)  # only at the end: padding copies
            return np.pad(values, ((0, missing), (0, 0))) if missing else values

        sharding = NamedSharding(self._mesh, PartitionSpec("data"))
        self._matrix = jax.make_array_from_callback((padded, width), sharding, part)
        self._best: Any = jax.jit(self._best_of_shards, static_argnums=2)

    @classmethod
    def build(cls, vectors: VectorSource, settings: Mapping[str, Any], *, mesh: Mesh | None = None) -> Self:
        unknown = set(settings) - {"recall_target"}
        if unknown:
            raise ValueError(f"the exact index has no setting {unknown.pop()!r}; it has recall_target")
        return cls(vectors, mesh=mesh, **settings)

    @classmethod
    def load(
        cls, directory: pathlib.Path, vectors: VectorSource, settings: Mapping[str, Any], *, mesh: Mesh | None = None
    ) -> Self:
        return cls.build(vectors, settings, mesh=mesh)

    def save(self, directory: pathlib.Path) -> dict[str, Any]:
        return {"recall_target": self.recall_target}

    def candidates(self, queries: Float32[np.ndarray, "Q D"], count: int) -> Int[np.ndarray, "Q C"]:
        width = min(max(32, 1 << (count - 1).bit_length()), len(self))
        parts = []
        for start in range(0, len(queries), _QUERY_BUCKETS[-1]):
            chunk = queries[start : start + _QUERY_BUCKETS[-1]]
            bucket = next(b for b in _QUERY_BUCKETS if b >= len(chunk))
            padded = np.pad(chunk, ((0, bucket - len(chunk)), (0, 0)))
            scores, ids = (np.asarray(part)[: len(chunk)] for part in self._best(self._matrix, padded, width))
            order = np.argsort(-scores, axis=1, kind="stable")[:, :width]
            parts.append(np.where(np.isfinite(scores), ids, -1)[np.arange(len(chunk))[:, None], order])
        return np.concatenate(parts)

    def _best_of_shards(self, matrix_ND: Array, queries_QD: Array, count: int) -> tuple[Array, Array]:
        """Scores and ids of the best of each shard, side by side. They are merged on the host: without collectives,
        threads may search while others use the same devices."""
        n, shards = len(self), self._mesh.size
        rows = matrix_ND.shape[0] // shards
        local = min(count, rows)

        def best_of_shard(matrix_RD: Array, queries_QD: Array) -> tuple[Array, Array]:
            # HIGHEST: GPUs and TPUs would otherwise multiply in TF32 or bfloat16
            scores_QR = jnp.einsum("qd,rd->qr", queries_QD, matrix_RD, precision=jax.lax.Precision.HIGHEST)
            ids_R = jax.lax.axis_index("data") * rows + jnp.arange(rows)
            scores_QR = jnp.where(ids_R < n, scores_QR, -jnp.inf)
            if self.recall_target < 1:
                values, columns = jax.lax.approx_max_k(scores_QR, local, recall_target=self.recall_target)
            else:
                values, columns = jax.lax.top_k(scores_QR, local)
            return values, ids_R[columns]

        everywhere, split = PartitionSpec(), PartitionSpec(None, "data")
        return jax.shard_map(
            best_of_shard, mesh=self._mesh, in_specs=(PartitionSpec("data"), everywhere), out_specs=(split, split)
        )(matrix_ND, queries_QD)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScannSettings:
    """ScaNN's settings. The defaults follow its guide: what is used depends on the number of vectors."""

    brute_force_below: int = 20_000  # vectors; fewer are compared one by one
    tree_from: int = 100_000  # vectors; from here on they are partitioned, in between only hashed
    leaves: int = 0  # partitions of the tree; 0: about sqrt(N)
    leaves_to_search: int = 0  # 0: 15 % of the leaves, at least 20
    reorder: int = 200  # candidates that are scored exactly after hashing; 10 k if that is more
    soar_lambda: float = 1.5  # SOAR: each vector is put in two leaves; how much their errors must differ in direction
    threshold: float = 0.2  # anisotropic quantisation: inner products above this count, errors in them weigh more

    def __post_init__(self) -> None:
        for key, value in vars(self).items():
            if value < (key == "reorder"):
                raise ValueError(f"{key}={value} is too small")


@INDEXES.register("scann")
class ScannIndex(VectorIndex):
    """Google's ScaNN on the CPU (x86): brute force, asymmetric hashing, or a tree over it, by the number of vectors."""

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
        pybind = _scann().scann_ops_pybind
        chosen = from_config_dict(ScannSettings, settings, path="scann settings")
        index = cls(vectors, None, chosen)
        matrix = np.ascontiguousarray(vectors.read(0, len(index)), np.float32)
        builder = pybind.builder(matrix, 10, "dot_product")
        if index.regime == "brute_force":
            index._searcher = builder.score_brute_force().build()
            return index
        if index.regime == "tree":
            leaves, searched = index.leaves
            builder = builder.tree(
                num_leaves=leaves,
                num_leaves_to_search=searched,
                training_sample_size=min(len(index), max(100_000, 40 * leaves)),
                min_partition_size=1,  # merging small leaves costs recall, and makes builds differ from run to run
                soar_lambda=chosen.soar_lambda,
                overretrieve_factor=2.0,
            )
        builder = builder.score_ah(2, anisotropic_quantization_threshold=chosen.threshold)
        index._searcher = builder.reorder(chosen.reorder).build()
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
        ids, found = self._search(queries, count, leaves=None)
        short = (found.sum(1) < min(count, len(self))) if self.regime == "tree" else np.zeros(len(queries), bool)
        if short.any():  # the leaves that were searched hold fewer than asked for
            ids[short], found[short] = self._search(queries[short], count, leaves=self.leaves[0])
        return np.where(found, ids, -1)

    def _search(self, queries: np.ndarray, count: int, leaves: int | None) -> tuple[np.ndarray, np.ndarray]:
        k = count - _SPARE  # what the caller of `search` asked for, in the first round
        reorder = None if self.regime == "brute_force" else max(self.settings.reorder, 10 * k, count)
        batch = max(1, -(-len(queries) // (os.cpu_count() or 1)))
        ids, scores = self._searcher.search_batched_parallel(queries, count, reorder, leaves, batch_size=batch)
        return ids.astype(np.int64), ~np.isnan(scores)


def _scann() -> Any:
    try:
        import scann
    except ImportError as error:
        raise ValueError(
            f"the scann index needs the package scann, which can't be imported ({error}). Run `pip install scann` "
            f"(Linux, x86), or use index='exact'"
        ) from error
    return scann
