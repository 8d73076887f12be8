"""Causal self-attention over whole sequences, behind one function with one contract.

Attention against a KV cache belongs to the engine (generation/attention.py).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def causal_mask(segment_ids: Int[Array, "B T"]) -> Bool[Array, "B 1 T T"]:
    """True where a query may look: at or before its own index, inside its own segment. Segment 0 is padding."""
    length = segment_ids.shape[1]
    same = segment_ids[:, :, None] == segment_ids[:, None, :]
    return (same & jnp.tri(length, dtype=bool))[:, None]


def self_attention(
    q: Float[Array, "B T N H"], k: Float[Array, "B T K H"], v: Float[Array, "B T K H"], mask: Bool[Array, "B 1 T T"]
) -> Float[Array, "B T N H"]:
    """Grouped-query softmax attention, logits and softmax in float32."""
    return jax.nn.dot_product_attention(q, k, v, mask=mask)
