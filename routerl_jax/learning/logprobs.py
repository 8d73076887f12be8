"""Log-probabilities of given tokens, computed in chunks so that no float32 [batch, time, vocabulary] array exists."""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from routerl_jax.models.attention import Attention
from routerl_jax.models.decoder import Decoder, DecoderOutput, Features, Remat
from routerl_jax.models.experts import Routing
from routerl_jax.models.patches import VisionInputs
from routerl_jax.models.vision_language import VisionLanguageModel
from routerl_jax.parallel.mesh import BATCH_AXES, batch_shards, on_gpu

# Logits that a device holds at once. With several chunks, the backward pass recomputes them, and adds to the gradient of the
# output matrix once a chunk: on an H100 that took as long as the products, with chunks of 256 MiB.
_CHUNK_BYTES = 256 * 2**20
_CHUNK_BYTES_OF_GPUS = 2**30
_LEAST_CHUNKS = 8  # on CPUs, where chunks are skipped, so that these are a good part of the whole


KLDirection = Literal[
    "forward", "reverse"
]  # summed over the vocabulary: KL(reference || policy), KL(policy || reference)


class Scores(NamedTuple):
    """A model's scores of given tokens, in nats. Scores that were not requested are 0."""

    logprobs: Float[Array, "B T"]
    entropies: Float[Array, "B T"]
    divergences: Float[Array, "B T"]  # KL with a reference, summed over the vocabulary
    routing: Routing | None = None  # statistics of the model's routers; None without experts


def target_scores(
    model: Decoder,
    tokens: Int[Array, "B T"],
    targets: Int[Array, "B T"],
    positions: Int[Array, "B T"] | Int[Array, "B T 3"],
    segment_ids: Int[Array, "B T"],
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    reference: Decoder | None = None,
    direction: KLDirection = "forward",
    remat: Remat = "none",
    attention: Attention | None = None,
    scored: Bool[Array, "B T"] | None = None,
    images: VisionInputs | None = None,
    image_index: Int[Array, "B T"] | None = None,
    segment_ends: Int[Array, "B T"] | None = None,
    routes: Int[Array, "B T L C"] | None = None,
) -> Scores:
    """log p(targets[t] | tokens[<= t]) at a temperature, the distribution's entropy, and its divergence from a reference's.

    A chunk is a range of time steps of all rows, so that every device works on its own rows in each chunk. If there are
    several, each row begins with the steps to score, and chunks without any are skipped, unless `fsdp` splits the weights.
    The vocabulary is split over `tensor`. Ids without a token have no part in any of it (`Decoder.policy_logits`). `attention`
    chooses the implementation of attention, and has the mesh.

    Args:
      positions: [B, T], or [B, T, 3] for vision-language models.
      entropy: whether entropies are computed.
      reference: a model q with the same vocabulary; it gets no gradient. Default: no divergences.
      scored: the targets to score, such as those that the policy wrote; scores of others are 0. Default: all.
      direction: "forward", sum_v q(v) log(q(v) / p(v)); "reverse", sum_v p(v) log(p(v) / q(v)); both at the temperature.
      images: the images of every shard of rows, [S, P, ...].
      image_index: for each token, the index of its feature among its shard's images; -1: none.
      segment_ends: segment ends, if sequences share their beginnings (learning/batch.py).
      routes: the experts of each token, of the model and the reference alike; default: each router chooses.
    """

    def hidden(model: Decoder) -> DecoderOutput:
        features = None
        if images is not None and image_index is not None:
            assert isinstance(model, VisionLanguageModel)
            features = Features(values=model.features(images, remat=remat, attention=attention), index=image_index)
        rotary = positions if positions.ndim == 2 else jnp.moveaxis(positions, -1, 0)
        return model.forward(
            tokens,
            rotary,
            segment_ids,
            segment_ends=segment_ends,
            remat=remat,
            attention=attention,
            features=features,
            replayed=routes,
        )

    batch, length = tokens.shape
    mesh = attention.mesh if attention else None
    per_token = model.config.vocab_size * 4 * (2 if reference else 1) / (mesh.shape["tensor"] if mesh else 1)
    rows = -(-batch // (batch_shards(mesh) if mesh else 1))
    gpu = mesh is not None and on_gpu(mesh)
    most = _CHUNK_BYTES_OF_GPUS if gpu else _CHUNK_BYTES
    chunks = -(-length // max(1, int(most / (rows * per_token))))
    # An output matrix that `fsdp` splits would be gathered in every chunk.
    skips = chunks > 1 and (mesh is None or mesh.shape["fsdp"] == 1)
    if skips and scored is not None and not gpu:
        chunks = min(max(chunks, _LEAST_CHUNKS), length)
    size = -(-length // chunks)

    def cut(x: Array) -> Array:
        """[B, T, ...] -> [chunks, B, size, ...]."""
        x = jnp.pad(x, ((0, 0), (0, chunks * size - length), *((0, 0),) * (x.ndim - 2)))
        return jnp.moveaxis(x.reshape(batch, chunks, size, *x.shape[2:]), 1, 0)

    def score_chunk(chunk: tuple[Array, Array, Array | None]) -> Scores:
        logits = _split(model.policy_logits(chunk[0]) / temperature, mesh)
        log_total = jax.nn.logsumexp(logits, axis=-1)
        # A masked sum works on a sharded vocabulary; indexing would gather all of it.
        at = jnp.arange(logits.shape[-1]) == chunk[1][..., None]
        logprobs = jnp.where(at, logits, 0.0).sum(axis=-1) - log_total
        entropies = divergences = jnp.zeros_like(log_total)
        if entropy:
            entropies = log_total - (jax.nn.softmax(logits, axis=-1) * logits).sum(axis=-1)
        if reference is not None and chunk[2] is not None:
            theirs = jax.lax.stop_gradient(_split(reference.policy_logits(chunk[2]) / temperature, mesh))
            ours, theirs = logits - log_total[..., None], jax.nn.log_softmax(theirs, axis=-1)
            sign, weight = (1.0, theirs) if direction == "forward" else (-1.0, ours)
            divergences = sign * (jnp.exp(weight) * (theirs - ours)).sum(axis=-1)
        return Scores(logprobs, entropies, divergences)

    def score_if_any(chunk: tuple[Array, tuple[Array, Array, Array | None]]) -> Scores:
        nothing = jnp.zeros(chunk[0].shape, jnp.float32)
        return jax.lax.cond(chunk[0].any(), score_chunk, lambda _: Scores(nothing, nothing, nothing), chunk[1])

    of_reference = None if reference is None else jax.lax.stop_gradient(hidden(reference).hidden)
    ran = hidden(model)
    inputs = ran.hidden, targets, of_reference
    if chunks == 1:
        scores = score_chunk(inputs)
    elif scored is None or not skips:
        scores = _joined(jax.lax.map(jax.checkpoint(score_chunk), jax.tree.map(cut, inputs)), length)
    else:
        order = jnp.argsort(~scored, axis=1, stable=True)
        sorted_inputs = jax.tree.map(lambda x: _reorder(x, order), (scored, inputs))
        scores = _joined(jax.lax.map(jax.checkpoint(score_if_any), jax.tree.map(cut, sorted_inputs)), length)
        scores = jax.tree.map(lambda x: _reorder(x, jnp.argsort(order, axis=1)), scores)
    if scored is not None:
        scores = jax.tree.map(lambda x: jnp.where(scored, x, 0.0), scores)
    return scores._replace(routing=ran.routing)


def _joined(scores: Scores, length: int) -> Scores:
    """[chunks, B, size] -> [B, T], without the padding of the last chunk."""
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1)[:, :length], scores)


def _reorder(x: Array, order: Int[Array, "B T"]) -> Array:
    """x[b, order[b, t]], of [B, T, ...]."""
    return jnp.take_along_axis(x, order.reshape(*order.shape, *(1,) * (x.ndim - 2)), axis=1)


def _split(logits: Float[Array, "B t V"], mesh: Mesh | None) -> Float[Array, "B t V"]:
    """Constrains the sharding: rows stay on their devices and the vocabulary stays split, if the sizes divide."""
    if mesh is None:
        return logits
    batch, _, vocabulary = logits.shape
    rows = BATCH_AXES if batch % batch_shards(mesh) == 0 else None
    words = "tensor" if vocabulary % mesh.shape["tensor"] == 0 else None
    return jax.lax.with_sharding_constraint(logits, NamedSharding(mesh, PartitionSpec(rows, None, words)))
