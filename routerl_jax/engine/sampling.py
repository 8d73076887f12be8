"""Samples one token per row: temperature, top-k, top-p, greedy. A pure function of the row's logits and its key."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

MOST_TOP = 20  # likeliest tokens of a step that can be asked for
_BLOCK = 128  # the cumulative distribution is searched in two levels: first the block of ids, then the id in it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a turn is sampled. `temperature=0` is greedy; `top_k=0` and `top_p=1` switch truncation off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"temperature={self.temperature} must not be negative")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be in (0, 1]")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k} must not be negative")

    @property
    def truncated(self) -> bool:
        """True if some tokens can never be sampled."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0)


GREEDY = Sampling(temperature=0.0)


def row_keys(seed: Int[Array, ""], identity: UInt32[Array, "B 3"]) -> Array:
    """One PRNG key per row from (seed, example hash, sample index, turn), [B]. It does not depend on the row or other rows."""

    def row_key(parts: Array) -> Array:
        key = jax.random.key(seed)
        for i in range(3):
            key = jax.random.fold_in(key, parts[i])
        return key

    return jax.vmap(row_key)(identity)


def sample_tokens(
    logits: Float[Array, "B V"],
    keys: Array,
    positions: Int[Array, " B"],
    temperature: Float[Array, " B"],
    top_p: Float[Array, " B"] | None = None,
    top_k: Int[Array, " B"] | None = None,
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """Samples a token per row.

    Args:
      logits: float32.
      keys: row keys; the draw at `positions[b]` uses fold_in(keys[b], positions[b]).
      temperature: 0 means greedy.
      top_p, top_k: both given, or both None for no truncation (then none is compiled).

    Returns:
      Token ids, and their log-probabilities under the full softmax at the row's temperature (1 for greedy rows): what
      the learner recomputes. Truncation changes which tokens can be drawn, not this value.
    """
    greedy = temperature <= 0
    scaled = logits / jnp.where(greedy, 1.0, temperature)[:, None]
    peak = scaled.max(axis=-1, keepdims=True)
    weights = jnp.exp(scaled - peak)
    total = weights.sum(axis=-1)
    allowed = weights if top_p is None or top_k is None else _truncate(weights, top_p, top_k)
    uniforms = jax.vmap(lambda key, position: jax.random.uniform(jax.random.fold_in(key, position), (2,)))(
        keys, positions
    )
    drawn = _inverse_cdf(allowed, uniforms)
    token = jnp.where(greedy, jnp.argmax(logits, axis=-1), drawn).astype(jnp.int32)
    chosen = jnp.take_along_axis(scaled, token[:, None], axis=-1)[:, 0]
    return token, chosen - peak[:, 0] - jnp.log(total)


def token_logprobs(
    logits: Float[Array, "B V"], tokens: Int[Array, " B"], temperature: Float[Array, " B"]
) -> Float[Array, " B"]:
    """Log-probabilities of given tokens under the full softmax at the row's temperature (1 for greedy rows)."""
    scaled = logits / jnp.where(temperature <= 0, 1.0, temperature)[:, None]
    chosen = jnp.take_along_axis(scaled, tokens[:, None], axis=-1)[:, 0]
    return chosen - jax.nn.logsumexp(scaled, axis=-1)


def top_logprobs(
    logits: Float[Array, "B V"], temperature: Float[Array, " B"], count: int
) -> tuple[Int[Array, "B K"], Float[Array, "B K"]]:
    """The likeliest tokens, best first, and their log-probabilities as of `token_logprobs`."""
    scaled = logits / jnp.where(temperature <= 0, 1.0, temperature)[:, None]
    values, ids = jax.lax.top_k(scaled, min(count, logits.shape[-1]))
    return ids.astype(jnp.int32), values - jax.nn.logsumexp(scaled, axis=-1, keepdims=True)


def _truncate(weights: Float[Array, "B V"], top_p: Float[Array, " B"], top_k: Int[Array, " B"]) -> Float[Array, "B V"]:
    """Zeroes weights outside the top k, then those outside the smallest set of the rest with mass p (ties are kept).

    p = 1 keeps all of the rest, whatever the rounding of sums: a row without truncation is returned unchanged. Nothing is
    sorted. Non-negative floats have the order of their bit patterns, so the threshold is found bit by bit, and a sharded
    vocabulary stays sharded.
    """
    size = weights.shape[-1]
    bits = jax.lax.bitcast_convert_type(weights, jnp.int32)
    k = jnp.where(top_k > 0, jnp.minimum(top_k, size), size)[:, None]

    def enough(least: Int[Array, "B 1"]) -> Bool[Array, "B 1"]:
        return (bits >= least).sum(axis=-1, keepdims=True) >= k

    def mass(least: Int[Array, "B 1"]) -> Float[Array, "B 1"]:
        return jnp.where(bits >= jnp.maximum(least, kth), weights, 0.0).sum(axis=-1, keepdims=True)

    nothing = jnp.zeros_like(k)
    kth = _largest(enough, nothing, (top_k > 0).any())
    needed = top_p[:, None] * mass(nothing)
    lowest = _largest(lambda least: mass(least) >= needed, nothing, (top_p < 1).any())
    lowest = jnp.where((top_p >= 1)[:, None], 0, lowest)
    return jnp.where(bits >= jnp.maximum(lowest, kth), weights, 0.0)


def _largest(
    holds: Callable[[Int[Array, "B 1"]], Bool[Array, "B 1"]], start: Int[Array, "B 1"], enabled: Bool[Array, ""]
) -> Int[Array, "B 1"]:
    """Bits of the largest float for which `holds` is true; it must hold from 0 up to some float. `start` unless `enabled`."""

    def bit(i: Int[Array, ""], prefix: Int[Array, "B 1"]) -> Int[Array, "B 1"]:
        trial = prefix | (1 << (30 - i))
        return jnp.where(holds(trial), trial, prefix)

    return jax.lax.fori_loop(0, jnp.where(enabled, 31, 0), bit, start)


def _inverse_cdf(weights: Float[Array, "B V"], uniforms: Float[Array, "B 2"]) -> Int[Array, " B"]:
    """Draws ids in proportion to non-negative weights, with one uniform number for the block and one within it."""
    rows, size = weights.shape
    width = min(_BLOCK, size)
    blocks = -(-size // width)
    grouped = jnp.pad(weights, ((0, 0), (0, blocks * width - size))).reshape(rows, blocks, width)
    block = _search(grouped.sum(axis=-1), uniforms[:, 0])
    inside = jnp.take_along_axis(grouped, block[:, None, None], axis=1)[:, 0]
    return block * width + _search(inside, uniforms[:, 1])


def _search(weights: Float[Array, "B K"], uniform: Float[Array, " B"]) -> Int[Array, " B"]:
    """The index at which the running sum passes `uniform` of the total; never an index of weight zero."""
    running = jnp.cumsum(weights, axis=-1)
    index = (running <= (uniform * running[:, -1])[:, None]).sum(axis=-1)
    last = weights.shape[-1] - 1 - jnp.argmax((weights > 0)[:, ::-1], axis=-1)
    return jnp.minimum(index, last)
