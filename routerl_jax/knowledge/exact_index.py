"""Exact search: all inner products on the device mesh, in float32, bfloat16 or int8. Vectors that exceed its memory are
streamed in blocks.

Dimensions: Q queries, D width, N vectors, R rows of a shard, C candidates per query.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float32, Int

from routerl_jax.knowledge.encoders import local_mesh
from routerl_jax.knowledge.index import VectorIndex, VectorSource
from routerl_jax.parallel.mesh import on_cpu

_QUERY_BUCKETS = (1, 8, 16, 32, 64)  # compiled numbers of queries
_SHARE = 0.6  # of a device's memory that vectors may take
# Rows whose scores for 64 queries a device has at once: on a CPU they stay in its cache, elsewhere they take 256 MB.
_CPU_TILE, _TILE = 2**16, 2**20
# Candidates per result: reduced vectors give a slightly different ranking, so more are proposed and then scored in full.
_DTYPES = {"float32": 1, "bfloat16": 2, "int8": 4}
# Rows of a group. If there are many groups, their maxima are compared first, because a selection among all rows takes a third
# to a half of the time of the products.
_GROUP, _LEAST_GROUPS = 64, 128
_SETTINGS = ("dtype", "recall_target", "device_bytes")


class ExactIndex(VectorIndex):
    """All inner products on this process's accelerators. The rows of vectors are split over the devices.

    With `dtype="float32"` the result is exact. The other types only choose candidates (twice as many as results for bfloat16,
    four times for int8, whose rows have a scale each). The results are then ranked by the stored float32 vectors.

    Settings:
      dtype: "float32", "bfloat16" or "int8": 4, 2 or 1 bytes per number on the devices. Default: that of the name `exact`,
        `exact_bf16` or `exact_int8`.
      recall_target: below 1 (the default), each device's best are found by `lax.approx_max_k`, which is faster on TPU and
        exact elsewhere.
      device_bytes: bytes of vectors on each device; 0 (default): 60 % of its memory, or all vectors if the memory is unknown
        (CPU). If there are more vectors, they pass through every search from host memory, in blocks of half of that size.
    """

    default_dtype: ClassVar[str] = "float32"

    def __init__(
        self,
        vectors: VectorSource,
        *,
        dtype: str = "",
        recall_target: float = 1.0,
        device_bytes: int = 0,
        mesh: Mesh | None = None,
    ) -> None:
        super().__init__(vectors)
        dtype = dtype or self.default_dtype
        if not 0 < recall_target <= 1:
            raise ValueError(f"recall_target={recall_target} must lie in (0, 1]")
        if dtype not in _DTYPES:
            raise ValueError(f"dtype={dtype!r} is not one of {', '.join(_DTYPES)}")
        if device_bytes < 0:
            raise ValueError(f"device_bytes={device_bytes} must not be negative")
        self.dtype, self.recall_target, self.device_bytes = dtype, recall_target, device_bytes
        self._mesh = local_mesh(mesh)
        self._rows, self.streams = self._rows_per_block()
        self._reduced_blocks: dict[int, tuple[np.ndarray, ...]] = {}  # copies of streamed blocks in the smaller dtype
        self._resident = None if self.streams else [self._put(i) for i in range(self.blocks)]

    @property
    def blocks(self) -> int:
        """Number of blocks that are searched one after the other. If `streams`, they pass through the devices; else they
        stay."""
        return -(-len(self) // self._rows)

    @classmethod
    def build(cls, vectors: VectorSource, settings: Mapping[str, Any], *, mesh: Mesh | None = None) -> Self:
        unknown = set(settings) - set(_SETTINGS)
        if unknown:
            raise ValueError(f"the exact index has no setting {unknown.pop()!r}; it has {', '.join(_SETTINGS)}")
        return cls(vectors, mesh=mesh, **settings)

    def save(self, directory: pathlib.Path) -> dict[str, Any]:
        return {key: getattr(self, key) for key in _SETTINGS}

    def candidates(self, queries: Float32[np.ndarray, "Q D"], count: int) -> Int[np.ndarray, "Q C"]:
        count *= _DTYPES[self.dtype]
        width = min(max(32, 1 << (count - 1).bit_length()), len(self))
        chunks = list(_chunks(queries))
        best: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in chunks]
        before: list[tuple[Array, Array]] = []
        for start, block in self._blocks():
            # dispatch all chunks of a block before reading the last block's results, so that devices don't wait for the host
            pending = [
                _best_of_shards(self._mesh, self.recall_target, block, chunk, start, len(self), width)
                for chunk, _ in chunks
            ]
            _merge(best, before, width)
            before = pending
        _merge(best, before, width)
        found = ((scores[:size], ids[:size]) for [(scores, ids)], (_, size) in zip(best, chunks))
        return np.concatenate([np.where(np.isfinite(scores), ids, -1) for scores, ids in found])

    def _blocks(self) -> Iterator[tuple[int, tuple[Array, ...]]]:
        """First row and content of every block."""
        if self._resident is not None:
            yield from ((i * self._rows, block) for i, block in enumerate(self._resident))
            return
        ahead = self._put(0)
        for i in range(self.blocks):
            block, ahead = ahead, self._put(i + 1) if i + 1 < self.blocks else ()
            yield i * self._rows, block

    def _rows_per_block(self) -> tuple[int, bool]:
        """Rows of a block over all devices, and whether the blocks do not all fit on the devices at once."""
        n, width = self.vectors.shape
        devices = self._mesh.size
        tile = _CPU_TILE if on_cpu(self._mesh) else _TILE
        limit = self.device_bytes or _memory(self._mesh)
        row = width * np.dtype(_numpy_dtype(self.dtype)).itemsize + 4 * (self.dtype == "int8")
        rows_per_device = -(-n // devices)
        streams = bool(limit) and rows_per_device * row > limit
        most = min(max(1, limit // (2 * row)) if streams else rows_per_device, tile)  # two blocks at a time are there
        rows = -(-rows_per_device // -(-rows_per_device // most))  # blocks of about one size
        if rows >= _GROUP * _LEAST_GROUPS:
            rows = -(-rows // _GROUP) * _GROUP
            rows = min(rows, most // _GROUP * _GROUP) if streams else rows
        return rows * devices, streams

    def _put(self, i: int) -> tuple[Array, ...]:
        """Block i on the devices: its vectors and, for int8, their scales."""
        n, width = self.vectors.shape
        first = i * self._rows
        sharding = NamedSharding(self._mesh, PartitionSpec("data"))
        parts: dict[tuple[int, int], tuple[np.ndarray, ...]] = {}

        def part(array_index: int, index: tuple[slice, ...] | None) -> np.ndarray:
            start, stop, _ = (index or (slice(None),))[0].indices(self._rows)
            if (start, stop) not in parts:
                values = self.vectors.read(min(first + start, n), min(first + stop, n))
                missing = stop - start - len(values)  # only in the last block: padded with copies
                padded = np.pad(values, ((0, missing), (0, 0))) if missing else values
                parts[start, stop] = _reduced(padded, self.dtype)
            return parts[start, stop][array_index]

        if i in self._reduced_blocks:
            return tuple(jax.device_put(array, sharding) for array in self._reduced_blocks[i])
        if self.dtype != "float32" and self.streams:  # the reduced copy is small enough to be kept
            part(0, (slice(0, self._rows), slice(None)))
            self._reduced_blocks[i] = parts[0, self._rows]
            return self._put(i)
        shapes = [(self._rows, width), (self._rows,)][: 2 if self.dtype == "int8" else 1]
        return tuple(
            jax.make_array_from_callback(shape, sharding, functools.partial(part, array_index))
            for array_index, shape in enumerate(shapes)
        )


class ExactBfloat16Index(ExactIndex):
    """`ExactIndex` with two bytes per number."""

    default_dtype = "bfloat16"


class ExactInt8Index(ExactIndex):
    """`ExactIndex` with one byte per number."""

    default_dtype = "int8"


@functools.partial(jax.jit, static_argnums=(0, 1, 6))
def _best_of_shards(
    mesh: Mesh,
    recall_target: float,
    block: tuple[Array, ...],
    queries_QD: Array,
    first: Array | int,
    total: Array | int,
    count: int,
) -> tuple[Array, Array]:
    """Scores and ids of the best rows of each shard, concatenated. They are merged on the host, without collectives, so that
    threads may search while others use the same devices. Indexes of one shape share what is compiled."""
    rows = block[0].shape[0] // mesh.size
    local = min(count, rows)

    def best_of_shard(
        block: tuple[Array, ...], queries_QD: Array, first: Array | int, total: Array | int
    ) -> tuple[Array, Array]:
        scores_QR = _products(queries_QD, *block)
        ids_R = first + jax.lax.axis_index("data") * rows + jnp.arange(rows)
        scores_QR = jnp.where(ids_R < total, scores_QR, -jnp.inf)
        if recall_target < 1:
            values, columns = jax.lax.approx_max_k(scores_QR, local, recall_target=recall_target)
        else:
            values, columns = _top_k(scores_QR, local)
        return values, ids_R[columns]

    everywhere, split = PartitionSpec(), PartitionSpec(None, "data")
    return jax.shard_map(
        best_of_shard,
        mesh=mesh,
        in_specs=(PartitionSpec("data"), everywhere, everywhere, everywhere),
        out_specs=(split, split),
    )(block, queries_QD, first, total)


def _products(queries_QD: Array, values_RD: Array, scales_R: Array | None = None) -> Array:
    """Inner products [Q, R] in float32, up to a positive factor per query."""
    if scales_R is None:
        # HIGHEST, because GPUs and TPUs would otherwise multiply float32 in TF32 or bfloat16
        queries_QD = queries_QD.astype(values_RD.dtype)
        exact = values_RD.dtype == jnp.float32
        precision = jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT
        return jnp.einsum("qd,rd->qr", queries_QD, values_RD, precision=precision, preferred_element_type=jnp.float32)
    largest_Q = jnp.maximum(jnp.abs(queries_QD).max(1, keepdims=True), 1e-30)
    whole_QD = jnp.round(queries_QD * (127 / largest_Q)).astype(jnp.int8)
    sums_QR = jnp.einsum("qd,rd->qr", whole_QD, values_RD, preferred_element_type=jnp.int32)
    return sums_QR.astype(jnp.float32) * scales_R


def _top_k(scores_QR: Float32[Array, "Q R"], count: int) -> tuple[Float32[Array, "Q C"], Int[Array, "Q C"]]:
    """Same result as `lax.top_k`, ties included: the best `count` are in the `count` groups with the largest maxima."""
    queries, rows = scores_QR.shape
    groups = rows // _GROUP
    if rows % _GROUP or groups < max(_LEAST_GROUPS, 2 * count):
        return jax.lax.top_k(scores_QR, count)
    scores_QGR = scores_QR.reshape(queries, groups, _GROUP)
    # Groups are kept in order, so that ties go to the lower row.
    chosen_QC = jnp.sort(jax.lax.top_k(scores_QGR.max(2), count)[1], axis=1)
    few = jnp.take_along_axis(scores_QGR, chosen_QC[:, :, None], axis=1).reshape(queries, -1)
    values, columns = jax.lax.top_k(few, count)
    return values, jnp.take_along_axis(chosen_QC, columns // _GROUP, 1) * _GROUP + columns % _GROUP


def _reduced(vectors: np.ndarray, dtype: str) -> tuple[np.ndarray, ...]:
    """Vectors in the smaller dtype: for int8 with a scale per row, so that its largest number becomes 127."""
    if dtype != "int8":
        return (np.asarray(vectors, _numpy_dtype(dtype)),)
    scales = np.maximum(np.abs(vectors).max(1), 1e-30) / 127
    return np.rint(vectors / scales[:, None]).astype(np.int8), scales.astype(np.float32)


def _numpy_dtype(dtype: str) -> Any:
    return ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype


def _memory(mesh: Mesh) -> int:
    """Bytes of vectors that each device may hold; 0 if its memory is unknown."""
    stats = [device.memory_stats() or {} for device in mesh.devices.flat]
    return int(_SHARE * min(stat.get("bytes_limit", 0) for stat in stats))


def _chunks(queries: np.ndarray) -> Iterator[tuple[np.ndarray, int]]:
    """The queries in chunks of a few sizes, padded, each with its number of real queries."""
    for start in range(0, len(queries), _QUERY_BUCKETS[-1]):
        chunk = queries[start : start + _QUERY_BUCKETS[-1]]
        bucket = next(b for b in _QUERY_BUCKETS if b >= len(chunk))
        yield np.pad(chunk, ((0, bucket - len(chunk)), (0, 0))), len(chunk)


def _merge(best: list[list[tuple[np.ndarray, np.ndarray]]], results: list[tuple[Array, Array]], width: int) -> None:
    """Adds the results of a block to the best of each chunk of queries."""
    for chunk, (scores, ids) in zip(best, results):
        parts = [*chunk, (np.asarray(scores), np.asarray(ids))]
        joined_scores, joined_ids = (np.concatenate(arrays, 1) for arrays in zip(*parts))
        order = np.argsort(-joined_scores, axis=1, kind="stable")[:, :width]
        chunk[:] = [(np.take_along_axis(joined_scores, order, 1), np.take_along_axis(joined_ids, order, 1))]
