"""Aligns the vision tower with the decoder: trains the tower alone, so that a sign's feature points in the direction of its
token's embedding."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging
from flax import nnx
from flax.serialization import msgpack_restore, msgpack_serialize
from jaxtyping import Array, Bool, Float, Int

from routerl_jax.core.files import write_atomic
from routerl_jax.core.progress import Bar
from routerl_jax.core.registry import Registry
from routerl_jax.data.atlas.sight import FIGURES, sheet_of_figures
from routerl_jax.learning.learner import optimizer_shardings
from routerl_jax.learning.optimizer import OptimizerConfig
from routerl_jax.models.decoder import Decoder
from routerl_jax.models.patches import VisionInputs, concatenate
from routerl_jax.models.vision_language import VisionLanguageModel
from routerl_jax.parallel import multihost

ALIGNED = "aligned.msgpack"  # in a run's directory: the tower that it aligned
_SHEETS = 16  # sheets per update: 256 signs on sheets of 16
_SHARPNESS = 12.0  # logits are this times the cosine
_OPTIMIZER = OptimizerConfig(lr=1e-3, schedule="cosine", warmup=20, decay_to=0.05, weight_decay=0.0, b2=0.99)


class Sheets(NamedTuple):
    """Pictures to align a tower on.

    Attributes:
      signs: all signs that are told apart.
      draw: draws a picture, and gives the signs on each of its image tokens; "" for a token that is not trained on. The feature
        of a token with several signs turns to all of them. All pictures have equally many image tokens.
    """

    signs: str
    draw: Callable[[np.random.Generator], tuple[Any, Sequence[str]]]


SHEETS_OF_FIGURES = Sheets(FIGURES, sheet_of_figures)
_SHEETS_NAMED: Registry[Sheets] = Registry("kind of sheets")


def sheets_named(name: str) -> Sheets:
    """The sheets of a dotted path `package.module:name`; "": sheets of figures. Raises ValueError if there are none."""
    return _SHEETS_NAMED.get(name) if name else SHEETS_OF_FIGURES


def align(model: Decoder, updates: int, seed: int, sheets: Sheets, workdir: pathlib.Path, resume: bool) -> bool:
    """Aligns the tower of a run's policy (config.warm_start.align), or reads the one that an earlier session has kept.

    Returns:
      Whether it was aligned now, and is to be kept (`keep_tower`).
    """
    if not updates:
        return False
    if multihost.exchange(resume and (workdir / ALIGNED).is_file())[0]:
        read_tower(model, workdir / ALIGNED)
        return False
    align_tower(model, updates, seed, sheets)
    return True


def keep_tower(model: Decoder, path: pathlib.Path) -> None:
    """Writes an aligned tower for later sessions of a run: a checkpoint lacks it where it is frozen, and another machine would
    round another one. A collective call."""
    assert isinstance(model, VisionLanguageModel)
    tower = multihost.to_host(nnx.state(model.visual, nnx.Param))
    weights = {jax.tree_util.keystr(at): value for at, value in jax.tree.leaves_with_path(tower)}
    multihost.on_main(lambda: write_atomic(path, msgpack_serialize(weights), sync=True))


def read_tower(model: Decoder, path: pathlib.Path) -> None:
    """Gives a model the tower that `keep_tower` wrote.

    Raises:
      ValueError: the file is damaged.
    """
    assert isinstance(model, VisionLanguageModel)
    try:
        weights = msgpack_restore(path.read_bytes())
        tower = jax.tree.map_with_path(
            lambda at, like: _placed(weights[jax.tree_util.keystr(at)], like), nnx.state(model.visual, nnx.Param)
        )
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is damaged ({error}); delete it, and the tower is aligned again") from error
    nnx.update(model.visual, tower)


def _placed(value: np.ndarray, like: Array) -> Array:
    if (value.shape, value.dtype) != (like.shape, like.dtype):
        raise ValueError(f"a weight of {value.shape} {value.dtype} for one of {like.shape} {like.dtype}")
    return jax.make_array_from_callback(like.shape, like.sharding, lambda index: value[index])


def align_tower(model: Decoder, updates: int, seed: int, sheets: Sheets = SHEETS_OF_FIGURES) -> float:
    """Trains the tower of a policy in place, on sheets of signs. Every device computes the whole update.

    Returns:
      The share of the last update's tokens whose feature is nearer to the embeddings of their own signs than to any other.

    Raises:
      ValueError: the model sees no images, a sign takes more than one of its tokens, or it sees the pictures at another size.
    """
    if not isinstance(model, VisionLanguageModel):
        raise ValueError("config.warm_start.align is for a policy that sees: give config.model.sight, or another path")
    targets = sign_embeddings(model, sheets.signs)
    graph, params, rest = nnx.split(model.visual, nnx.Param, ...)
    optimizer = _OPTIMIZER.build(updates)

    @jax.jit
    def update(
        params: Any, state: optax.OptState, inputs: VisionInputs, slots: Array, labels: Array
    ) -> tuple[Any, optax.OptState, Array]:
        labelled = labels.any(-1)
        target_probs = labels / jnp.maximum(labels.sum(-1, keepdims=True), 1)

        def loss(params: Any) -> tuple[Array, Array]:
            features = nnx.merge(graph, params, rest)(inputs)[0][slots]
            logits = _SHARPNESS * cosines(features, targets)
            correct = jnp.where(labels, logits, jnp.inf).min(-1) > jnp.where(labels, -jnp.inf, logits).max(-1)
            return optax.softmax_cross_entropy(logits, target_probs).mean(where=labelled), correct.mean(where=labelled)

        gradient, right = jax.grad(loss, has_aux=True)(params)
        step, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, step), state, right

    mesh = model.visual.patch[...].sharding.mesh
    # placed like the parameters from the start; otherwise the second update would be compiled again
    begin = jax.jit(optimizer.init, out_shardings=optimizer_shardings(optimizer, params, mesh))
    state, right = begin(params), jnp.zeros(())
    for number in Bar(range(updates), desc="aligning the tower", unit="step", disable=not multihost.is_main()):
        params, state, right = update(params, state, *drawn_sheets(model, sheets, [10, seed, number]))
    nnx.update(model.visual, params)
    logging.info("after %d updates the tower tells the signs of %.2f of the tokens", updates, float(right))
    return float(right)


def sign_embeddings(model: VisionLanguageModel, signs: str) -> Float[Array, "C D"]:
    """The embeddings of signs."""
    assert model.tokenizer is not None
    ids = [model.tokenizer.encode(sign) for sign in signs]
    if not all(len(tokens) == 1 for tokens in ids):
        raise ValueError(f"config.warm_start.align: the policy's tokenizer has no token for each of {signs!r}")
    return model.embedding[...][jnp.asarray(np.ravel(ids))]


def cosines(features: Float[Array, "N D"], targets: Float[Array, "C D"]) -> Float[Array, "N C"]:
    """Cosine of the angle between every feature and every target."""
    unit = [x / (jnp.linalg.norm(x, axis=-1, keepdims=True) + 1e-6) for x in (features, targets)]
    return unit[0] @ unit[1].T


def drawn_sheets(
    model: VisionLanguageModel, sheets: Sheets, seed: list[int]
) -> tuple[VisionInputs, Int[Array, " N"], Bool[Array, "N C"]]:
    """The tower's inputs for some sheets, the index of each image token's feature, and which signs are on it."""
    rng = np.random.default_rng(seed)
    drawn = [sheets.draw(rng) for _ in range(_SHEETS)]
    images = [model.image_processor(picture) for picture, _ in drawn]
    inputs = concatenate(images)
    labels = np.array([[sign in on for sign in sheets.signs] for _, signs in drawn for on in signs])
    slots = jnp.asarray(inputs.slots[inputs.slots >= 0])
    if len(labels) != len(slots):
        raise ValueError(
            f"config.warm_start.sheets: pictures seen in {len(slots)} image tokens have signs for {len(labels)}; "
            "set config.model.max_pixels to the size at which they are meant to be seen"
        )
    return jax.tree.map(lambda x: jnp.asarray(x)[None], inputs), slots, jnp.asarray(labels)
