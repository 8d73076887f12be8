"""Causal self-attention over whole sequences, behind one function with one contract.

Attention against a KV cache belongs to the engine (generation/attention.py).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

# Attention goes in blocks of queries: small ones save more, many cost compile time.
_LEAST_BLOCK, _MOST_BLOCKS = 64, 8


def causal_mask(segment_ids: Int[Array, "B T"]) -> Bool[Array, "B 1 T T"]:
    """True where a query may look: at or before its own index, inside its own segment. Segment 0 is padding."""
    length = segment_ids.shape[1]
    same = segment_ids[:, :, None] == segment_ids[:, None, :]
    return (same & jnp.tri(length, dtype=bool))[:, None]


def self_attention(
    q: Float[Array, "B T N H"], k: Float[Array, "B T K H"], v: Float[Array, "B T K H"], mask: Bool[Array, "B 1 T T"]
) -> Float[Array, "B T N H"]:
    """Grouped-query softmax attention under a causal mask, logits and softmax in float32.

    Queries go in blocks, each against the keys up to its end: what lies after them is not computed.
    benchmarks/attention.py compares it with `jax.nn.dot_product_attention`.
    """
    batch, length, heads, width = q.shape
    kv_heads = k.shape[2]
    group = heads // kv_heads
    q = (q * width**-0.5).reshape(batch, length, kv_heads, group, width).transpose(0, 2, 3, 1, 4)
    k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    step = max(_LEAST_BLOCK, -(-length // _MOST_BLOCKS))
    blocks = []
    for start in range(0, length, step):
        end = min(start + step, length)
        queries = q[:, :, :, start:end].reshape(batch, kv_heads, group * (end - start), width)
        logits = jnp.einsum("BKQH,BKSH->BKQS", queries, k[:, :, :end], preferred_element_type=jnp.float32)
        logits = logits.reshape(batch, kv_heads, group, end - start, end)
        logits = jnp.where(mask[:, :, None, start:end, :end], logits, jnp.finfo(jnp.float32).min)
        weights = jax.nn.softmax(logits, axis=-1).astype(v.dtype)
        mixed = jnp.einsum("BKQS,BKSH->BKQH", weights.reshape(batch, kv_heads, -1, end), v[:, :, :end])
        blocks.append(mixed.reshape(batch, kv_heads, group, end - start, width))
    return jnp.concatenate(blocks, axis=3).transpose(0, 3, 1, 2, 4).reshape(batch, length, heads, width)
