"""Keys and values as int8, with a scale per token and head.

A token is quantised when it is computed, before anything attends to it. So all that see it see the same numbers, whether it is
fed whole, in parts or decoded, and a copied row holds what its source holds.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax.numpy as jnp
import qwix
from jaxtyping import Array, Float, Int8

Qtype = Literal["", "int8"]


class Codes(NamedTuple):
    """Quantised vectors: codes times scale. Both are indexed alike, as the last axis is the only one that differs."""

    codes: Int8[Array, "*B H"]
    scale: Float[Array, "*B 1"]


def quantize_tokens(x: Float[Array, "*B H"]) -> Codes:
    """Symmetric int8 by qwix's absolute maximum over the last axis; scales have the dtype of `x`."""
    array = qwix.quantize(x, jnp.int8, channelwise_axes=range(x.ndim - 1))
    return Codes(array.qvalue, array.scale)
