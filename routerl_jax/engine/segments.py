"""The KV cache in plain XLA: for CPUs, and for models and devices that the kernels don't support.

While rows decode, their cached keys are read-only, and new ones go to a buffer.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from routerl_jax.engine.attention import Block, blockwise_attention, chunked_attention
from routerl_jax.engine.cache import copy_rows, heads_axis
from routerl_jax.engine.quantized import Codes, Qtype, quantize_tokens
from routerl_jax.models.config import DecoderConfig
from routerl_jax.models.decoder import Attend
from routerl_jax.parallel.mesh import BATCH_AXES, on_cpu

# (queries, keys and values, rows, starts, counts, window) of one device: see attention.chunked_attention
RowAttention = Callable[[Array, tuple[Any, Any], Array, Array, Array, int | None], Array]
# `SegmentCache.write_and_attend` on one device: (queries [A, S, N, H], new keys and values [A, S, K, ...], those of all layers
# [1, L, R, T, K, ...], layer, rows [1, A], starts, counts; keyword window) -> (output, keys and values of all layers)
ShardAttention = Callable[..., tuple[Array, tuple[Any, Any]]]


@functools.partial(jax.tree_util.register_dataclass, data_fields=["k", "v"], meta_fields=["config", "mesh"])
@dataclasses.dataclass(frozen=True, kw_only=True)
class SegmentCache:
    """One array for all L layers, so that chunks are fed in a scan over layers. See cache.KVCache."""

    k: Float[Array, "D L R T K H"] | Codes
    v: Float[Array, "D L R T K H"] | Codes
    config: DecoderConfig
    mesh: Mesh

    @classmethod
    def abstract(
        cls, config: DecoderConfig, mesh: Mesh, shards: int, rows: int, length: int, dtype: Any, qtype: Qtype = ""
    ) -> Self:
        sharding = NamedSharding(mesh, _stored(config, mesh))

        def cache_shape(width: int, dtype: Any) -> Any:
            shape = (shards, config.layers, rows, length, config.kv_heads, width)
            return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

        each = (
            Codes(cache_shape(config.head_dim, jnp.int8), cache_shape(1, dtype))
            if qtype
            else cache_shape(config.head_dim, dtype)
        )
        return cls(k=each, v=each, config=config, mesh=mesh)

    @staticmethod
    def takes_chunks(mesh: Mesh) -> bool:
        return on_cpu(mesh)

    @staticmethod
    def reads_any_span() -> bool:
        return False

    @property
    def rows(self) -> int:
        return jax.tree.leaves(self.k)[0].shape[2]

    @property
    def length(self) -> int:
        return jax.tree.leaves(self.k)[0].shape[3]

    @property
    def attention(self) -> RowAttention:
        """Attention to rows that are read in place."""
        return chunked_attention

    def in_cache_form(self, x: Float[Array, "B S K H"]) -> Float[Array, "B S K H"] | Codes:
        """New keys or values in the cache's form: quantised if the cache is."""
        return quantize_tokens(x) if isinstance(self.k, Codes) else x

    def extension(self, rows: Array, starts: Array, counts: Array, *, steps: int, span: int) -> Chunks | _WholeRows:
        if self.takes_chunks(self.mesh):
            return Chunks(self, rows, starts, counts)
        return _WholeRows(self, rows, starts, counts, steps, span)

    def fork(self, sources: Array, targets: Array, *, span: int) -> Self:
        options = {"span": span, "mesh": self.mesh, "stored": _stored(self.config, self.mesh)}
        return jax.tree.map(lambda leaf: copy_rows(leaf, sources, targets, **options), self)

    def segment(self, rows: Array, starts: Array, *, steps: int, span: int) -> Any:
        return _Segment(self, rows, starts, steps, span)

    def write_and_attend(
        self,
        q: Float[Array, "B S N H"],
        k: Float[Array, "B S K H"],
        v: Float[Array, "B S K H"],
        layer: tuple[Int[Array, ""] | int, tuple[Any, Any]],
        window: int | None,
        rows: Int[Array, "D A"],
        starts: Int[Array, "D A"],
        counts: Int[Array, "D A"],
        *,
        on_shard: ShardAttention | None = None,
    ) -> tuple[Float[Array, "B S N H"], tuple[Any, Any]]:
        """Writes new keys and values of one layer, then attends to all tokens of the rows up to each query.

        Args:
          layer: the layer's index, and keys and values of all layers.
          window: number of tokens that a query sees, itself included; None: all.
          rows: local row of each batch entry; `self.rows` for padding.
          starts, counts: position of the first new token, and their number, which may be less than S. Entries without tokens
            come last.
          on_shard: does it on one device; None: XLA writes, then `self.attention` attends.

        Returns:
          The attention output (undefined behind the new tokens), and the keys and values.
        """
        i, cached = layer
        stored = _stored(self.config, self.mesh)
        tokens = PartitionSpec(BATCH_AXES, None, heads_axis(self.config, self.mesh))
        per_row = PartitionSpec(BATCH_AXES)
        run = jax.shard_map(
            functools.partial(on_shard or functools.partial(_on_shard, attention=self.attention), window=window),
            mesh=self.mesh,
            in_specs=(tokens, tokens, stored, PartitionSpec(), per_row, per_row, per_row),
            out_specs=(tokens, stored),
            check_vma=False,  # loops begin with values that are equal on all devices, and kernels don't say how theirs vary
        )
        return run(
            q, (self.in_cache_form(k), self.in_cache_form(v)), cached, jnp.asarray(i, jnp.int32), rows, starts, counts
        )


class _PaddedAtTheEnd:
    """The layout of an extension's tokens: entries flattened, with their padding behind their tokens."""

    _rows: Int[Array, "D A"]

    def align(self, x: Int[Array, "D A S ..."]) -> Int[Array, "B S ..."]:
        return x.reshape(-1, *x.shape[2:])

    def restore(self, x: Int[Array, "B S ..."]) -> Int[Array, "D A S ..."]:
        return x.reshape(*self._rows.shape, *x.shape[1:])


class Chunks(_PaddedAtTheEnd):
    """New tokens are written to their rows first, in place, so all chunks of a row may be in one call."""

    shared, unroll = True, False

    def __init__(self, cache: SegmentCache, rows: Array, starts: Array, counts: Array) -> None:
        self._cache, self._rows, self._starts, self._counts = cache, rows, starts, counts
        self.caches = (cache.k, cache.v)

    def attend(self, q: Array, k: Array, v: Array, layer: Any, window: int | None) -> tuple[Array, Any]:
        return self._cache.write_and_attend(q, k, v, layer, window, self._rows, self._starts, self._counts)

    def finish(self, caches: tuple[Any, Any]) -> SegmentCache:
        return dataclasses.replace(self._cache, k=caches[0], v=caches[1])


class _WholeRows(_PaddedAtTheEnd):
    """For accelerators without a kernel. A call has one chunk of a row at most, and reads what it attends to once."""

    shared = unroll = False

    def __init__(self, cache: SegmentCache, rows: Array, starts: Array, counts: Array, steps: int, span: int) -> None:
        self._cache, self._rows, self._starts, self._counts = cache, rows, starts, counts
        flat = starts.reshape(-1)
        offsets = jnp.arange(steps)
        self._distance_new = offsets[:, None] - offsets  # from key to query
        self._causal = (self._distance_new >= 0)[None]
        self._distance_cached = (flat[:, None] + offsets)[..., None] - jnp.arange(span)
        self._seen_cached = (jnp.arange(span) < flat[:, None])[:, None]
        self.caches = None
        if span:
            layers = [_read(cache, i, rows, span) for i in range(cache.config.layers)]
            self.caches = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)

    def attend(self, q: Array, k: Array, v: Array, layer: Any, window: int | None) -> tuple[Array, Any]:
        seen_new, seen_cached = self._causal, self._seen_cached
        if window is not None:
            seen_new = seen_new & (self._distance_new < window)
            seen_cached = seen_cached & (self._distance_cached < window)
        new = self._cache.in_cache_form(k), self._cache.in_cache_form(v)
        blocks: list[Block] = [(_channels_first(new[0]), _heads_first(new[1]), seen_new)]
        if layer is not None:
            blocks.append((*layer, seen_cached))
        return blockwise_attention(q, blocks), new

    def finish(self, caches: tuple[Any, Any]) -> SegmentCache:
        return _written(self._cache, self._rows, self._starts, self._counts, caches)


class _Segment:
    """The cached keys and values of the rows are read once, with room behind them for the new ones of this call, from the same
    index for all rows. The new ones are written to the rows themselves once, at the end."""

    shared = False

    def __init__(self, cache: SegmentCache, rows: Array, starts: Array, steps: int, span: int) -> None:
        self._cache, self._rows, self._starts, self._steps, self._span = cache, rows, starts, steps, span
        room, none = (0, steps), (0, 0)
        self.state = []
        for layer in range(cache.config.layers):
            keys, values = _read(cache, layer, rows, span)
            keys = jax.tree.map(lambda leaf: jnp.pad(leaf, (none, none, none, room)), keys)
            values = jax.tree.map(lambda leaf: jnp.pad(leaf, (none, none, room, none)), values)
            self.state.append((keys, values))

    def caches(self, state: list[Any]) -> list[Any]:
        return state

    def attend(self, counts: Int[Array, "*B"], alive: Bool[Array, " B"]) -> Attend:
        flat, indices = self._starts.reshape(-1, 1, 1), jnp.arange(self._span + self._steps)
        new = indices >= self._span

        def attend(q: Array, k: Array, v: Array, layer: tuple, window: int | None) -> tuple[Array, tuple]:
            preceding = counts[..., None, None] + jnp.arange(q.shape[1])[:, None]  # new tokens before each query
            visible = jnp.where(new, indices - self._span <= preceding, indices < flat)
            distance = jnp.where(new, self._span, flat) + preceding - indices
            new_keys, new_values = self._cache.in_cache_form(k), self._cache.in_cache_form(v)
            keys = jax.tree.map(functools.partial(self._put, counts, axis=3), layer[0], _channels_first(new_keys))
            values = jax.tree.map(functools.partial(self._put, counts, axis=2), layer[1], _heads_first(new_values))
            mask = visible if window is None else visible & (distance < window)
            return blockwise_attention(q, [(keys, values, mask)]), (keys, values)

        return attend

    def _put(self, counts: Int[Array, "*B"], cached: Array, new: Array, *, axis: int) -> Array:
        """Keys or values with new ones; `axis` is that of tokens."""
        if not counts.ndim:  # what is behind the last token of a row that is not alive is never read
            return jax.lax.dynamic_update_slice_in_dim(cached, new, self._span + counts, axis=axis)
        return jax.vmap(functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=axis - 1))(
            cached, new, self._span + counts
        )

    def finish(self, state: list[Any], counts: Int[Array, "D A"]) -> SegmentCache:
        keys, values = zip(*state)
        k = jax.tree.map(lambda *x: jnp.stack([leaf[..., self._span :].transpose(0, 3, 1, 2) for leaf in x]), *keys)
        v = jax.tree.map(lambda *x: jnp.stack([leaf[:, :, self._span :].swapaxes(1, 2) for leaf in x]), *values)
        return _written(self._cache, self._rows, self._starts, counts, (k, v))

    def scratch(self, state: list[Any]) -> list[Any] | None:
        # An accelerator's allocator keeps memory by itself.
        return state if on_cpu(self._cache.mesh) else None


def _stored(config: DecoderConfig, mesh: Mesh) -> PartitionSpec:
    """The sharding of keys and values: rows over the batch axes, heads over `tensor`."""
    return PartitionSpec(BATCH_AXES, None, None, None, heads_axis(config, mesh))


def _on_shard(
    q: Array,
    new: tuple[Any, Any],
    cached: tuple[Any, Any],
    layer: Array,
    rows: Array,
    starts: Array,
    counts: Array,
    *,
    attention: RowAttention,
    window: int | None,
) -> tuple[Array, tuple[Any, Any]]:
    """See `ShardAttention`."""
    rows, starts, counts = rows[0], starts[0], counts[0]
    positions = _positions(starts, counts, q.shape[1], jax.tree.leaves(cached)[0].shape[3])
    cached = jax.tree.map(lambda old, x: old.at[0, layer, rows[:, None], positions].set(x, mode="drop"), cached, new)
    flat, row_of_layer = of_layer(cached, layer, rows)
    return attention(q, flat, row_of_layer, starts, counts, window), cached


def of_layer(cached: Any, layer: Array, rows: Int[Array, " A"]) -> tuple[Any, Int[Array, " A"]]:
    """A device's keys and values, [1, L, R, T, K, ...], with the rows of all layers in one axis, and where a layer's rows are
    there. Padding is the last row."""
    _, layers, stored_rows = jax.tree.leaves(cached)[0].shape[:3]
    flat = jax.tree.map(lambda leaf: leaf.reshape(layers * stored_rows, *leaf.shape[3:]), cached)
    return flat, layer * stored_rows + jnp.minimum(rows, stored_rows - 1)


def _positions(starts: Int[Array, "*A"], counts: Int[Array, "*A"], steps: int, length: int) -> Int[Array, "*A S"]:
    """Positions of new tokens in their rows. Behind the last one: the rows' length, where nothing is written."""
    offsets = jnp.arange(steps)
    return jnp.where(offsets < counts[..., None], starts[..., None] + offsets, length)


def _heads_first(x: Any) -> Any:
    """[B, S, K, ...] -> [B, K, S, ...], of an array or of codes and scales."""
    return jax.tree.map(lambda leaf: leaf.swapaxes(1, 2), x)


def _channels_first(x: Any) -> Any:
    """[B, S, K, ...] -> [B, K, ..., S], of an array or of codes and scales."""
    return jax.tree.map(lambda leaf: leaf.transpose(0, 2, 3, 1), x)


def _read(cache: SegmentCache, layer: int, rows: Array, span: int) -> tuple[Any, Any]:
    """A layer's cached keys and values of some rows, [D, L, R, T, K, ...] -> [B, K, ..., P] and [B, K, P, ...]."""
    stored = _stored(cache.config, cache.mesh)

    def on_shard(leaf: Array, rows: Array) -> Array:
        # Padding reads the last row. Where indices are checked (mode="fill"), XLA's copies take twice as long on CPUs.
        return leaf[0, layer, :, :span].at[rows[0]].get(mode="clip")

    def read_leaf(leaf: Array) -> Array:
        by_row = PartitionSpec(stored[0], *stored[3:])
        specs = {"in_specs": (stored, PartitionSpec(BATCH_AXES)), "out_specs": by_row}
        return jax.shard_map(on_shard, mesh=cache.mesh, **specs)(leaf, rows)

    return _channels_first(jax.tree.map(read_leaf, cache.k)), _heads_first(jax.tree.map(read_leaf, cache.v))


def _written(cache: SegmentCache, rows: Array, starts: Array, counts: Array, new: tuple[Any, Any]) -> SegmentCache:
    """The cache with the first `counts` of new keys and values, [L, B, S, K, ...], behind the `starts` tokens of each row."""
    steps = jax.tree.leaves(new)[0].shape[2]
    positions = _positions(starts, counts, steps, cache.length)

    def write_leaf(leaf: Array, values: Array) -> Array:
        values = values.reshape(values.shape[0], *positions.shape, *values.shape[3:])

        def on_shard(shard: Array, row: Array, position: Array, value: Array) -> Array:
            return shard.at[:, row[:, None], position].set(value, mode="drop")

        return jax.vmap(on_shard, in_axes=(0, 0, 0, 1))(leaf, rows, positions, values)

    k, v = jax.tree.map(write_leaf, (cache.k, cache.v), new)
    return dataclasses.replace(cache, k=k, v=v)
