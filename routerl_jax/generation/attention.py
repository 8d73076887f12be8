"""Attention of new tokens to the cached tokens of their row and to each other."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from routerl_jax.generation.quantized import Codes

Held = Float[Array, "B K T H"] | Codes  # keys or values
# keys, values, and a mask of those that each query may see
Block = tuple[Held, Held, Bool[Array, "#B #S T"]]


def blockwise_attention(q: Float[Array, "B S N H"], blocks: Sequence[Block]) -> Float[Array, "B S N H"]:
    """Grouped-query softmax attention over the union of several key/value blocks, without concatenating them.

    Scores and softmax are float32. Every query must see at least one key. Codes are multiplied as they are: the scale of a key
    goes to its scores, and that of a value to its weights.
    """
    batch, steps, heads, width = q.shape
    kv_heads = jax.tree.leaves(blocks[0][0])[0].shape[1]
    group = heads // kv_heads
    # The queries of a key head are contiguous, so that their products are plain matrix products, which CPUs need to be fast.
    q = q.reshape(batch, steps, kv_heads, group, width).transpose(0, 2, 3, 1, 4)
    q = q.reshape(batch, kv_heads, group * steps, width)
    scores = []
    for keys, _, mask in blocks:
        codes, scale = _parts(keys, q)
        score = jnp.einsum("BKQH,BKTH->BKQT", q, codes, preferred_element_type=jnp.float32) * width**-0.5
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
        weight = (weight if scale is None else weight * scale).astype(codes.dtype)
        mixed.append(jnp.einsum("BKQT,BKTH->BKQH", weight, codes))
    out = sum(mixed[1:], mixed[0]).reshape(batch, kv_heads, group, steps, width).transpose(0, 3, 1, 2, 4)
    return out.reshape(batch, steps, heads, width).astype(q.dtype)


def _parts(held: Held, q: Array) -> tuple[Float[Array, "B K T H"], Float[Array, "B K 1 T"] | None]:
    """What is multiplied with queries or weights, and the scale of each token."""
    if not isinstance(held, Codes):
        return held, None
    return held.codes.astype(q.dtype), held.scale.swapaxes(-1, -2).astype(jnp.float32)
