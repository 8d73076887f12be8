"""From logical axis names to mesh axes: one table per layout, applied to whole parameter trees."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
from absl import logging
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Rules = Mapping[str, str | tuple[str, ...] | None]

# Logical axes: layers, embed (the residual stream), heads, kv_heads, head_dim, mlp, vocab. Anything not named stays whole.
LAYOUTS: dict[str, Rules] = {
    "replicated": {},
    "fsdp": {"embed": "fsdp"},
    "tensor": {"heads": "tensor", "kv_heads": "tensor", "mlp": "tensor", "vocab": "tensor"},
    "fsdp+tensor": {"embed": "fsdp", "heads": "tensor", "kv_heads": "tensor", "mlp": "tensor", "vocab": "tensor"},
}


def partition_spec(shape: tuple[int, ...], axes: tuple[str | None, ...], mesh: Mesh, rules: Rules) -> PartitionSpec:
    """The spec of one array. A dimension that the mesh axis does not divide stays whole, and a log line says so."""
    if len(shape) != len(axes):
        raise ValueError(f"array of shape {shape} was given axes {axes}")
    entries: list[str | tuple[str, ...] | None] = []
    for size, axis in zip(shape, axes):
        target = rules.get(axis) if axis else None
        names = (target,) if isinstance(target, str) else tuple(target or ())
        ways = math.prod(mesh.shape[name] for name in names)
        if ways > 1 and size % ways:
            logging.info("axis %s of size %d is not divisible by %s=%d and stays whole", axis, size, names, ways)
            target = None
        entries.append(target)
    return PartitionSpec(*entries)


def shardings(params: nnx.State, mesh: Mesh, layout: str) -> Any:
    """NamedShardings for a parameter State (values or abstract shapes), by each Param's `axes` metadata."""
    if layout not in LAYOUTS:
        raise ValueError(f"unknown layout {layout!r}; layouts are {', '.join(LAYOUTS)}")
    rules = LAYOUTS[layout]

    def one(variable: nnx.Variable) -> nnx.Variable:
        value = variable.get_value()
        axes = variable.get_metadata().get("axes", (None,) * len(value.shape))
        return variable.replace(NamedSharding(mesh, partition_spec(tuple(value.shape), axes, mesh, rules)))

    return jax.tree.map(one, params, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
