"""Keys and values as int8, with a scale per token and head.

A token is quantised when it is computed, before any query attends to it. So all queries see the same numbers, whether the token
was fed or decoded, in one call or several, and a copied row equals its source.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int8

Qtype = Literal["", "int8"]


class Codes(NamedTuple):
    """Quantised vectors: codes times scale. Both are indexed alike, as the last axis is the only one that differs."""

    codes: Int8[Array, "*B H"]
    scale: Float[Array, "*B 1"]


def quantize_tokens(x: Float[Array, "*B H"]) -> Codes:
    """Symmetric int8 over the last axis: the largest entry is 127 steps. Scales have the dtype of `x`.

    (In qwix it is 127.5 steps, between two codes. Then programs that round differently in the last bit would store different
    codes.)
    """
    x32 = x.astype(jnp.float32)
    scale = (jnp.abs(x32).max(axis=-1, keepdims=True) / 127).astype(x.dtype)
    steps = x32 / jnp.where(scale > 0, scale, 1).astype(jnp.float32)
    return Codes(jnp.clip(jnp.round(steps), -127, 127).astype(jnp.int8), scale)
