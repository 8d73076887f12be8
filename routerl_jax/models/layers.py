"""Pieces that several architectures share: parameters with logical axes, norms, logits, rotary position embeddings."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jaxtyping import Array, Float, Float32, Int

from routerl_jax.models.config import DecoderConfig, RopeScaling

Axes = tuple[str | None, ...]

# Entries. A larger stack is drawn layer by layer, because random bits and float32 values need several times its memory.
_AT_ONCE = 2**27


class Initializer:
    """Creates parameters. A layer's definition states their shape, logical axes and initial distribution once."""

    def __init__(self, key: jax.Array, scale: float, dtype: jnp.dtype) -> None:
        self._key = key
        self._count = 0
        self.scale = scale
        self.dtype = dtype

    def normal(self, shape: Sequence[int], axes: Axes) -> nnx.Param:
        """Gaussian with standard deviation `scale`."""
        self._count += 1
        key = jax.random.fold_in(self._key, self._count)

        def draw(key: jax.Array, shape: Sequence[int]) -> Array:
            return (jax.random.normal(key, tuple(shape), jnp.float32) * self.scale).astype(self.dtype)

        if axes[:1] == ("layers",) and math.prod(shape) > _AT_ONCE:
            value = jax.lax.map(lambda key: draw(key, shape[1:]), jax.random.split(key, shape[0]))
        else:
            value = draw(key, shape)
        return nnx.Param(value, axes=axes)

    def ones(self, shape: Sequence[int], axes: Axes) -> nnx.Param:
        """All ones (norm scales)."""
        return nnx.Param(jnp.ones(tuple(shape), self.dtype), axes=axes)

    def zeros(self, shape: Sequence[int], axes: Axes) -> nnx.Param:
        """All zeros (biases)."""
        return nnx.Param(jnp.zeros(tuple(shape), self.dtype), axes=axes)


def check_ids(tokens: Any, rows: int, where: str = "tokens") -> None:
    """Raises ValueError for ids without a row in the embedding. JAX would take the last row; traced ids can't be checked."""
    if isinstance(tokens, Tracer) or not getattr(tokens, "is_fully_addressable", True):
        return
    ids = np.asarray(tokens)
    if ids.size and not 0 <= ids.min() <= ids.max() < rows:
        wrong = int(ids.max() if ids.max() >= rows else ids.min())
        raise ValueError(f"{where}: id {wrong} has no row in the embedding, whose ids are 0 to {rows - 1}")


def matmul_precision(dtype: jnp.dtype) -> contextlib.AbstractContextManager:
    """Makes float32 products of matrices traced inside it (and their gradients) float32 on accelerators too.

    By default JAX multiplies float32 matrices in bfloat16 on TPUs and in TF32 on GPUs.
    """
    return jax.default_matmul_precision("highest") if dtype == jnp.float32 else contextlib.nullcontext()


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def logits_of(x: Float[Array, "T D"], weight: Float[Array, "..."], tied: bool) -> Float[Array, "T V"]:
    """Float32 logits: `x` times the output matrix, which is cast to the type of `x`.

    The gradient of the logits is rounded to that type too, so that the products of the backward pass are as fast as that of the
    forward pass. (By JAX's own rule they are float32 products.) The gradient of the matrix adds up in float32.

    Args:
      weight: [V, D] if `tied` (the embedding), else [D, V].
    """
    spec = "TD,VD->TV" if tied else "TD,DV->TV"
    with matmul_precision(x.dtype):
        return jnp.einsum(spec, x, weight.astype(x.dtype), preferred_element_type=jnp.float32)


def _logits_forward(x: Array, weight: Array, tied: bool) -> tuple[Array, tuple[Array, Array]]:
    return logits_of(x, weight, tied), (x, weight)


def _logits_backward(tied: bool, residuals: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    x, weight = residuals
    gradient = gradient.astype(x.dtype)
    of_x, of_weight = ("TV,VD->TD", "TV,TD->VD") if tied else ("TV,DV->TD", "TV,TD->DV")
    with matmul_precision(x.dtype):
        return (
            jnp.einsum(of_x, gradient, weight.astype(x.dtype)),
            jnp.einsum(of_weight, gradient, x, preferred_element_type=jnp.float32).astype(weight.dtype),
        )


logits_of.defvjp(_logits_forward, _logits_backward)


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


# --- rotary position embeddings (arXiv 2104.09864), on one axis of positions or on three (M-RoPE) ---


def inverse_frequencies(width: int, theta: float) -> Float32[np.ndarray, " half"]:
    """theta ** (-2i / width) in float32, every step rounded as torch rounds it.

    Its powers are the float64 ones rounded (numpy's float32 powers are not): one bit turns position 32,000 by a thousandth.
    """
    exponents = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
    return np.float32(1) / (theta ** exponents.astype(np.float64)).astype(np.float32)


def rope_angles(
    positions: Int[Array, "*B T"], config: DecoderConfig
) -> tuple[Float[Array, "B T half"], Float[Array, "B T half"]]:
    """Cosines and sines of the rotation at each position, float32.

    Args:
      positions: [B, T], or [3, B, T] (time, height, width) where the config has `mrope_sections`, the
        number of frequencies of each axis (Qwen2-VL, arXiv 2409.12191, section 2.1).
      config: of the decoder.
    """
    positions, scaling = jnp.asarray(positions), config.rope_scaling
    frequencies = inverse_frequencies(config.head_dim, config.rope_theta)
    if scaling is not None:
        frequencies = _scaled(frequencies, scaling, config)
    if positions.ndim == 3:
        axis = _axes(config)
        angles = jnp.moveaxis(positions[axis], 0, -1).astype(jnp.float32) * frequencies
    else:
        angles = positions[..., None].astype(jnp.float32) * frequencies
    factor = 1.0 if scaling is None else scaling.attention_factor
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def _scaled(frequencies: np.ndarray, scaling: RopeScaling, config: DecoderConfig) -> np.ndarray:
    """Inverse frequencies for longer contexts than those of the first training."""
    if scaling.kind == "linear":
        return frequencies / np.float32(scaling.factor)
    if scaling.kind == "llama3":  # Llama 3.1: stretches long wavelengths, keeps short ones, and interpolates between
        ratio = scaling.original_max_length * frequencies / np.float32(2 * math.pi)
        smooth = (ratio - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        smooth = np.clip(smooth, 0, 1)
        return ((1 - smooth) * frequencies / scaling.factor + smooth * frequencies).astype(np.float32)

    # YaRN (arXiv 2309.00071, section 3.2): by the number of turns that a frequency makes within the original context
    def dimension(turns: float) -> float:
        """Where, on the axis of frequencies, that many turns are made."""
        base = 2 * math.log(config.rope_theta)
        return config.head_dim * math.log(scaling.original_max_length / (turns * 2 * math.pi)) / base

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.head_dim - 1)
    ramp = (np.arange(len(frequencies)) - low) / max(high - low, 0.001)
    unscaled = 1 - np.clip(ramp, 0, 1)
    return (frequencies / scaling.factor * (1 - unscaled) + frequencies * unscaled).astype(np.float32)


def _axes(config: DecoderConfig) -> Int[np.ndarray, " half"]:
    """The axis of positions for each frequency: time, height or width.

    Axes have blocks of frequencies, or alternate (Qwen3-VL), so that every axis has high and low frequencies. Once height and
    width have their number of frequencies, the rest belongs to time.
    """
    if not config.mrope_interleaved:
        return np.repeat(np.arange(3), config.mrope_sections)
    axes = np.zeros(config.head_dim // 2, int)
    for axis in (1, 2):
        axes[axis : 3 * config.mrope_sections[axis] : 3] = axis
    return axes


def rotate(x: Float[Array, "*B T N H"], rope: tuple[Array, Array]) -> Float[Array, "*B T N H"]:
    """Applies rotary embeddings in the half-split convention of Hugging Face's Llama and Qwen."""
    cos, sin = (part[..., None, :].astype(x.dtype) for part in rope)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
