"""Log-probabilities of given tokens without ever holding a [batch, time, vocabulary] array in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from routerl_jax.models.attention import Attention
from routerl_jax.models.decoder import Decoder, Features, Remat
from routerl_jax.models.patches import VisionInputs
from routerl_jax.models.vision_language import VisionLanguageModel

_CHUNK_BYTES = 64 * 2**20  # logits held at once (and recomputed in the backward pass when there are several chunks)


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
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """log p(targets[t] | tokens[<= t]) at a temperature, and the distribution's entropy (zeros unless asked for), in nats.

    Args:
      positions: [B, T], or [B, T, 3] for vision-language models.
      images: of every shard of rows, [S, P, ...].
      image_index: for each token, which feature of its shard's images it is; -1: none.
    """
    features = None
    if images is not None and image_index is not None:
        assert isinstance(model, VisionLanguageModel)
        features = Features(values=model.features(images, remat=remat, attention=attention), index=image_index)
    at = positions if positions.ndim == 2 else jnp.moveaxis(positions, -1, 0)
    hidden = model.hidden(tokens, at, segment_ids, remat=remat, attention=attention, features=features)
    count, vocabulary = tokens.size, model.config.vocab_size
    chunks = max(1, -(-count * vocabulary * 4 // _CHUNK_BYTES))
    size = -(-count // chunks)
    padding = size * chunks - count
    flat = jnp.pad(hidden.reshape(count, -1), ((0, padding), (0, 0))).reshape(chunks, size, -1)
    wanted = jnp.pad(targets.reshape(count), (0, padding)).reshape(chunks, size)

    def one(chunk: tuple[Array, Array]) -> tuple[Array, Array]:
        logits = model.unembed(chunk[0]) / temperature
        log_total = jax.nn.logsumexp(logits, axis=-1)
        chosen = jnp.take_along_axis(logits, chunk[1][:, None], axis=-1)[:, 0]
        if not entropy:
            return chosen - log_total, jnp.zeros_like(log_total)
        mean_logit = (jax.nn.softmax(logits, axis=-1) * logits).sum(axis=-1)
        return chosen - log_total, log_total - mean_logit

    if chunks == 1:
        logprobs, entropies = one((flat[0], wanted[0]))
    else:
        logprobs, entropies = jax.lax.map(jax.checkpoint(one), (flat, wanted))
    return logprobs.reshape(-1)[:count].reshape(tokens.shape), entropies.reshape(-1)[:count].reshape(tokens.shape)
