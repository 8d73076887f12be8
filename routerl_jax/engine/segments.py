"""The KV cache and its attention in plain XLA: for CPUs, and for models and devices that the kernels don't support.

While rows decode, their cached keys are read-only, and new ones go to a buffer.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from routerl_jax.engine.cache import Codes, Qtype, copy_rows, heads_axis, quantize_tokens, stored_spec
from routerl_jax.models.config import DecoderConfig
from routerl_jax.models.decoder import Attend
from routerl_jax.parallel.mesh import BATCH_AXES, on_cpu

Values = Float[Array, "B K T H"] | Codes
Keys = Float[Array, "B K H T"] | Codes  # in this order, CPUs multiply queries with them in half the time
Block = tuple[Keys, Values, Bool[Array, "#B #S T"]]  # the mask is of the keys that each query may see

# Of `chunked_attention`: keys of a block, and chunks of a row that are multiplied with it at once. XLA divides only large
# products among the cores of a device.
_KEYS = 128
_TILES = (8, 2, 1)
LOWEST = -1e30  # below every score; finite, so that its difference to the score -inf of what is not seen is a number


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
        sharding = NamedSharding(mesh, stored_spec(config, mesh))

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
        options = {"span": span, "mesh": self.mesh, "stored": stored_spec(self.config, self.mesh)}
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
        stored = stored_spec(self.config, self.mesh)
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

    shared = True

    def __init__(self, cache: SegmentCache, rows: Array, starts: Array, counts: Array) -> None:
        self._cache, self._rows, self._starts, self._counts = cache, rows, starts, counts
        self.caches = (cache.k, cache.v)

    def attend(self, q: Array, k: Array, v: Array, layer: Any, window: int | None) -> tuple[Array, Any]:
        return self._cache.write_and_attend(q, k, v, layer, window, self._rows, self._starts, self._counts)

    def finish(self, caches: tuple[Any, Any]) -> SegmentCache:
        return dataclasses.replace(self._cache, k=caches[0], v=caches[1])


class _WholeRows(_PaddedAtTheEnd):
    """For accelerators without a kernel. A call has one chunk of a row at most, and reads what it attends to once."""

    shared = False

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

    def finish(self, state: list[Any], counts: Int[Array, "D A"]) -> tuple[SegmentCache, list[Any] | None]:
        keys, values = zip(*state)
        k = jax.tree.map(lambda *x: jnp.stack([leaf[..., self._span :].transpose(0, 3, 1, 2) for leaf in x]), *keys)
        v = jax.tree.map(lambda *x: jnp.stack([leaf[:, :, self._span :].swapaxes(1, 2) for leaf in x]), *values)
        cache = _written(self._cache, self._rows, self._starts, counts, (k, v))
        return cache, state if on_cpu(self._cache.mesh) else None  # an accelerator's allocator keeps memory by itself


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
    stored = stored_spec(cache.config, cache.mesh)

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


def blockwise_attention(q: Float[Array, "B S N H"], blocks: Sequence[Block]) -> Float[Array, "B S N H"]:
    """Grouped-query softmax attention over the union of several key/value blocks, without concatenating them.

    Scores and softmax are float32. Every query must see at least one key. Codes are multiplied as they are: the scale of a key
    goes to its scores, and that of a value to its weights.
    """
    batch, steps, heads, width = q.shape
    kv_heads = jax.tree.leaves(blocks[0][1])[0].shape[1]
    group = heads // kv_heads
    # The queries of a key head are contiguous, so that their products are plain matrix products, which CPUs need to be fast.
    q = q.reshape(batch, steps, kv_heads, group, width).transpose(0, 2, 3, 1, 4)
    q = q.reshape(batch, kv_heads, group * steps, width)
    scores = []
    for keys, _, mask in blocks:
        codes, scale = _parts(keys, q)
        score = jnp.einsum("BKQH,BKHT->BKQT", q, codes, preferred_element_type=jnp.float32) * width**-0.5
        score = score if scale is None else score * scale
        score = score.reshape(batch, kv_heads, group, steps, -1)
        scores.append(jnp.where(mask[:, None, None], score, -jnp.inf))
    peak = scores[0].max(axis=-1, keepdims=True)
    for score in scores[1:]:
        peak = jnp.maximum(peak, score.max(axis=-1, keepdims=True))
    weights = [jnp.exp(score - peak) for score in scores]
    total = sum(weight.sum(axis=-1, keepdims=True) for weight in weights)
    mixed = []
    for weight, (_, values, _) in zip(weights, blocks):
        codes, scale = _parts(values, q)
        weight = (weight / total).reshape(batch, kv_heads, group * steps, -1)
        weight = (weight if scale is None else weight * scale.swapaxes(-1, -2)).astype(codes.dtype)
        mixed.append(jnp.einsum("BKQT,BKTH->BKQH", weight, codes))
    out = sum(mixed[1:], mixed[0]).reshape(batch, kv_heads, group, steps, width).transpose(0, 3, 1, 2, 4)
    return out.reshape(batch, steps, heads, width).astype(q.dtype)


def chunked_attention(
    q: Float[Array, "A S N H"],
    layer: tuple[Any, Any],
    rows: Int[Array, " A"],
    starts: Int[Array, " A"],
    counts: Int[Array, " A"],
    window: int | None,
) -> Float[Array, "A S N H"]:
    """Attention of chunks of rows to all tokens of their rows up to each query. For the devices of a CPU.

    It processes a few chunks of one row at a time, and for them the row's blocks of keys, as far as the row is filled. So the
    scores of a block stay in a core's cache (online softmax, arXiv 2205.14135, algorithm 1).

    Args:
      layer: keys and values of R rows with T positions, [R, T, K, H]; the chunks' own are among them.
      rows, starts, counts: of each chunk its row, the position of its first token, and its number of tokens. Chunks without
        tokens come last.
      window: number of tokens that a query sees, itself included; None: all.

    Returns:
      The output; undefined behind a chunk's last token.
    """
    chunks, steps, heads, width = q.shape
    length, kv_heads = jax.tree.leaves(layer)[0].shape[1:3]
    size, group = min(_KEYS, length), heads // kv_heads
    q = q.reshape(chunks, steps, kv_heads, group, width)
    scaled = q * width**-0.5

    def block(leaf: Array, row: Array, first: Array) -> Array:
        sizes = (1, size, *leaf.shape[2:])
        return jax.lax.dynamic_slice(leaf, (row, first, 0, 0), sizes)[0].swapaxes(0, 1)  # [K, T, H]

    def of_tile(i: Array, tile: int, out: Array) -> Array:
        """The output with that of chunks i to i + tile, which have one row."""
        row, (first_tokens, tokens) = rows[i], (jax.lax.dynamic_slice_in_dim(x, i, tile) for x in (starts, counts))
        # The queries of a key head are contiguous, as in `blockwise_attention`.
        queries = jax.lax.dynamic_slice_in_dim(scaled, i, tile).transpose(2, 3, 0, 1, 4).reshape(kv_heads, -1, width)
        positions = jnp.tile((first_tokens[:, None] + jnp.arange(steps)).reshape(-1), group)[:, None]

        def of_block(masked: bool, number: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            peak, total, mixed = carry
            first = jnp.minimum(number * size, length - size)  # the last block overlaps the one before it
            keys, values = jax.tree.map(lambda leaf: block(leaf, row, first), layer)
            codes, scale = _parts(keys, q)
            score = jnp.einsum("KQH,KTH->KQT", queries, codes, preferred_element_type=jnp.float32)
            score = score if scale is None else score * scale.swapaxes(-1, -2)
            if masked:
                distance = positions - (first + jnp.arange(size))
                visible = (distance >= 0) & (first + jnp.arange(size) >= number * size)
                visible = visible if window is None else visible & (distance < window)
                score = jnp.where(visible, score, -jnp.inf)
            higher = jnp.maximum(peak, score.max(axis=-1, keepdims=True))
            weight, rescale = jnp.exp(score - higher), jnp.exp(peak - higher)
            total = total * rescale + weight.sum(axis=-1, keepdims=True)
            codes, scale = _parts(values, q)
            weight = (weight if scale is None else weight * scale.swapaxes(-1, -2)).astype(codes.dtype)
            new = jnp.einsum("KQT,KTH->KQH", weight, codes, preferred_element_type=jnp.float32)
            return higher, total, mixed * rescale + new

        columns = jnp.zeros((kv_heads, queries.shape[1], 1), jnp.float32)
        carry = (columns + LOWEST, columns, jnp.zeros(queries.shape, jnp.float32))
        if window is None:  # all queries see all of the first blocks
            begin = (first_tokens.min() + 1) // size
            carry = jax.lax.fori_loop(0, begin, functools.partial(of_block, False), carry)
        else:
            begin = jnp.maximum(first_tokens.min() - window + 1, 0) // size
        end = ((first_tokens + tokens).max() + size - 1) // size
        _, total, mixed = jax.lax.fori_loop(begin, end, functools.partial(of_block, True), carry)
        # the largest weight of a query that sees anything is 1
        mixed = (mixed / jnp.maximum(total, 1)).reshape(kv_heads, group, tile, steps, width).transpose(2, 3, 0, 1, 4)
        return jax.lax.dynamic_update_slice_in_dim(out, mixed.astype(q.dtype), i, axis=0)

    out = jnp.zeros_like(q)
    for tile, firsts, count in _tiles(rows, counts):
        out = jax.lax.fori_loop(0, count, lambda i, out, firsts=firsts, tile=tile: of_tile(firsts[i], tile, out), out)
    return out.reshape(chunks, steps, heads, width)


def _tiles(rows: Int[Array, " A"], counts: Int[Array, " A"]) -> Iterator[tuple[int, Int[Array, " A"], Int[Array, ""]]]:
    """Cuts the chunks that have tokens into tiles: neighbours of one row, as many as one of `_TILES`.

    Yields:
      The number of chunks of a tile; the first chunk of each such tile; the number of these tiles.
    """
    index, filled = jnp.arange(len(rows)), counts > 0
    first = jax.lax.cummax(jnp.where((jnp.diff(rows, prepend=-1) != 0) | ~filled, index, 0))  # chunk of the same row
    place, length = index - first, jnp.zeros_like(index).at[first].add(1)[first]
    tiled = jnp.zeros_like(index)  # chunks of the row that are in larger tiles
    for size in _TILES:
        if size <= len(rows):
            begins = filled & (place >= tiled) & ((place - tiled) % size == 0) & (place + size <= length)
            yield size, jnp.nonzero(begins, size=len(rows), fill_value=0)[0], begins.sum()
            tiled += (length - tiled) // size * size


def _parts(stored: Array | Codes, q: Array) -> tuple[Array, Array | None]:
    """The values to multiply with queries or weights, and the scale of each token, which has 1 for the channels."""
    if not isinstance(stored, Codes):
        return stored, None
    return stored.codes.astype(q.dtype), stored.scale.astype(jnp.float32)
