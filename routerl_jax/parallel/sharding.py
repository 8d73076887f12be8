"""Maps logical axes of parameters to mesh axes: one table per layout, applied to whole parameter trees.

Logical axes: layers, embed (the residual stream), heads, kv_heads, head_dim, experts, mlp, vocab. Other axes are not split.
`layers` is not split either, because layers are sliced one after another.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
from absl import logging
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from routerl_jax.parallel import multihost

Axes = tuple[str | None, ...]
M = TypeVar("M", bound=nnx.Module)

# A parameter with fewer entries (1 MB in bfloat16) is split along its layout's first choice or not at all: saving its memory is
# not worth another collective per layer.
_SPILL_FROM = 2**19
_ALONE_FROM = 2**26  # entries from which on a parameter is drawn by a program of its own


@dataclasses.dataclass(frozen=True, kw_only=True)
class Split:
    """How one mesh axis splits parameters, each along one of its axes.

    Attributes:
      over: the mesh axis.
      first: the logical axes that it splits.
      spill: if the `first` axes of a parameter are not divisible, the axes to try next, in this order.
      whole: those of `first` that are replicated if they are not divisible, without trying `spill`.
      storage: also split large parameters without any of `first`, along `spill`.
    """

    over: str
    first: tuple[str, ...]
    spill: tuple[str, ...]
    whole: tuple[str, ...] = ()
    storage: bool = False


# Storage: every weight is gathered for use, so any axis can be split. All matrices have `embed`. Heads come late and their
# width last, because rotary embeddings and attention read whole heads.
_FSDP = Split(over="fsdp", first=("embed",), spill=("mlp", "vocab", "heads", "kv_heads", "head_dim"), storage=True)
# Computation: each device computes its own heads and feed-forward channels (arXiv 1909.08053), or its own experts with all
# their channels, so these are split. If they are not divisible, the residual stream is split, and products are summed over
# devices. If there are fewer key/value heads than devices, each device computes all of them, because query heads of several
# devices read the same ones.
_TENSOR = Split(
    over="tensor", first=("experts", "heads", "kv_heads", "mlp", "vocab"), spill=("embed",), whole=("kv_heads",)
)

Layout = Literal["replicated", "fsdp", "tensor", "fsdp+tensor"]

# The splits are applied in this order. A mesh axis may further split an axis that another one has split.
LAYOUTS: dict[Layout, tuple[Split, ...]] = {
    "replicated": (),
    "fsdp": (_FSDP,),
    "tensor": (_TENSOR,),
    "fsdp+tensor": (_TENSOR, _FSDP),
}


def partition_spec(
    shape: tuple[int, ...], axes: Axes, mesh: Mesh | AbstractMesh, layout: str
) -> tuple[PartitionSpec, list[str]]:
    """The spec of one parameter, and a remark if it differs from the layout's plan.

    Raises:
      ValueError: unknown layout, or not one axis name per dimension.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"unknown layout {layout!r}; layouts are {', '.join(LAYOUTS)}")
    if len(shape) != len(axes):
        raise ValueError(f"array of shape {shape} was given axes {axes}")
    entries: list[tuple[str, ...]] = [()] * len(shape)
    remarks = []
    for split in LAYOUTS[layout]:
        devices = mesh.shape[split.over]
        dimension, remark = (None, "") if devices == 1 else _split_dimension(split, devices, shape, axes, entries, mesh)
        if dimension is not None:
            entries[dimension] = (*entries[dimension], split.over)
        if remark:
            remarks.append(remark)
    return PartitionSpec(*(names if len(names) > 1 else next(iter(names), None) for names in entries)), remarks


def _split_dimension(
    split: Split,
    devices: int,
    shape: tuple[int, ...],
    axes: Axes,
    entries: list[tuple[str, ...]],
    mesh: Mesh | AbstractMesh,
) -> tuple[int | None, str]:
    """The dimension that a mesh axis of so many `devices` splits (None: none), and a remark if that differs from the plan."""

    def divisible(names: tuple[str, ...]) -> int | None:
        for name in names:
            for dimension, axis in enumerate(axes):
                if axis == name and not shape[dimension] % (
                    devices * math.prod(mesh.shape[n] for n in entries[dimension])
                ):
                    return dimension
        return None

    chosen = divisible(split.first)
    if chosen is not None:
        return chosen, ""
    own = [(axis, size) for axis, size in zip(axes, shape) if axis in split.first]
    if not own and (not split.storage or math.prod(shape) < _SPILL_FROM):
        return None, ""
    sizes = " and ".join(f"{axis}={size}" for axis, size in own)
    fault = f"{sizes} can't be divided by {split.over}={devices}" if own else f"no {' or '.join(split.first)} axis"
    if any(axis in split.whole for axis, _ in own):
        return None, f"{fault}: whole on every device of that axis, by design"
    if math.prod(shape) < _SPILL_FROM:
        return None, f"{fault}: small, and whole"
    chosen = divisible(split.spill)
    if chosen is not None:
        return chosen, f"{fault}: split along {axes[chosen]}={shape[chosen]} instead"
    return None, f"{fault}, nor is there another axis that can be: WHOLE on every device of that axis"


def shardings(params: nnx.State, mesh: Mesh | AbstractMesh, layout: str) -> Any:
    """NamedShardings for a parameter State (values or abstract shapes), from each Param's `axes` metadata.

    Deviations from the layout's plan are logged, one line per reason.
    """
    remarks: dict[str, list[str]] = {}
    flat = []
    for path, variable in nnx.to_flat_state(params):
        shape = tuple(variable.get_value().shape)
        axes = variable.get_metadata().get("axes", (None,) * len(shape))
        spec, reasons = partition_spec(shape, axes, mesh, layout)
        for remark in reasons:
            remarks.setdefault(remark, []).append(".".join(map(str, path)))
        flat.append((path, variable.replace(NamedSharding(mesh, spec))))
    for remark, names in remarks.items():
        _say(f"layout {layout}: {remark}: {', '.join(names)}")
    return nnx.from_flat_state(flat)


@functools.cache
def _say(line: str) -> None:
    """Logs a line once per process, because layouts are applied again whenever weights move."""
    if jax.process_index() == 0:
        (logging.warning if "WHOLE" in line else logging.info)("%s", line)


def create_sharded(make: Callable[[], M], mesh: Mesh, layout: str) -> M:
    """A model with the random weights of `make`, created directly with their shardings.

    Programs with sharded results create them, with one program for each large parameter. So no device ever holds a whole one,
    or the memory for drawing all of them. The values depend neither on the mesh nor on the layout.
    """
    model = nnx.eval_shape(make)
    targets = dict(nnx.to_flat_state(shardings(nnx.state(model, nnx.Param), mesh, layout)))
    sizes = {path: math.prod(v.get_value().shape) for path, v in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    small = [path for path, size in sizes.items() if size < _ALONE_FROM]
    for paths in [small, *([path] for path in sizes if path not in small)]:

        def draw_parameters(paths: Sequence[Any] = paths) -> dict[Any, nnx.Variable]:
            variables = dict(nnx.to_flat_state(nnx.state(make(), nnx.Param)))
            return {path: variables[path] for path in paths}  # the others are never computed

        values = jax.jit(draw_parameters, out_shardings={path: targets[path] for path in paths})()
        nnx.update(model, nnx.from_flat_state(list(values.items())))
    return model


def bit_sums(values: dict[str, jax.Array]) -> dict[str, int]:
    """Of each array, a sum over its bits, weighted by index. It does not depend on the sharding: integer sums wrap, so their
    order does not matter, and each device reads its own part. Every other value of one entry gives another sum; other changes
    go unnoticed once in 2^32.

    Every process must call this.
    """
    return {name: int(value) for name, value in multihost.to_host(_bit_sums(values)).items()}


@jax.jit
def _bit_sums(values: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: _bit_sum(value) for name, value in values.items()}


def _bit_sum(value: jax.Array) -> jax.Array:
    bits = jax.lax.bitcast_convert_type(value, jnp.dtype(f"uint{8 * value.dtype.itemsize}"))
    index = jnp.zeros(value.shape, jnp.uint32)
    for axis in range(value.ndim):
        index = index * jnp.uint32(1_000_003) + jax.lax.broadcasted_iota(jnp.uint32, value.shape, axis)
    mixed = (bits.astype(jnp.uint32) ^ index) * jnp.uint32(0x9E3779B1)
    return ((mixed ^ (mixed >> 15)) * jnp.uint32(0x85EBCA77)).sum(dtype=jnp.uint32)
