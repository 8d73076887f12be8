"""Drafts of the next tokens, copied from the conversation itself.

A searching policy repeats what it has read: names, titles, whole sentences. So a draft copies the tokens that followed an
earlier occurrence of the last tokens. A decode step reads a draft together with the newest token, and keeps as much of it as
the policy samples (prompt lookup decoding, A. Saxena 2023, in transformers `prompt_lookup_num_tokens`; vLLM's `ngram`). The
policy's own draws decide, each with the randomness of its position. So drafts change the number of steps, and not the sampled
tokens.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

LONGEST = 3  # tokens that are looked up; if they do not occur earlier, the last two, then the last one


def lookup(history: Int[Array, "B L"], lengths: Int[Array, " B"], count: int) -> Int[Array, "B C"]:
    """The `count` tokens after the latest and longest earlier match of a row's last tokens; -1 where there are none.

    Args:
      history: tokens of each row.
      lengths: how many of them there are; at least 1.
    """
    size = history.shape[1]
    index = jnp.arange(size)
    matches = index < lengths[:, None] - 1  # earlier positions at which the last tokens stand
    longest = jnp.zeros_like(history)
    for back in range(LONGEST):
        at = lengths - 1 - back
        last = jnp.take_along_axis(history, jnp.maximum(at, 0)[:, None], axis=1)
        matches = matches & (jnp.roll(history, back, axis=1) == last) & (index >= back) & (at >= back)[:, None]
        longest = longest + matches
    match = jnp.argmax(longest * size + index * (longest > 0), axis=1)
    positions = match[:, None] + 1 + jnp.arange(count)
    tokens = jnp.take_along_axis(history, jnp.minimum(positions, size - 1), axis=1)
    return jnp.where((longest.max(axis=1) > 0)[:, None] & (positions < lengths[:, None]), tokens, -1)


def put(values: Array, new: Array, columns: Int[Array, " B"], accepted: Bool[Array, "B T"]) -> Array:
    """`values` [B, S, ..] with the accepted entries of `new` [B, T, ..] from each row's column on, as far as S reaches."""
    index = jnp.arange(values.shape[1])
    for t in range(accepted.shape[1]):
        here = accepted[:, t, None] & (index == columns[:, None] + t)
        here = here.reshape(*here.shape, *(1,) * (values.ndim - 2))
        values = jnp.where(here, new[:, t, None], values)
    return values
