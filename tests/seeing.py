"""A small random vision-language policy for tests, and pictures for it."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tokenizers import AddedToken

from routerl_jax.core.tokenizer import Tokenizer
from routerl_jax.data.vocabulary import train_tokenizer
from routerl_jax.models.config import VisionConfig, VisionLanguageConfig
from routerl_jax.models.image_tokens import ImageTokens
from routerl_jax.models.images import ImageProcessor
from routerl_jax.models.vision_language import VisionLanguageModel
from routerl_jax.parallel.mesh import make_mesh
from routerl_jax.parallel.sharding import shardings
from tests import tiny

MARKS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
MARKER = "".join(MARKS)
PROCESSOR = ImageProcessor(patch_size=4, min_pixels=64, max_pixels=40 * 40, window=16)


@functools.cache
def tokenizer() -> Tokenizer:
    """As `tiny.tokenizer`, with the three ids that mark images."""
    made = train_tokenizer(["Question: what is on the flag?"] * 3, tiny.VOCABULARY - len(MARKS), (), context=256)
    marks = [AddedToken(mark, special=True, normalized=False) for mark in MARKS]
    made.hf.add_tokens(marks, special_tokens=True)
    return Tokenizer(made.hf)


def config(context: int = 256, kind: str = "qwen2_5_vl") -> VisionLanguageConfig:
    """Patches of 4 pixels, windows of 2 x 2 merge groups; `context` in tokens. Or of Qwen3-VL's build, without windows."""
    start, image, end = (tokenizer().encode(mark)[0] for mark in MARKS)
    if kind == "qwen3_vl":
        tower = {"norm": "layer", "gated": False, "table": 5, "deep_layers": (0, 1), "depth": 3}
        text = {"model_type": "qwen3", "qk_norm": True, "mrope_interleaved": True}
        base = config(context)
        return dataclasses.replace(
            base,
            model_type=kind,
            text=dataclasses.replace(base.text, qkv_bias=False, **text),
            vision=dataclasses.replace(base.vision, model_type=kind, window=None, full_layers=(), **tower),
        )
    return VisionLanguageConfig(
        model_type="qwen2_5_vl",
        text=tiny.config(model_type="qwen2", qkv_bias=True, mrope_sections=(2, 1, 1), max_length=context),
        vision=VisionConfig(
            model_type="qwen2_5_vl",
            depth=2,
            embed=16,
            heads=2,
            mlp=24,
            out=32,
            patch=4,
            window=16,
            full_layers=(1,),
            init_scale=0.3,
        ),
        image_id=image,
        video_id=image + 1,
        vision_start_id=start,
        vision_end_id=end,
    )


def model(
    devices: int = 1,
    dtype=jnp.float32,
    mesh=None,
    layout: str = "replicated",
    context: int = 256,
    kind: str = "qwen2_5_vl",
) -> VisionLanguageModel:
    """A random policy that sees."""
    made = VisionLanguageModel(config(context, kind), jax.random.key(0), param_dtype=dtype)
    mesh = mesh or make_mesh(devices=jax.devices()[:devices])
    params = nnx.state(made, nnx.Param)
    nnx.update(made, jax.tree.map(jax.device_put, params, shardings(params, mesh, layout)))
    made.tokenizer = tokenizer()
    made.image_processor = PROCESSOR if kind == "qwen2_5_vl" else dataclasses.replace(PROCESSOR, window=None)
    return made


def image_tokens(context: int = 256) -> ImageTokens:
    """The host's side of `model` alone, which takes no time to make."""
    return ImageTokens(config(context), PROCESSOR)


def picture(seed: int, high: int = 24, wide: int = 32) -> np.ndarray:
    """Random pixels, [high, wide, 3]."""
    return np.random.default_rng(seed).integers(0, 256, (high, wide, 3)).astype(np.uint8)
