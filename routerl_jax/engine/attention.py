"""Attention of new tokens to the cached tokens of their row and to each other."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from routerl_jax.engine.quantized import Codes

Values = Float[Array, "B K T H"] | Codes
Keys = Float[Array, "B K H T"] | Codes  # in this order, CPUs multiply queries with them in half the time
Block = tuple[Keys, Values, Bool[Array, "#B #S T"]]  # the mask is of the keys that each query may see

# Of `chunked_attention`: keys of a block, and chunks of a row that are multiplied with it at once. XLA divides only large
# products among the cores of a device.
_KEYS = 128
_TILES = (8, 2, 1)
LOWEST = -1e30  # below every score; finite, so that its difference to the score -inf of what is not seen is a number


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
