"""The engine's three device programs: extend rows by given tokens, fork rows, decode a segment.

Rows live in shards: array dimension 0 of the cache is split over the mesh's batch axes, and a program touches rows of a
shard only from that shard, so no row ever moves between devices. Row indices are local to their shard; an index equal to
the number of rows is padding (reads give zeros, writes are dropped).

Dimensions: D shards, R rows per shard, A rows of a shard in this call, B = D * A, S new tokens or decode steps, P span of
cached positions that the call reads, K key/value heads, H head width, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, UInt32

from routerl_jax.generation.attention import blockwise_attention
from routerl_jax.generation.sampling import row_keys, sample_tokens
from routerl_jax.models.decoder import Decoder

Host = Array | np.ndarray  # made on the host, given to a program


@functools.partial(jax.tree_util.register_dataclass, data_fields=["k", "v"], meta_fields=[])
@dataclasses.dataclass(frozen=True, kw_only=True)
class KVCache:
    """Keys and values of all rows; one array per layer, so that decoding never copies a stack."""

    k: tuple[Float[Array, "D R T K H"], ...]
    v: tuple[Float[Array, "D R T K H"], ...]

    @classmethod
    def create(cls, model: Decoder, shards: int, rows: int, length: int, sharding: jax.sharding.Sharding) -> KVCache:
        """An empty cache."""
        config = model.config
        shape = (shards, rows, length, config.kv_heads, config.head_dim)
        zeros = jax.jit(lambda: jnp.zeros(shape, model.compute_dtype), out_shardings=sharding)
        return cls(k=tuple(zeros() for _ in range(config.layers)), v=tuple(zeros() for _ in range(config.layers)))

    @property
    def rows(self) -> int:
        return self.k[0].shape[1]

    @property
    def length(self) -> int:
        return self.k[0].shape[2]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "rows",
        "starts",
        "tokens",
        "limits",
        "states",
        "stop_masks",
        "identity",
        "temperature",
        "top_p",
        "top_k",
    ],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeInputs:
    """What the host says about each row of a decode segment."""

    rows: Int[Host, "D A"]  # local row, or R for padding
    starts: Int[Host, "D A"]  # tokens in the cache
    tokens: Int[Host, "D A"]  # the newest token, not in the cache yet
    limits: Int[Host, "D A"]  # most tokens to sample here; 0 for padding
    states: Int[Host, "D A"]  # stop automaton states
    stop_masks: UInt32[Host, "D A"]  # which stops count for the row
    identity: UInt32[Host, "D A 3"]  # example hash, sample index, turn
    temperature: Float[Host, "D A"]
    top_p: Float[Host, "D A"]
    top_k: Int[Host, "D A"]


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["tokens", "logprobs", "counts", "states", "stopped"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeOutputs:
    """What a decode segment sampled."""

    tokens: Int[Array, "D A S"]
    logprobs: Float[Array, "D A S"]
    counts: Int[Array, "D A"]  # tokens sampled per row
    states: Int[Array, "D A"]
    stopped: UInt32[Array, "D A"]  # bits of the stops that were completed, 0 if none


def _read(layer: Array, rows: Array, span: int) -> Array:
    """Cached entries of some rows, [D, A, P, K, H] -> [B, K, P, H]."""
    taken = jax.vmap(lambda shard, index: shard.at[index, :span].get(mode="fill", fill_value=0))(layer, rows)
    return taken.reshape(-1, *taken.shape[2:]).transpose(0, 2, 1, 3)


def _write(layer: Array, rows: Array, positions: Array, values: Array) -> Array:
    """Writes values [D, A, S, K, H] at (row, position); out-of-range rows or positions are dropped."""
    return jax.vmap(lambda shard, row, position, value: shard.at[row[:, None], position].set(value, mode="drop"))(
        layer, rows, positions, values
    )


def extend(
    graph: nnx.GraphDef,
    params: nnx.State,
    cache: KVCache,
    rows: Int[Array, "D A"],
    starts: Int[Array, "D A"],
    tokens: Int[Array, "D A S"],
    counts: Int[Array, "D A"],
    *,
    span: int,
) -> KVCache:
    """Feeds `counts` given tokens to each row, whose first `starts` positions are cached already (starts <= span)."""
    model: Decoder = nnx.merge(graph, params)
    shards, active, steps = tokens.shape
    offsets = jnp.arange(steps)
    positions = starts[..., None] + offsets
    starts_B = starts.reshape(-1)
    seen_cached = (jnp.arange(span) < starts_B[:, None])[:, None]
    causal = (offsets[None, :] <= offsets[:, None])[None]
    ages = positions.reshape(-1, steps, 1) - jnp.arange(span)  # of cached tokens, seen from each new one

    def attend(
        q: Array, k: Array, v: Array, cached: tuple[Array, Array] | None, window: int | None
    ) -> tuple[Array, Any]:
        near = True if window is None else offsets[:, None] - offsets[None, :] < window
        blocks = [(k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3), causal & near)]
        if cached is not None:
            blocks.append((*cached, seen_cached if window is None else seen_cached & (ages < window)))
        return blockwise_attention(q, blocks), (k, v)

    cached = None
    if span:
        cached = tuple(jnp.stack([_read(layer, rows, span) for layer in layers]) for layers in (cache.k, cache.v))
    flat = tokens.reshape(-1, steps), positions.reshape(-1, steps)
    _, (new_k, new_v) = model.run(*flat, attend, cached)
    where = jnp.where(offsets < counts[..., None], positions, cache.length)
    shape = (shards, active, steps, *new_k.shape[-2:])
    return KVCache(
        k=tuple(_write(layer, rows, where, new.reshape(shape)) for layer, new in zip(cache.k, new_k)),
        v=tuple(_write(layer, rows, where, new.reshape(shape)) for layer, new in zip(cache.v, new_v)),
    )


def fork(cache: KVCache, sources: Int[Array, "D A"], targets: Int[Array, "D A"], *, span: int) -> KVCache:
    """Copies the first `span` cached positions of source rows to target rows of the same shard."""

    def copy(layer: Array) -> Array:
        def one(shard: Array, source: Array, target: Array) -> Array:
            return shard.at[target, :span].set(shard.at[source, :span].get(mode="fill", fill_value=0), mode="drop")

        return jax.vmap(one)(layer, sources, targets)

    return jax.tree.map(copy, cache)


def decode(
    graph: nnx.GraphDef,
    params: nnx.State,
    cache: KVCache,
    inputs: DecodeInputs,
    transition: Int[Array, "Q V"],
    hits: UInt32[Array, "Q V"],
    seed: Int[Array, ""],
    leave_at: Int[Array, ""],
    *,
    steps: int,
    span: int,
    truncate: bool,
) -> tuple[KVCache, DecodeOutputs]:
    """Samples up to `steps` tokens per row; returns as soon as at most `leave_at` rows are still running.

    New keys and values go to a small buffer at the same index for all rows and are written to the rows' own places once,
    at the end; the cached part is read-only meanwhile.
    """
    model: Decoder = nnx.merge(graph, params)
    config = model.config
    shards, active = inputs.rows.shape
    batch = shards * active

    rows = jnp.asarray(inputs.rows)

    def flat(x: Host) -> Array:
        return jnp.asarray(x).reshape(batch, *x.shape[2:])

    starts, limits, stop_masks = flat(inputs.starts), flat(inputs.limits), flat(inputs.stop_masks)
    keys = row_keys(seed, flat(inputs.identity))
    temperature = flat(inputs.temperature)
    top_p, top_k = (flat(inputs.top_p), flat(inputs.top_k)) if truncate else (None, None)
    cached = [(_read(k, rows, span), _read(v, rows, span)) for k, v in zip(cache.k, cache.v)]
    seen_cached = (jnp.arange(span) < starts[:, None])[:, None]
    buffer = jnp.zeros((batch, config.kv_heads, steps, config.head_dim), model.compute_dtype)

    def running(counts: Array, stopped: Array) -> Bool[Array, " B"]:
        return (stopped == 0) & (counts < limits)

    def go_on(state: dict[str, Any]) -> Array:
        alive = running(state["counts"], state["stopped"]).sum()
        return (state["step"] < steps) & (alive > leave_at)

    def body(state: dict[str, Any]) -> dict[str, Any]:
        step = state["step"]
        alive = running(state["counts"], state["stopped"])
        positions = starts + step
        seen_buffer = (jnp.arange(steps) <= step)[None, None]

        def attend(q: Array, k: Array, v: Array, layer: tuple, window: int | None) -> tuple[Array, " tuple"]:
            (cached_k, cached_v), (new_k, new_v) = layer
            new_k = jax.lax.dynamic_update_slice_in_dim(new_k, k.transpose(0, 2, 1, 3), step, axis=2)
            new_v = jax.lax.dynamic_update_slice_in_dim(new_v, v.transpose(0, 2, 1, 3), step, axis=2)
            near_buffer, near_cached = seen_buffer, seen_cached
            if window is not None:
                near_buffer &= jnp.arange(steps) > step - window
                near_cached &= (positions[:, None] - jnp.arange(span) < window)[:, None]
            blocks = [(new_k, new_v, near_buffer), (cached_k, cached_v, near_cached)]
            return blockwise_attention(q, blocks), (new_k, new_v)

        hidden, buffers = model.run(
            state["token"][:, None], positions[:, None], attend, list(zip(cached, state["buffers"])), unroll=True
        )
        logits = model.unembed(hidden[:, 0])
        token, logprob = sample_tokens(logits, keys, positions + 1, temperature, top_p, top_k)
        token = jnp.where(alive, token, state["token"])
        hit = hits[state["automaton"], token] & stop_masks
        return {
            "step": step + 1,
            "token": token,
            "buffers": buffers,
            "tokens": jax.lax.dynamic_update_slice_in_dim(state["tokens"], token[:, None], step, axis=1),
            "logprobs": jax.lax.dynamic_update_slice_in_dim(state["logprobs"], logprob[:, None], step, axis=1),
            "counts": state["counts"] + alive,
            "automaton": jnp.where(alive, transition[state["automaton"], token], state["automaton"]),
            "stopped": jnp.where(alive, hit, state["stopped"]),
        }

    state = jax.lax.while_loop(
        go_on,
        body,
        {
            "step": jnp.int32(0),
            "token": flat(inputs.tokens),
            "buffers": [(buffer, buffer) for _ in range(config.layers)],
            "tokens": jnp.zeros((batch, steps), jnp.int32),
            "logprobs": jnp.zeros((batch, steps), jnp.float32),
            "counts": jnp.zeros(batch, jnp.int32),
            "automaton": flat(inputs.states),
            "stopped": jnp.zeros(batch, jnp.uint32),
        },
    )
    counts = state["counts"].reshape(shards, active)
    offsets = jnp.arange(steps)
    where = jnp.where(offsets < counts[..., None], inputs.starts[..., None] + offsets, cache.length)

    def store(layers: tuple[Array, ...], which: int) -> tuple[Array, ...]:
        shape = (shards, active, steps, config.kv_heads, config.head_dim)
        return tuple(
            _write(layer, rows, where, pair[which].transpose(0, 2, 1, 3).reshape(shape))
            for layer, pair in zip(layers, state["buffers"])
        )

    outputs = DecodeOutputs(
        tokens=state["tokens"].reshape(shards, active, steps),
        logprobs=state["logprobs"].reshape(shards, active, steps),
        counts=counts,
        states=state["automaton"].reshape(shards, active),
        stopped=state["stopped"].reshape(shards, active),
    )
    return KVCache(k=store(cache.k, 0), v=store(cache.v, 1)), outputs
