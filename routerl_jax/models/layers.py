"""Small pieces that several architectures share: parameters with logical axes, norms, rotary embeddings."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from routerl_jax.models.config import DecoderConfig

Axes = tuple[str | None, ...]


class Initializer:
    """Hands out parameters: shape, logical axes and initial distribution are stated once, where the layer is defined."""

    def __init__(self, key: jax.Array, scale: float, dtype: jnp.dtype) -> None:
        self._key = key
        self._count = 0
        self.scale = scale
        self.dtype = dtype

    def normal(self, shape: Sequence[int], axes: Axes) -> nnx.Param:
        """Gaussian with standard deviation `scale`."""
        self._count += 1
        key = jax.random.fold_in(self._key, self._count)
        value = jax.random.normal(key, tuple(shape), jnp.float32) * self.scale
        return nnx.Param(value.astype(self.dtype), axes=axes)

    def ones(self, shape: Sequence[int], axes: Axes) -> nnx.Param:
        """All ones (norm scales)."""
        return nnx.Param(jnp.ones(tuple(shape), self.dtype), axes=axes)

    def zeros(self, shape: Sequence[int], axes: Axes) -> nnx.Param:
        """All zeros (biases)."""
        return nnx.Param(jnp.zeros(tuple(shape), self.dtype), axes=axes)


def matmul_precision(dtype: jnp.dtype) -> contextlib.AbstractContextManager:
    """Makes float32 products of matrices traced inside it (and their gradients) float32 on accelerators too.

    By default JAX multiplies float32 matrices in bfloat16 on TPUs and in TF32 on GPUs.
    """
    return jax.default_matmul_precision("highest") if dtype == jnp.float32 else contextlib.nullcontext()


def rms_norm(x: Float[Array, "*B D"], scale: Float[Array, " D"], eps: float) -> Float[Array, "*B D"]:
    """Root-mean-square norm, statistics in float32 (arXiv 1910.07467)."""
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return scale.astype(x.dtype) * x32.astype(x.dtype)


def layer_norm(
    x: Float[Array, "*B D"], scale: Float[Array, " D"], bias: Float[Array, " D"], eps: float
) -> Float[Array, "*B D"]:
    """Layer norm in float32, rounded to x's dtype once, as torch does."""
    x32 = x.astype(jnp.float32)
    mean = jnp.mean(x32, axis=-1, keepdims=True)
    variance = jnp.mean((x32 - mean) ** 2, axis=-1, keepdims=True)
    normed = (x32 - mean) * jax.lax.rsqrt(variance + eps)
    return (normed * scale.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)


def rope_frequencies(config: DecoderConfig) -> Float[Array, " half"]:
    """Inverse frequencies of the rotary embedding, [head_dim / 2], with the config's scaling applied."""
    exponents = jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    # Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, the band between interpolated.
    wavelengths = 2 * math.pi / frequencies
    ratio = scaling.original_max_length / wavelengths
    smooth = (ratio - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blended = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    result = jnp.where(ratio < scaling.low_freq_factor, frequencies / scaling.factor, blended)
    return jnp.where(ratio > scaling.high_freq_factor, frequencies, result)


def rope_angles(
    positions: Int[Array, "*B T"], config: DecoderConfig
) -> tuple[Float[Array, "*B T half"], Float[Array, "*B T half"]]:
    """Cosines and sines of the rotation at each position, float32."""
    angles = positions[..., None].astype(jnp.float32) * rope_frequencies(config)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: Float[Array, "*B T N H"], rope: tuple[Array, Array]) -> Float[Array, "*B T N H"]:
    """Applies rotary embeddings in the half-split convention of Hugging Face's Llama and Qwen."""
    cos, sin = (part[..., None, :].astype(x.dtype) for part in rope)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
