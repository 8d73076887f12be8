"""Attention over whole sequences with any rotary positions and windows: what the engine's caches must amount to."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

_PADDED = 256  # tokens; one shape, so that one program serves all


def logprobs(model, tokens, positions=None):
    """Log-probability of every token but the first under one whole forward pass, [T - 1].

    Args:
      positions: rotary positions, default 0, 1, ...; what a token sees depends on its index alone.
    """
    count = len(tokens)
    padded = np.pad(np.asarray(tokens), (0, _PADDED - count))
    positions = np.pad(np.arange(count) if positions is None else np.asarray(positions), (0, _PADDED - count))
    scores = np.asarray(_scores(model, padded[None], positions[None])[0])
    return scores[np.arange(count - 1), padded[1:count]]


def scores(model, tokens):
    """Log-probabilities of all tokens after these, [V]."""
    padded = np.pad(np.asarray(tokens), (0, _PADDED - len(tokens)))
    return np.asarray(_scores(model, padded[None], np.arange(_PADDED)[None])[0, len(tokens) - 1])


@nnx.jit
def _scores(model, tokens, positions):
    index = jnp.arange(tokens.shape[1])
    distance = index[:, None] - index

    def attend(q, k, v, cache, window):
        group = q.shape[2] // k.shape[2]
        k, v = jnp.repeat(k, group, axis=2), jnp.repeat(v, group, axis=2)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
        seen = (distance >= 0) & (distance < (window or _PADDED))
        weights = jax.nn.softmax(jnp.where(seen, scores, -1e30), axis=-1)
        return jnp.einsum("bhqk,bkhd->bqhd", weights, v), cache

    hidden, *_ = model.run(tokens, positions, attend, None, unroll=True)
    return jax.nn.log_softmax(model.unembed(hidden))
