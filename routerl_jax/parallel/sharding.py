"""From logical axis names to mesh axes: one table per layout, applied to whole parameter trees.

Logical axes: layers, embed (the residual stream), heads, kv_heads, head_dim, mlp, vocab. Anything not named stays whole,
and so do layers, which are sliced one after another.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import jax
from absl import logging
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

Axes = tuple[str | None, ...]
M = TypeVar("M", bound=nnx.Module)

# Below so many entries (1 MB in bfloat16) a parameter is split where its layout would have it, or else not at all: its
# memory is worth less than one more collective per layer.
_SPILL_FROM = 2**19
_ALONE_FROM = 2**26  # entries of a parameter that is drawn by a program of its own


@dataclasses.dataclass(frozen=True, kw_only=True)
class Split:
    """How one mesh axis splits parameters, each along one of its axes.

    Attributes:
      over: the mesh axis.
      first: the logical axes that it is for.
      spill: where those that a parameter has can't be divided, the next ones to try, in this order.
      whole: of `first`, those that stay whole where they can't be divided, without a spill.
      storage: split large parameters that have none of `first`, too, by `spill`.
    """

    over: str
    first: tuple[str, ...]
    spill: tuple[str, ...]
    whole: tuple[str, ...] = ()
    storage: bool = False


# Storage: every weight is gathered for use, so any axis will do. `embed` is the one that all matrices have; heads come late,
# their width last, because rotary embeddings and attention read whole heads.
_FSDP = Split(over="fsdp", first=("embed",), spill=("mlp", "vocab", "heads", "kv_heads", "head_dim"), storage=True)
# Computation: devices have heads and feed-forward channels of their own (arXiv 1909.08053), so it is these that are split.
# What can't be, lies in slices of the residual stream: products are then summed over devices. Fewer key/value heads than
# devices are computed on each of them, as query heads of several devices read the same.
_TENSOR = Split(over="tensor", first=("heads", "kv_heads", "mlp", "vocab"), spill=("embed",), whole=("kv_heads",))

Layout = Literal["replicated", "fsdp", "tensor", "fsdp+tensor"]

# Applied in this order; a mesh axis may take a further part of an axis that another one has split.
LAYOUTS: dict[Layout, tuple[Split, ...]] = {
    "replicated": (),
    "fsdp": (_FSDP,),
    "tensor": (_TENSOR,),
    "fsdp+tensor": (_TENSOR, _FSDP),
}


def partition_spec(
    shape: tuple[int, ...], axes: Axes, mesh: Mesh | AbstractMesh, layout: str
) -> tuple[PartitionSpec, list[str]]:
    """The spec of one parameter, and what is to be said about it: where it differs from what the layout is meant to do.

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
        ways = mesh.shape[split.over]
        place, remark = (None, "") if ways == 1 else _place(split, ways, shape, axes, entries, mesh)
        if place is not None:
            entries[place] = (*entries[place], split.over)
        if remark:
            remarks.append(remark)
    return PartitionSpec(*(names if len(names) > 1 else next(iter(names), None) for names in entries)), remarks


def _place(
    split: Split,
    ways: int,
    shape: tuple[int, ...],
    axes: Axes,
    entries: list[tuple[str, ...]],
    mesh: Mesh | AbstractMesh,
) -> tuple[int | None, str]:
    """Which dimension a mesh axis of `ways` devices splits (None: none), and a remark if that is not as planned."""

    def divisible(names: tuple[str, ...]) -> int | None:
        for name in names:
            for place, axis in enumerate(axes):
                if axis == name and not shape[place] % (ways * math.prod(mesh.shape[n] for n in entries[place])):
                    return place
        return None

    place = divisible(split.first)
    if place is not None:
        return place, ""
    own = [(axis, size) for axis, size in zip(axes, shape) if axis in split.first]
    if not own and (not split.storage or math.prod(shape) < _SPILL_FROM):
        return None, ""
    sizes = " and ".join(f"{axis}={size}" for axis, size in own)
    fault = f"{sizes} can't be divided by {split.over}={ways}" if own else f"no {' or '.join(split.first)} axis"
    if any(axis in split.whole for axis, _ in own):
        return None, f"{fault}: whole on every device of that axis, by design"
    if math.prod(shape) < _SPILL_FROM:
        return None, f"{fault}: small, and whole"
    place = divisible(split.spill)
    if place is not None:
        return place, f"{fault}: split along {axes[place]}={shape[place]} instead"
    return None, f"{fault}, nor is there another axis that can be: WHOLE on every device of that axis"


def shardings(params: nnx.State, mesh: Mesh | AbstractMesh, layout: str) -> Any:
    """NamedShardings for a parameter State (values or abstract shapes), by each Param's `axes` metadata.

    Parameters that are not split as the layout is meant to are logged, one line per reason.
    """
    remarks: dict[str, list[str]] = {}
    flat = []
    for path, variable in nnx.to_flat_state(params):
        shape = tuple(variable.get_value().shape)
        axes = variable.get_metadata().get("axes", (None,) * len(shape))
        spec, said = partition_spec(shape, axes, mesh, layout)
        for remark in said:
            remarks.setdefault(remark, []).append(".".join(map(str, path)))
        flat.append((path, variable.replace(NamedSharding(mesh, spec))))
    for remark, names in remarks.items():
        _say(f"layout {layout}: {remark}: {', '.join(names)}")
    return nnx.from_flat_state(flat)


@functools.cache
def _say(line: str) -> None:
    """Once per process: layouts are applied again whenever weights move."""
    if jax.process_index() == 0:
        (logging.warning if "WHOLE" in line else logging.info)("%s", line)


def create_sharded(make: Callable[[], M], mesh: Mesh, layout: str) -> M:
    """A model with the random weights that `make` gives it, made where they are to lie.

    Programs with sharded results make them, one for each large parameter: no device ever holds a whole one, nor what it takes
    to draw all of them. What is drawn depends neither on the mesh nor on the layout.
    """
    model = nnx.eval_shape(make)
    targets = dict(nnx.to_flat_state(shardings(nnx.state(model, nnx.Param), mesh, layout)))
    sizes = {path: math.prod(v.get_value().shape) for path, v in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    small = [path for path, size in sizes.items() if size < _ALONE_FROM]
    for paths in [small, *([path] for path in sizes if path not in small)]:

        def some(paths: Sequence[Any] = paths) -> dict[Any, nnx.Variable]:
            made = dict(nnx.to_flat_state(nnx.state(make(), nnx.Param)))
            return {path: made[path] for path in paths}  # the others are never computed

        values = jax.jit(some, out_shardings={path: targets[path] for path in paths})()
        nnx.update(model, nnx.from_flat_state(list(values.items())))
    return model
