"""Attention of new tokens to the cached tokens of their row and to each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from routerl_jax.generation.quantized import Codes

Values = Float[Array, "B K T H"] | Codes
Keys = Float[Array, "B K H T"] | Codes  # in this order, CPUs multiply queries with them in half the time
Block = tuple[Keys, Values, Bool[Array, "#B #S T"]]  # the mask is of the keys that each query may see

_KEYS = 128  # of a block in `chunked_attention`
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

    It processes chunks one after the other, and for each chunk its row's blocks of keys, as far as the row is filled. So the
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
    # The queries of a key head are contiguous, as in `blockwise_attention`.
    q = q.reshape(chunks, steps, kv_heads, group, width).transpose(0, 2, 3, 1, 4)
    q = q.reshape(chunks, kv_heads, group * steps, width)

    def block(leaf: Array, row: Array, first: Array) -> Array:
        sizes = (1, size, *leaf.shape[2:])
        return jax.lax.dynamic_slice(leaf, (row, first, 0, 0), sizes).swapaxes(1, 2)  # [1, K, T, H]

    def of_chunk(i: Array, out: Array) -> Array:
        queries, row, start = q[i][None], rows[i], starts[i]
        positions = start + jnp.tile(jnp.arange(steps), group)[:, None]

        def of_block(number: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            peak, total, mixed = carry
            first = jnp.minimum(number * size, length - size)  # the last block overlaps the one before it
            keys, values = jax.tree.map(lambda leaf: block(leaf, row, first), layer)
            codes, scale = _parts(keys, q)
            score = jnp.einsum("BKQH,BKTH->BKQT", queries, codes, preferred_element_type=jnp.float32) * width**-0.5
            score = score if scale is None else score * scale.swapaxes(-1, -2)
            distance = positions - (first + jnp.arange(size))
            visible = (distance >= 0) & (first + jnp.arange(size) >= number * size)
            visible = visible if window is None else visible & (distance < window)
            score = jnp.where(visible, score, -jnp.inf)
            higher = jnp.maximum(peak, score.max(axis=-1, keepdims=True))
            weight, rescale = jnp.exp(score - higher), jnp.exp(peak - higher)
            total = total * rescale + weight.sum(axis=-1, keepdims=True)
            codes, scale = _parts(values, q)
            weight = (weight if scale is None else weight * scale.swapaxes(-1, -2)).astype(codes.dtype)
            new = jnp.einsum("BKQT,BKTH->BKQH", weight, codes, preferred_element_type=jnp.float32)
            return higher, total, mixed * rescale + new

        columns = jnp.zeros((1, kv_heads, group * steps, 1), jnp.float32)
        carry = (columns + LOWEST, columns, jnp.zeros(queries.shape, jnp.float32))
        first = 0 if window is None else jnp.maximum(start - window + 1, 0) // size
        _, total, mixed = jax.lax.fori_loop(first, (start + counts[i] + size - 1) // size, of_block, carry)
        # the largest weight of a query that sees anything is 1
        return out.at[i].set((mixed / jnp.maximum(total, 1))[0].astype(q.dtype))

    out = jax.lax.fori_loop(0, (counts > 0).sum(), of_chunk, jnp.zeros_like(q))
    out = out.reshape(chunks, kv_heads, group, steps, width).transpose(0, 3, 1, 2, 4)
    return out.reshape(chunks, steps, heads, width)


def _parts(stored: Array | Codes, q: Array) -> tuple[Array, Array | None]:
    """The values to multiply with queries or weights, and the scale of each token, which has 1 for the channels."""
    if not isinstance(stored, Codes):
        return stored, None
    return stored.codes.astype(q.dtype), stored.scale.astype(jnp.float32)
