"""Rotary position embeddings (arXiv 2104.09864) and their scalings, on one axis of positions or on three (M-RoPE)."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int

from routerl_jax.models.config import DecoderConfig, RopeScaling


def rope_frequencies(config: DecoderConfig) -> Float32[np.ndarray, " half"]:
    """Inverse frequencies of the rotary embedding, [head_dim / 2], with the config's scaling applied."""
    frequencies = inverse_frequencies(config.head_dim, config.rope_theta)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / np.float32(scaling.factor)
    if scaling.kind == "yarn":
        return _yarn(frequencies, scaling, config)
    return _llama3(frequencies, scaling)


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
    positions = jnp.asarray(positions)
    frequencies = rope_frequencies(config)
    if positions.ndim == 3:
        axis = _axes(config)
        angles = jnp.moveaxis(positions[axis], 0, -1).astype(jnp.float32) * frequencies
    else:
        angles = positions[..., None].astype(jnp.float32) * frequencies
    factor = config.rope_scaling.attention_factor if config.rope_scaling else 1.0
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


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


def _llama3(frequencies: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, the band between interpolated."""
    ratio = scaling.original_max_length * frequencies / np.float32(2 * math.pi)
    smooth = (ratio - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth = np.clip(smooth, 0, 1)
    return ((1 - smooth) * frequencies / scaling.factor + smooth * frequencies).astype(np.float32)


def _yarn(frequencies: np.ndarray, scaling: RopeScaling, config: DecoderConfig) -> np.ndarray:
    """YaRN (arXiv 2309.00071, section 3.2): by the number of turns that a frequency makes within the original context."""

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
