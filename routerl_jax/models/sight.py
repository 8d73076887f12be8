"""Adds a vision tower to a text-only decoder, to start a small vision-language policy from a trained language model."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from routerl_jax.core.config import unknown_key
from routerl_jax.core.tokenizer import Tokenizer
from routerl_jax.models.config import DecoderConfig, VisionConfig, VisionLanguageConfig
from routerl_jax.models.decoder import Decoder
from routerl_jax.models.vision_language import VisionLanguageModel
from routerl_jax.parallel.sharding import create_sharded

MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")  # Qwen2.5-VL's
_PIXELS = "max_pixels"


def add_sight(
    decoder: Decoder, tower: Mapping[str, Any], key: jax.Array, mesh: Mesh, layout: str = "replicated"
) -> VisionLanguageModel:
    """A Qwen2.5-VL model with the decoder's weights and a random vision tower. On text it computes the same as the decoder.

    The vocabulary grows by the four marks of pictures; biases of attention are zero.

    Args:
      tower: fields of `VisionConfig`, without `model_type` and `out`, and `max_pixels` of a picture (`ImageProcessor`).

    Raises:
      ValueError: an unknown field, a decoder without tokenizer, or one whose text part no Qwen2.5-VL has.
    """
    if decoder.tokenizer is None:
        raise ValueError("a policy without tokenizer has no marks for pictures; give config.model.path")
    fields = {field.name for field in dataclasses.fields(VisionConfig)} - {"model_type", "out"}
    for name in tower:
        if name not in (*fields, _PIXELS):
            raise ValueError(unknown_key("config.model.sight", name, [*fields, _PIXELS]))
    tokenizer = _with_marks(decoder.tokenizer)
    ids = {mark: tokenizer.encode(mark)[0] for mark in MARKS}
    start, end, image, video = (ids[mark] for mark in MARKS)
    settings: dict[str, Any] = {name: value for name, value in tower.items() if name != _PIXELS}
    if "full_layers" in settings:
        settings["full_layers"] = tuple(settings["full_layers"])  # a configuration from JSON has a list
    text = _text_config(decoder.config, max(len(tokenizer), decoder.config.vocab_size))
    config = VisionLanguageConfig(
        model_type="qwen2_5_vl",
        text=text,
        vision=VisionConfig(model_type="qwen2_5_vl", out=text.embed, **settings),
        image_id=image,
        video_id=video,
        vision_start_id=start,
        vision_end_id=end,
    )
    dtype = decoder.embedding[...].dtype
    model = create_sharded(
        lambda: VisionLanguageModel(config, key, param_dtype=dtype, compute_dtype=decoder.compute_dtype), mesh, layout
    )
    _copy_weights(model, decoder)
    model.tokenizer = tokenizer
    if _PIXELS in tower:
        least = min(model.image_processor.min_pixels, tower[_PIXELS])
        model.image_processor = dataclasses.replace(model.image_processor, min_pixels=least, max_pixels=tower[_PIXELS])
    return model


def _with_marks(tokenizer: Tokenizer) -> Tokenizer:
    """A copy that reads the marks as one id each."""
    from transformers import AddedToken

    hf = copy.deepcopy(tokenizer.hf)
    hf.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS], special_tokens=True)
    return Tokenizer(hf)


def _text_config(config: DecoderConfig, vocabulary: int) -> DecoderConfig:
    """The decoder's architecture as Qwen2.5-VL's text part: positions on three axes, biases in attention."""
    if config.model_type not in ("llama", "qwen2") or config.output_bias or config.window is not None:
        raise ValueError(
            f"config.model.sight: a {config.model_type} with these settings is no text part of a Qwen2.5-VL; a plain llama "
            "or qwen2 is"
        )
    half = config.head_dim // 2
    row = 3 * half // 8  # Qwen2.5-VL's 16, 24 and 24 of 64
    return dataclasses.replace(
        config,
        model_type="qwen2",
        qkv_bias=True,
        vocab_size=vocabulary,
        mrope_sections=(half - 2 * row, row, row),
    )


def _copy_weights(model: VisionLanguageModel, decoder: Decoder) -> None:
    """Copies the decoder's weights into the model. Weights that it lacks are zero in attention and small in the vocabulary."""
    theirs = dict(nnx.to_flat_state(nnx.state(decoder, nnx.Param)))
    copied = []
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        if path[0] == "visual":
            continue
        ours = variable.get_value()
        weights = theirs[path].get_value() if path in theirs else jnp.zeros_like(ours)
        if weights.shape != ours.shape:  # embedding and head: the marks are new
            missing = [(0, new - old) for new, old in zip(ours.shape, weights.shape)]
            new = jnp.pad(jnp.zeros(weights.shape, bool), missing, constant_values=True)
            weights = jnp.where(new, ours, jnp.pad(weights, missing))
        copied.append((path, variable.replace(jax.device_put(weights.astype(ours.dtype), ours.sharding))))
    nnx.update(model, nnx.from_flat_state(copied))
