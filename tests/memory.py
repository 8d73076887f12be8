"""XLA's own error for what does not fit into memory."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp


@functools.partial(jax.jit, donate_argnums=0)
def _too_large(donated: Any, value: jax.Array) -> Any:
    return donated, jnp.full((2**24, 2**24), value)  # a pebibyte


def needs_too_much(donated: Any = ()) -> Any:
    """A program that is given arrays to write into, and finds no room. It fails at once, as on an accelerator."""
    return jax.block_until_ready(_too_large(donated, jnp.float32(1)))
