"""The KV cache in plain XLA: for CPUs, and for models and devices that the kernels don't support.

While rows decode, their cached keys are read-only, and new ones go to a buffer.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from routerl_jax.generation.attention import Block, blockwise_attention, chunked_attention
from routerl_jax.generation.cache import heads_axis
from routerl_jax.generation.quantized import Codes, Qtype, quantize_tokens
from routerl_jax.models.config import DecoderConfig
from routerl_jax.models.decoder import Attend
from routerl_jax.parallel.mesh import BATCH_AXES, on_cpu


@functools.partial(jax.tree_util.register_dataclass, data_fields=["k", "v"], meta_fields=["config", "mesh"])
@dataclasses.dataclass(frozen=True, kw_only=True)
class SegmentCache:
    """One array per layer, so that decoding never copies a stack. See cache.KVCache."""

    k: tuple[Float[Array, "D R T K H"] | Codes, ...]
    v: tuple[Float[Array, "D R T K H"] | Codes, ...]
    config: DecoderConfig
    mesh: Mesh

    @classmethod
    def abstract(
        cls, config: DecoderConfig, mesh: Mesh, shards: int, rows: int, length: int, dtype: Any, qtype: Qtype = ""
    ) -> Self:
        home = NamedSharding(mesh, _stored(config, mesh))

        def held(width: int, dtype: Any) -> Any:
            return jax.ShapeDtypeStruct((shards, rows, length, config.kv_heads, width), dtype, sharding=home)

        layer = Codes(held(config.head_dim, jnp.int8), held(1, dtype)) if qtype else held(config.head_dim, dtype)
        return cls(k=(layer,) * config.layers, v=(layer,) * config.layers, config=config, mesh=mesh)

    @staticmethod
    def takes_chunks(mesh: Mesh) -> bool:
        return on_cpu(mesh)

    @staticmethod
    def reads_any_span() -> bool:
        return False

    @property
    def rows(self) -> int:
        return jax.tree.leaves(self.k)[0].shape[1]

    @property
    def length(self) -> int:
        return jax.tree.leaves(self.k)[0].shape[2]

    def held(self, x: Float[Array, "B S K H"]) -> Float[Array, "B S K H"] | Codes:
        """New keys or values in the form in which the cache holds them."""
        return quantize_tokens(x) if isinstance(self.k[0], Codes) else x

    def extension(self, rows: Array, starts: Array, counts: Array, *, steps: int, span: int) -> _Chunks | _Extension:
        if self.takes_chunks(self.mesh):
            return _Chunks(self, rows, starts, counts, steps)
        return _Extension(self, rows, starts, counts, steps, span)

    def fork(self, sources: Array, targets: Array, *, span: int) -> Self:
        def one(shard: Array, source: Array, target: Array) -> Array:
            return shard.at[target, :span].set(shard.at[source, :span].get(mode="fill", fill_value=0), mode="drop")

        return jax.tree.map(lambda layer: jax.vmap(one)(layer, sources, targets), self)

    def segment(self, rows: Array, starts: Array, *, steps: int, span: int) -> _Segment:
        return _Segment(self, rows, starts, steps, span)


class PaddedAtTheEnd:
    """The layout of an extension's tokens: entries flattened, with their padding behind their tokens."""

    _rows: Int[Array, "D A"]

    def align(self, x: Int[Array, "D A S ..."]) -> Int[Array, "B S ..."]:
        return x.reshape(-1, *x.shape[2:])

    def restore(self, x: Int[Array, "B S ..."]) -> Int[Array, "D A S ..."]:
        return x.reshape(*self._rows.shape, *x.shape[1:])


class _Chunks(PaddedAtTheEnd):
    """For CPUs: new tokens are written to their rows first, in place, and all chunks of a row may be in one call."""

    shared, unroll = False, True

    def __init__(self, cache: SegmentCache, rows: Array, starts: Array, counts: Array, steps: int) -> None:
        self._cache, self._rows, self._starts, self._counts = cache, rows, starts, counts
        self._where = _places(cache, starts, counts, steps)
        self.caches = list(zip(cache.k, cache.v))

    def attend(self, q: Array, k: Array, v: Array, layer: tuple, window: int | None) -> tuple[Array, tuple]:
        layer = tuple(_write(old, self._rows, self._where, self._cache.held(x)) for old, x in zip(layer, (k, v)))
        config, mesh = self._cache.config, self._cache.mesh
        tokens, per_row = PartitionSpec(BATCH_AXES, None, heads_axis(config, mesh)), PartitionSpec(BATCH_AXES)

        def on_shard(q: Array, layer: tuple, *call: Array) -> Array:
            layer, rows, starts, counts = jax.tree.map(operator.itemgetter(0), (layer, *call))
            return chunked_attention(q, layer, rows, starts, counts, window)

        run = jax.shard_map(
            on_shard,
            mesh=mesh,
            in_specs=(tokens, _stored(config, mesh), per_row, per_row, per_row),
            out_specs=tokens,
            check_vma=False,  # the loops begin with values that are equal on all devices
        )
        return run(q, layer, self._rows, self._starts, self._counts), layer

    def finish(self, caches: list[tuple]) -> SegmentCache:
        k, v = zip(*caches)
        return dataclasses.replace(self._cache, k=k, v=v)


class _Extension(PaddedAtTheEnd):
    """New tokens are padded at their end, where the causal mask hides them. A call has one chunk of a row at most."""

    shared = unroll = False

    def __init__(self, cache: SegmentCache, rows: Array, starts: Array, counts: Array, steps: int, span: int) -> None:
        self._cache, self._rows, self._starts, self._counts, self._steps = cache, rows, starts, counts, steps
        flat = starts.reshape(-1)
        offsets = jnp.arange(steps)
        self._distance_new = offsets[:, None] - offsets  # from key to query
        self._causal = (self._distance_new >= 0)[None]
        self._distance_cached = (flat[:, None] + offsets)[..., None] - jnp.arange(span)
        self._seen_cached = (jnp.arange(span) < flat[:, None])[:, None]
        cached = None
        if span:
            read = [[_read(layer, rows, span) for layer in layers] for layers in (cache.k, cache.v)]
            cached = tuple(jax.tree.map(lambda *layers: jnp.stack(layers), *layers) for layers in read)
        self.caches = cached

    def attend(self, q: Array, k: Array, v: Array, layer: Any, window: int | None) -> tuple[Array, Any]:
        seen_new, seen_cached = self._causal, self._seen_cached
        if window is not None:
            seen_new = seen_new & (self._distance_new < window)
            seen_cached = seen_cached & (self._distance_cached < window)
        new = self._cache.held(k), self._cache.held(v)
        blocks: list[Block] = [(*_heads_first(new), seen_new)]
        if layer is not None:
            blocks.append((*layer, seen_cached))
        return blockwise_attention(q, blocks), new

    def finish(self, caches: tuple[Any, Any]) -> SegmentCache:
        where = _places(self._cache, self._starts, self._counts, self._steps)

        def store(old: tuple[Any, ...], new: Any) -> tuple[Any, ...]:
            layers = (jax.tree.map(operator.itemgetter(i), new) for i in range(len(old)))
            return tuple(_write(layer, self._rows, where, each) for layer, each in zip(old, layers))

        cache = self._cache
        return dataclasses.replace(cache, k=store(cache.k, caches[0]), v=store(cache.v, caches[1]))


class _Segment:
    """The cached keys and values of the rows are read once, with room behind them for the new ones of this call, from the same
    index for all rows. The new ones are written to the rows themselves once, at the end."""

    shared = False

    def __init__(self, cache: SegmentCache, rows: Array, starts: Array, steps: int, span: int) -> None:
        self._cache, self._rows, self._starts, self._steps, self._span = cache, rows, starts, steps, span
        room = ((0, 0), (0, 0), (0, steps), (0, 0))
        read = [tuple(_read(x, rows, span) for x in layer) for layer in zip(cache.k, cache.v)]
        self.state = jax.tree.map(lambda leaf: jnp.pad(leaf, room), read)

    def caches(self, state: list[Any]) -> list[Any]:
        return state

    def attend(self, counts: Int[Array, "*B"], alive: Bool[Array, " B"]) -> Attend:
        flat, indices = self._starts.reshape(-1, 1, 1), jnp.arange(self._span + self._steps)
        new = indices >= self._span

        def attend(q: Array, k: Array, v: Array, layer: tuple, window: int | None) -> tuple[Array, tuple]:
            taken = counts[..., None, None] + jnp.arange(q.shape[1])[:, None]  # new tokens before each query
            visible = jnp.where(new, indices - self._span <= taken, indices < flat)
            distance = jnp.where(new, self._span, flat) + taken - indices
            fresh = _heads_first((self._cache.held(k), self._cache.held(v)))
            keys, values = jax.tree.map(functools.partial(self._put, counts), layer, fresh)
            mask = visible if window is None else visible & (distance < window)
            return blockwise_attention(q, [(keys, values, mask)]), (keys, values)

        return attend

    def _put(
        self, counts: Int[Array, "*B"], held: Float[Array, "B K P H"], new: Float[Array, "B K S H"]
    ) -> Float[Array, "B K P H"]:
        if not counts.ndim:  # what is behind the last token of a row that is not alive is never read
            return jax.lax.dynamic_update_slice_in_dim(held, new, self._span + counts, axis=2)
        return jax.vmap(functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=1))(held, new, self._span + counts)

    def finish(self, state: list[Any], counts: Int[Array, "D A"]) -> SegmentCache:
        where = _places(self._cache, self._starts, counts, self._steps)

        def store(old: tuple[Any, ...], which: int) -> tuple[Any, ...]:
            new = (_heads_first(jax.tree.map(lambda leaf: leaf[:, :, self._span :], pair[which])) for pair in state)
            return tuple(_write(layer, self._rows, where, each) for layer, each in zip(old, new))

        cache = self._cache
        return dataclasses.replace(cache, k=store(cache.k, 0), v=store(cache.v, 1))


def _stored(config: DecoderConfig, mesh: Mesh) -> PartitionSpec:
    """The sharding of a layer: rows over the batch axes, heads over `tensor`."""
    return PartitionSpec(BATCH_AXES, None, None, heads_axis(config, mesh))


def _places(cache: SegmentCache, starts: Array, counts: Array, steps: int) -> Int[Array, "D A S"]:
    """Positions of new tokens in their rows; the rows' length, where nothing is written, behind the last one."""
    offsets = jnp.arange(steps)
    return jnp.where(offsets < counts[..., None], starts[..., None] + offsets, cache.length)


def _heads_first(x: Any) -> Any:
    """[B, S, K, ...] -> [B, K, S, ...], and back, of an array or of codes and scales."""
    return jax.tree.map(lambda leaf: leaf.swapaxes(1, 2), x)


def _read(layer: Any, rows: Array, span: int) -> Any:
    """Cached entries of some rows, [D, A, P, K, H] -> [B, K, P, H], of an array or of codes and scales."""

    def one(leaf: Array) -> Array:
        entries = jax.vmap(lambda shard, index: shard.at[index, :span].get(mode="fill", fill_value=0))(leaf, rows)
        return entries.reshape(-1, *entries.shape[2:])

    return _heads_first(jax.tree.map(one, layer))


def _write(layer: Any, rows: Array, positions: Array, values: Any) -> Any:
    """Writes values [B, S, K, H] at (row, position), [D, A, S]. Values at out-of-range rows or positions are dropped."""

    def one(leaf: Array, new: Array) -> Array:
        new = new.reshape(*positions.shape, *new.shape[2:])
        return jax.vmap(lambda shard, row, position, value: shard.at[row[:, None], position].set(value, mode="drop"))(
            leaf, rows, positions, new
        )

    return jax.tree.map(one, layer, values)
