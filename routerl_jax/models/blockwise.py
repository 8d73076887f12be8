"""Exact attention in tiles, in plain XLA: FlashAttention-2 (Dao, 2023, arXiv 2307.08691, algorithms 1 and 2) on any device.

Scores exist for one tile of queries and keys at a time, also in the backward pass, which computes them again from the
logarithm of each query's sum. So memory grows with the length of a row, not with its square. Tiles in which no query sees a
key are left out: above the diagonal, outside a window, and between segments of a packed row.

Dimensions: B rows, T time, K key/value heads, G query heads that share one, H head width; a tile has S keys and Q queries.
Scores are [.., S, Q]: reductions over keys are then sums of whole vectors of queries, which CPUs do several at a time.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

# Up to so many tiles of queries, the loop over them is unrolled; then the compiler's costs know the diagonal.
_UNROLLED = 8
_LEAST = float(jnp.finfo(jnp.float32).min)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
    """Static facts of a call.

    Attributes:
      size: queries of a tile, and keys.
      causal: a query sees no later key.
      window: a query sees the last `window` keys, its own included.
    """

    size: int
    causal: bool
    window: int | None

    @classmethod
    def of(cls, length: int, most: int, causal: bool, window: int | None) -> Tiling:
        """The fewest tiles of at most `most` that hold a row, all as small as possible."""
        return cls(size=-(-length // -(-length // most)), causal=causal, window=window)


def tiled_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    segment_ids: Int[Array, "B T"] | None,
    segment_ends: Int[Array, "B T"] | None,
    tiling: Tiling,
) -> Float[Array, "B T N H"]:
    """`self_attention`, in tiles. Rows are padded to whole tiles."""
    batch, length = q.shape[:2]
    spare = -length % tiling.size
    if spare and segment_ids is None:
        segment_ids = jnp.ones((batch, length), jnp.int32)
    if segment_ids is None:
        return _attend(tiling, q, k, v, None, None)
    segment_ends = segment_ids + 1 if segment_ends is None else segment_ends
    q, k, v, segment_ids = (_padded(x, spare, 0) for x in (q, k, v, segment_ids))
    out: Array = _attend(tiling, q, k, v, segment_ids, _padded(segment_ends, spare, 1))
    return out[:, :length]


def _padded(x: Array, spare: int, value: int) -> Array:
    return jnp.pad(x, ((0, 0), (0, spare), *[(0, 0)] * (x.ndim - 2)), constant_values=value) if spare else x


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(tiling: Tiling, q: Array, k: Array, v: Array, ids: Array | None, ends: Array | None) -> Array:
    out, _ = _forward(tiling, q, k, v, ids, ends)
    return out


def _forward(
    tiling: Tiling, q: Array, k: Array, v: Array, ids: Array | None, ends: Array | None
) -> tuple[Array, tuple[Any, ...]]:
    """The output, and what the backward pass needs: the inputs, the output by tiles, and log(sum(exp(scores)))."""
    size, keys, values = tiling.size, k.swapaxes(1, 2), v.swapaxes(1, 2)
    visible = _Visible(tiling, q.shape[1], ids, ends)

    def of_queries(_: None, tile: tuple[Array | int, Array]) -> tuple[None, tuple[Array, Array]]:
        at, queries = tile

        def of_keys(number: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            peak, total, mixed = carry
            scores = visible.scores(queries, _tile(keys, number, size), at, number)
            higher = jnp.maximum(peak, scores.max(2))
            weights = jnp.exp(scores - higher[:, :, None])
            scale = jnp.exp(peak - higher)
            of_tile = _product("BKSH,BKSQ->BKHQ", _tile(values, number, size), weights.astype(v.dtype))
            return higher, total * scale + weights.sum(2), mixed * scale[:, :, None] + of_tile

        batch, heads, count, width = queries.shape
        start = jnp.full((batch, heads, count), _LEAST), jnp.zeros((batch, heads, count))
        peak, total, mixed = visible.loop(at, of_keys, (*start, jnp.zeros((batch, heads, width, count))))
        return None, ((mixed / total[:, :, None]).astype(q.dtype), peak + jnp.log(total))

    queries = _by_tile(q * q.shape[-1] ** -0.5, k.shape[2], size)
    _, (mixed, sums) = _over_tiles(of_queries, None, queries)
    return _whole(mixed.swapaxes(3, 4), q.shape), (q, k, v, ids, ends, mixed, sums)


def _backward(tiling: Tiling, residuals: tuple[Any, ...], gradient: Array) -> tuple[Array | None, ...]:
    q, k, v, ids, ends, mixed, sums = residuals
    size, keys, values = tiling.size, k.swapaxes(1, 2), v.swapaxes(1, 2)
    visible = _Visible(tiling, q.shape[1], ids, ends)

    def of_queries(carry: tuple[Array, Array], tile: tuple[Any, ...]) -> tuple[tuple[Array, Array], Array]:
        at, queries, gradients, outputs, logs = tile
        inner = jnp.einsum("BKQH,BKHQ->BKQ", gradients.astype(jnp.float32), outputs.astype(jnp.float32))

        def of_keys(number: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            of_q, of_k, of_v = carry
            k_tile, v_tile = _tile(keys, number, size), _tile(values, number, size)
            weights = jnp.exp(visible.scores(queries, k_tile, at, number) - logs[:, :, None])
            of_weights = _product("BKSH,BKQH->BKSQ", v_tile, gradients)
            of_scores = (weights * (of_weights - inner[:, :, None])).astype(q.dtype)
            of_q = of_q + _product("BKSQ,BKSH->BKQH", of_scores, k_tile)
            of_k = _add(of_k, _product("BKSQ,BKQH->BKSH", of_scores, queries), number)
            of_v = _add(of_v, _product("BKSQ,BKQH->BKSH", weights.astype(v.dtype), gradients), number)
            return of_q, of_k, of_v

        of_q, *others = visible.loop(at, of_keys, (jnp.zeros(queries.shape), *carry))
        return tuple(others), of_q

    scale = q.shape[-1] ** -0.5
    tiles = (_by_tile(x, k.shape[2], size) for x in (q * scale, gradient))
    start = jnp.zeros(keys.shape), jnp.zeros(values.shape)
    (of_k, of_v), of_q = _over_tiles(of_queries, start, *tiles, mixed, sums)
    of_q = _whole(of_q, q.shape) * scale
    return of_q.astype(q.dtype), of_k.swapaxes(1, 2).astype(k.dtype), of_v.swapaxes(1, 2).astype(v.dtype), None, None


_attend.defvjp(_forward, _backward)


class _Visible:
    """Which keys queries see, by tile."""

    def __init__(self, tiling: Tiling, length: int, ids: Array | None, ends: Array | None) -> None:
        self._tiling, self._ids, self._ends = tiling, ids, ends
        self._first, self._end = self._ranges(length // tiling.size)

    def _ranges(self, count: int) -> tuple[Array, Array]:
        """For every tile of queries, the first tile of keys that one of them sees in any row, and the end of these tiles."""
        tile, size = jnp.arange(count), self._tiling.size
        some = jnp.ones((count, count), bool)
        if self._ids is not None and self._ends is not None:
            ids, ends = (x.reshape(len(x), count, size) for x in (self._ids, self._ends))
            first = jnp.where(ids > 0, ids, jnp.iinfo(ids.dtype).max).min(-1)  # without padding, which is 0
            last, end = ids.max(-1), jnp.where(ids > 0, ends, 0).max(-1)
            some = ((first[:, None] <= last[:, :, None]) & (first[:, :, None] < end[:, None])).any(0)
        if self._tiling.causal:
            some &= tile <= tile[:, None]
        if self._tiling.window is not None:
            some &= (tile + 1) * size + self._tiling.window - 1 > tile[:, None] * size
        some |= jnp.eye(count, dtype=bool)  # padding sees padding, so that no query is without a key
        return jnp.argmax(some, axis=1), count - jnp.argmax(some[:, ::-1], axis=1)

    def loop(self, at: Array | int, body: Any, carry: Any) -> Any:
        """`body(number of a tile of keys, carry)` for all tiles that tile `at` of queries sees."""
        # A constant of the program, from which the compiler's costs are counted (extras/compile_check/hlo.py).
        most = at + 1 if self._tiling.causal and isinstance(at, int) else len(self._end)

        def more(state: tuple[Array, Any]) -> Array:
            return (state[0] < self._end[at]) & (state[0] < most)

        def step(state: tuple[Array, Any]) -> tuple[Array, Any]:
            return state[0] + 1, body(*state)

        return jax.lax.while_loop(more, step, (self._first[at], carry))[1]

    def scores(self, queries: Array, keys: Array, at: Array | int, number: Array) -> Float[Array, "B K S Q"]:
        """Scores of a tile; the least number where a query does not see a key."""
        scores = _product("BKSH,BKQH->BKSQ", keys, queries)
        hidden = self._hidden(at, number)
        if hidden is None:
            return scores
        # A sum, not a choice: one addition, which XLA fuses, for the queries of all heads that share the keys.
        lowest = jnp.where(hidden, _LEAST, 0.0)
        copies = scores.shape[-1] // lowest.shape[-1]
        return scores + jnp.concatenate([lowest] * copies, axis=-1)[:, None]

    def _hidden(self, at: Array | int, number: Array) -> Bool[Array, "#B S Q"] | None:
        size, hidden = self._tiling.size, None
        if self._tiling.causal:
            distance = (at - number) * size + jnp.arange(size)[None] - jnp.arange(size)[:, None]
            outside = False if self._tiling.window is None else distance >= self._tiling.window
            hidden = ((distance < 0) | outside)[None]
        if self._ids is None or self._ends is None:
            return hidden
        own = _tile(self._ids, at, size, axis=1)[:, None]
        key, end = (_tile(x, number, size, axis=1)[:, :, None] for x in (self._ids, self._ends))
        apart = (own < key) | (own >= end)
        return apart if hidden is None else hidden | apart


def _over_tiles(function: Any, carry: Any, *arrays: Array) -> Any:
    """Like `lax.scan` over tiles of queries; the function also gets the tile's number. A few tiles are unrolled."""
    count = len(arrays[0])
    if count > _UNROLLED:
        return jax.lax.scan(function, carry, (jnp.arange(count), *arrays))
    outputs = []
    for at in range(count):
        carry, output = function(carry, (at, *(array[at] for array in arrays)))
        outputs.append(output)
    return carry, jax.tree.map(lambda *parts: jnp.stack(parts), *outputs)


def _by_tile(x: Float[Array, "B T N H"], kv_heads: int, size: int) -> Float[Array, "t B K Q H"]:
    """Tiles of queries; the Q of a tile are `size` of each of the G heads that share a key/value head."""
    batch, length, heads, width = x.shape
    group, count = heads // kv_heads, length // size
    tiles = x.reshape(batch, count, size, kv_heads, group, width).transpose(1, 0, 3, 4, 2, 5)
    return tiles.reshape(count, batch, kv_heads, group * size, width)


def _whole(tiles: Float[Array, "t B K Q H"], shape: tuple[int, ...]) -> Float[Array, "B T N H"]:
    """The inverse of `_by_tile`."""
    count, batch, kv_heads, _, width = tiles.shape
    length, heads = shape[1:3]
    size, group = length // count, heads // kv_heads
    x = tiles.reshape(count, batch, kv_heads, group, size, width).transpose(1, 0, 4, 2, 3, 5)
    return x.reshape(batch, length, heads, width)


def _tile(x: Array, number: Array | int, size: int, axis: int = 2) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, number * size, size, axis)


def _add(whole: Array, part: Array, number: Array) -> Array:
    size = part.shape[2]
    return jax.lax.dynamic_update_slice_in_dim(whole, _tile(whole, number, size) + part, number * size, axis=2)


def _product(equation: str, a: Array, b: Array) -> Array:
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)
