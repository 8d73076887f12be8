"""Aligns the vision tower with the decoder: trains the tower alone, so that a figure's feature points in the direction of its
token's embedding."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging
from flax import nnx
from jaxtyping import Array, Float, Int

from routerl_jax.core.progress import Bar
from routerl_jax.data.atlas.sight import FIGURES, sheet_of_figures
from routerl_jax.learning.optimizer import OptimizerConfig
from routerl_jax.learning.programs import optimizer_shardings
from routerl_jax.models.decoder import Decoder
from routerl_jax.models.patches import VisionInputs, concatenate
from routerl_jax.models.vision_language import VisionLanguageModel
from routerl_jax.parallel import multihost

_SHEETS = 16  # sheets per update: 256 figures
_SHARPNESS = 12.0  # logits are this times the cosine
_OPTIMIZER = OptimizerConfig(lr=1e-3, schedule="cosine", warmup=20, decay_to=0.05, weight_decay=0.0, b2=0.99)


def align_tower(model: Decoder, updates: int, seed: int) -> float:
    """Trains the tower of a policy in place, on sheets of figures. Every device computes the whole update.

    Returns:
      The share of the last update's figures whose feature is nearest to their own embedding.

    Raises:
      ValueError: the model sees no images, or a figure takes more than one of its tokens.
    """
    if not isinstance(model, VisionLanguageModel):
        raise ValueError("config.warm_start.align is for a policy that sees: give config.model.sight, or another path")
    targets = figure_embeddings(model)
    graph, params, rest = nnx.split(model.visual, nnx.Param, ...)
    optimizer = _OPTIMIZER.build(updates)

    @jax.jit
    def update(
        params: Any, state: optax.OptState, inputs: VisionInputs, slots: Array, labels: Array
    ) -> tuple[Any, optax.OptState, Array]:
        def loss(params: Any) -> tuple[Array, Array]:
            features = nnx.merge(graph, params, rest)(inputs)[0][slots]
            logits = _SHARPNESS * cosines(features, targets)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return losses.mean(), (logits.argmax(-1) == labels).mean()

        gradient, right = jax.grad(loss, has_aux=True)(params)
        step, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, step), state, right

    mesh = model.visual.patch[...].sharding.mesh
    # placed like the parameters from the start; otherwise the second update would be compiled again
    begin = jax.jit(optimizer.init, out_shardings=optimizer_shardings(optimizer, params, mesh))
    state, right = begin(params), jnp.zeros(())
    for number in Bar(range(updates), desc="aligning the tower", unit="step", disable=not multihost.is_main()):
        params, state, right = update(params, state, *sheets(model, [10, seed, number]))
    nnx.update(model.visual, params)
    logging.info("after %d updates the tower tells %.2f of the figures", updates, float(right))
    return float(right)


def figure_embeddings(model: VisionLanguageModel) -> Float[Array, "10 D"]:
    """The embeddings of the ten figures."""
    assert model.tokenizer is not None
    ids = [model.tokenizer.encode(figure) for figure in FIGURES]
    if not all(len(tokens) == 1 for tokens in ids):
        raise ValueError("config.warm_start.align: the policy's tokenizer has no token for each figure")
    return model.embedding[...][jnp.asarray(np.ravel(ids))]


def cosines(features: Float[Array, "N D"], targets: Float[Array, "C D"]) -> Float[Array, "N C"]:
    """Cosine of the angle between every feature and every target."""
    unit = [x / (jnp.linalg.norm(x, axis=-1, keepdims=True) + 1e-6) for x in (features, targets)]
    return unit[0] @ unit[1].T


def sheets(model: VisionLanguageModel, seed: list[int]) -> tuple[VisionInputs, Int[Array, " N"], Int[Array, " N"]]:
    """The tower's inputs for some sheets of figures, the index of each figure's feature, and which figure it is."""
    rng = np.random.default_rng(seed)
    drawn = [sheet_of_figures(rng) for _ in range(_SHEETS)]
    images = [model.image_processor(picture) for picture, _ in drawn]
    inputs = concatenate(images, [sum(len(image.patches) for image in images)])
    labels = [int(figure) for _, figures in drawn for figure in figures]
    slots = jnp.asarray(inputs.slots[inputs.slots >= 0])
    return jax.tree.map(lambda x: jnp.asarray(x)[None], inputs), slots, jnp.asarray(labels)
