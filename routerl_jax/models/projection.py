"""A block's weight matrices in all stored forms: floating point or quantised, with or without a low-rank adapter.

The block calls `project(self, "q", x, dtype)`. The parameters that exist determine the form of "q":

    q           [L, D, N, H]       the matrix; of a quantised one the codes (two 4-bit codes share a byte on the last axis)
    q_scale     [L, D/tile, N, H]  what the codes are multiplied by (quantised only)
    q_lora_a    [L, D, r]          adapter, input side
    q_lora_b    [L, r, N, H]       adapter, output side; its metadata hold alpha
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Shaped, UInt8

# The matrices of a block, and over how many axes of theirs (the first ones) their input runs.
MODULES = {"q": 1, "k": 1, "v": 1, "o": 2, "gate": 1, "up": 1, "down": 1}
QTYPES = ("int8", "int4", "nf4")


class Scales(nnx.Variable):
    """Scales of quantised weights. Not an `nnx.Param`: whatever casts weights (the engine's copy) leaves them as they are."""


def project(block: nnx.Module, name: str, x: Float[Array, "*B D"], dtype: jnp.dtype) -> Float[Array, "*B N"]:
    """`x` times matrix `name` of a block (one layer's parameters), plus alpha / rank * x A B if it has an adapter.

    Args:
      x: its last axes are the matrix's input axes; of type `dtype`.
      dtype: to compute in.
    """
    inputs = MODULES[name]
    weight, scale = getattr(block, name), getattr(block, f"{name}_scale", None)
    if scale is None:
        y = _times(x, weight[...].astype(dtype), inputs)
    else:
        qtype = weight.get_metadata()["qtype"]

        @jax.checkpoint  # the backward pass expands the codes again; stored expansions would be as large as the model
        def times_codes(x: Array, codes: Array, scale: Array) -> Array:
            return _times(x, dequantize(codes, scale, qtype).astype(dtype), inputs)

        y = times_codes(x, weight[...], scale[...])
    a, b = getattr(block, f"{name}_lora_a", None), getattr(block, f"{name}_lora_b", None)
    if a is None or b is None:
        return y
    low = _times(x, a[...].astype(dtype), inputs)
    return y + _times(low, b[...].astype(dtype), 1) * (b.get_metadata()["alpha"] / a.shape[-1])


def cast_matrices(stacked: nnx.State, dtype: jnp.dtype) -> nnx.State:
    """The weights of all layers, with their floating-point matrices (experts' too) in the dtype that products are computed in.

    A scan over layers that casts each layer's matrices itself reads and copies slices of the wider type.
    """

    def cast(path: Any, leaf: Array) -> Array:
        names = [step.key for step in path if isinstance(step, jax.tree_util.DictKey)]
        matrix = names[0] in MODULES or (names[0] == "experts" and names[1] in MODULES)
        return leaf.astype(dtype) if matrix and jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    return jax.tree.map_with_path(cast, stacked)


def _times(x: Float[Array, "*B D"], weight: Float[Array, "..."], inputs: int) -> Float[Array, "*B N"]:
    """`jnp.tensordot` with all tokens on one axis. With two axes, CPUs transpose `x` for the weight's gradient."""
    leading = x.ndim - inputs
    y = jnp.tensordot(x.reshape(-1, *x.shape[leading:]), weight, inputs)
    return y.reshape(*x.shape[:leading], *y.shape[1:])


def quantize(weight: Float[Array, "*D"], inputs: int, qtype: str, tile: int) -> tuple[Array, Float[Array, "*S"]]:
    """Codes and scales of a stack of matrices, by qwix's absolute maximum.

    Args:
      weight: the first axis is the layer, the next `inputs` axes are the input.
      qtype: int8, int4, or nf4 (4-bit NormalFloat, arXiv 2305.14314).
      tile: entries of the last input axis that share a scale; 0: all of them.

    Returns:
      Codes of the weight's shape, int8 or uint8 (4-bit types: half as many on the last axis), and scales of its dtype,
      with one entry per tile on the last input axis.

    Raises:
      ValueError: unknown type, or a shape that can't be cut so.
    """
    if qtype not in QTYPES:
        raise ValueError(f"qtype={qtype!r} is not known; known: {', '.join(QTYPES)}")
    width = weight.shape[inputs]
    if tile and width % tile:
        raise ValueError(f"tile_size={tile} does not divide an input axis of {width}; use one that does, or 0 for all")
    if qtype != "int8" and weight.shape[-1] % 2:
        raise ValueError(f"{qtype} codes go in pairs along the last axis, which has {weight.shape[-1]}; use int8")

    import qwix  # here, because it takes a second, and few models are quantised

    def one_layer(matrix: Array) -> tuple[Array, Array]:  # one at a time: qwix compares every entry with all 16 levels
        last = inputs - 1
        array = qwix.quantize(
            matrix,
            qtype if qtype == "nf4" else jnp.dtype(qtype),
            channelwise_axes=[axis for axis in range(matrix.ndim) if axis != last],
            tiled_axes={last: tile or width},
        )
        return (array.qvalue if qtype == "int8" else _pack(array.qvalue)), array.scale

    return jax.lax.map(one_layer, weight)


def dequantize(codes: Shaped[Array, "*D"], scale: Float[Array, "*S"], qtype: str) -> Float[Array, "*D"]:
    """The values that codes stand for, in the dtype of the scales. Equal to `qwix.dequantize`.

    qwix's own goes through the flattened array for nf4, which gathers a sharded weight on every device; looking up codes
    in its table of levels does not.
    """
    if qtype == "int8":
        values = codes
    elif qtype == "nf4":
        import qwix

        every = qwix.QArray(jnp.arange(16, dtype=jnp.uint8), jnp.ones(1), None, "nf4")
        values = qwix.dequantize(every)[_unpack(codes)]
    else:
        values = (_unpack(codes).astype(jnp.int8) ^ 8) - 8  # two's complement of four bits
    values = values.astype(scale.dtype)
    tiled, tiles = [], []
    for size, count in zip(values.shape, scale.shape):
        tiled += [count, size // count]
        tiles += [count, 1]
    return (values.reshape(tiled) * scale.reshape(tiles)).reshape(values.shape)


def _pack(codes: Array) -> UInt8[Array, "*D"]:
    """Packs two neighbours on the last axis into one byte, the first in the low bits. (JAX's own 4-bit arrays take a byte per
    entry on CPUs.)"""
    nibbles = codes.astype(jnp.int8).astype(jnp.uint8) & 15
    pairs = nibbles.reshape(*codes.shape[:-1], codes.shape[-1] // 2, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4)


def _unpack(packed: UInt8[Array, "*D"]) -> UInt8[Array, "*D"]:
    pairs = jnp.stack([packed & 15, packed >> 4], axis=-1)
    return pairs.reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def merge(
    weight: Array, scale: Array | None, a: Array | None, b: Array | None, *, alpha: float, qtype: str, dtype: Any
) -> Float[Array, "*D"]:
    """A stack of matrices with its adapter added, summed in float32 (or wider) and then rounded to `dtype`."""
    if a is None or b is None:
        return (weight if scale is None else dequantize(weight, scale, qtype)).astype(dtype)
    rank = a.shape[-1]

    def merge_layer(layer: tuple[Array, Array | None, Array, Array]) -> Array:
        # Layer by layer, because the deltas of all layers at once would take float32 copies of them.
        weight, scale, a, b = layer
        matrix = weight if scale is None else dequantize(weight, scale, qtype)
        sum_dtype = jnp.promote_types(matrix.dtype, jnp.float32)
        low_a, low_b = a.reshape(-1, rank).astype(sum_dtype), b.reshape(rank, math.prod(b.shape[1:])).astype(sum_dtype)
        with jax.default_matmul_precision("highest"):
            delta = jnp.einsum("IR,RO->IO", low_a, low_b) * (alpha / rank)
        return (matrix.astype(sum_dtype) + delta.reshape(matrix.shape)).astype(dtype)

    return jax.lax.map(merge_layer, (weight, scale, a, b))
