"""Log-probabilities of given tokens without ever holding a [batch, time, vocabulary] array in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from routerl_jax.models.attention import Attention
from routerl_jax.models.decoder import Decoder, Features, Remat
from routerl_jax.models.patches import VisionInputs
from routerl_jax.models.vision_language import VisionLanguageModel
from routerl_jax.parallel.mesh import BATCH_AXES, batch_shards

# Logits that a device holds at once; they are recomputed in the backward pass when there are several chunks.
_CHUNK_BYTES = 256 * 2**20


def target_logprobs(
    model: Decoder,
    tokens: Int[Array, "B T"],
    targets: Int[Array, "B T"],
    positions: Int[Array, "B T"] | Int[Array, "B T 3"],
    segment_ids: Int[Array, "B T"],
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    remat: Remat = "none",
    attention: Attention | None = None,
    images: VisionInputs | None = None,
    image_index: Int[Array, "B T"] | None = None,
    segment_ends: Int[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """log p(targets[t] | tokens[<= t]) at a temperature, and the distribution's entropy (zeros unless asked for), in nats.

    Chunks are stretches of time of all rows, so that every device works on its own rows in each of them; the vocabulary
    is split over `tensor`. `attention` says what computes attention, and names the mesh.

    Args:
      positions: [B, T], or [B, T, 3] for vision-language models.
      images: of every shard of rows, [S, P, ...].
      image_index: for each token, which feature of its shard's images it is; -1: none.
      segment_ends: of sequences that share their beginnings (learning/prefixes.py).
    """
    features = None
    if images is not None and image_index is not None:
        assert isinstance(model, VisionLanguageModel)
        features = Features(values=model.features(images, remat=remat, attention=attention), index=image_index)
    rotary = positions if positions.ndim == 2 else jnp.moveaxis(positions, -1, 0)
    hidden = model.hidden(
        tokens,
        rotary,
        segment_ids,
        segment_ends=segment_ends,
        remat=remat,
        attention=attention,
        features=features,
    )
    batch, length = tokens.shape
    mesh = attention.mesh if attention else None
    per_token = model.config.vocab_size * 4 / (mesh.shape["tensor"] if mesh else 1)
    rows = -(-batch // (batch_shards(mesh) if mesh else 1))
    chunks = -(-length // max(1, int(_CHUNK_BYTES / (rows * per_token))))
    size = -(-length // chunks)

    def cut(x: Array) -> Array:
        """[B, T, ...] -> [chunks, B, size, ...]."""
        x = jnp.pad(x, ((0, 0), (0, chunks * size - length), *((0, 0),) * (x.ndim - 2)))
        return jnp.moveaxis(x.reshape(batch, chunks, size, *x.shape[2:]), 1, 0)

    def one(chunk: tuple[Array, Array]) -> tuple[Array, Array]:
        logits = _split(model.unembed(chunk[0]) / temperature, mesh)
        log_total = jax.nn.logsumexp(logits, axis=-1)
        # A masked sum, which works on a split vocabulary as it lies; indexing would gather all of it.
        at = jnp.arange(logits.shape[-1]) == chunk[1][..., None]
        chosen = jnp.where(at, logits, 0.0).sum(axis=-1)
        if not entropy:
            return chosen - log_total, jnp.zeros_like(log_total)
        mean_logit = (jax.nn.softmax(logits, axis=-1) * logits).sum(axis=-1)
        return chosen - log_total, log_total - mean_logit

    if chunks == 1:
        return one((hidden, targets))
    logprobs, entropies = jax.lax.map(jax.checkpoint(one), (cut(hidden), cut(targets)))
    return tuple(jnp.moveaxis(x, 0, 1).reshape(batch, -1)[:, :length] for x in (logprobs, entropies))  # type: ignore


def _split(logits: Float[Array, "B t V"], mesh: Mesh | None) -> Float[Array, "B t V"]:
    """Keeps rows on their devices and the vocabulary split, where these divide."""
    if mesh is None:
        return logits
    batch, _, vocabulary = logits.shape
    rows = BATCH_AXES if batch % batch_shards(mesh) == 0 else None
    words = "tensor" if vocabulary % mesh.shape["tensor"] == 0 else None
    return jax.lax.with_sharding_constraint(logits, NamedSharding(mesh, PartitionSpec(rows, None, words)))
