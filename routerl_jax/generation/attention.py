"""Attention of new tokens to the cached tokens of their row and to each other."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

# keys, values, and a mask of those that each query may see
Block = tuple[Float[Array, "B K T H"], Float[Array, "B K T H"], Bool[Array, "#B #S T"]]


def blockwise_attention(q: Float[Array, "B S N H"], blocks: Sequence[Block]) -> Float[Array, "B S N H"]:
    """Grouped-query softmax attention over the union of several key/value blocks, without concatenating them.

    Scores and softmax are float32. Every query must see at least one key.
    """
    batch, steps, heads, width = q.shape
    kv_heads = blocks[0][0].shape[1]
    group = heads // kv_heads
    # The queries of a key head are contiguous, so that their products are plain matrix products, which CPUs need to be fast.
    q = q.reshape(batch, steps, kv_heads, group, width).transpose(0, 2, 3, 1, 4)
    q = q.reshape(batch, kv_heads, group * steps, width)
    scores = []
    for keys, _, mask in blocks:
        score = jnp.einsum("BKQH,BKTH->BKQT", q, keys, preferred_element_type=jnp.float32) * width**-0.5
        score = score.reshape(batch, kv_heads, group, steps, -1)
        scores.append(jnp.where(mask[:, None, None], score, -jnp.inf))
    peak = scores[0].max(axis=-1, keepdims=True)
    for score in scores[1:]:
        peak = jnp.maximum(peak, score.max(axis=-1, keepdims=True))
    weights = [jnp.exp(score - peak) for score in scores]
    total = sum(weight.sum(axis=-1, keepdims=True) for weight in weights)
    mixed = []
    for weight, (_, values, _) in zip(weights, blocks):
        weight = (weight / total).astype(values.dtype).reshape(batch, kv_heads, group * steps, -1)
        mixed.append(jnp.einsum("BKQT,BKTH->BKQH", weight, values))
    out = sum(mixed[1:], mixed[0]).reshape(batch, kv_heads, group, steps, width).transpose(0, 3, 1, 2, 4)
    return out.reshape(batch, steps, heads, width).astype(q.dtype)
