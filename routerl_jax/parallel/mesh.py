"""Device meshes. Axes: `data` (replicas of the weights), `fsdp` (weights sharded too), `tensor` (heads and channels)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

AXES = ("data", "fsdp", "tensor")
BATCH_AXES = ("data", "fsdp")  # rows of a batch and of the KV cache are split over these


def make_mesh(sizes: Mapping[str, int] | None = None, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh over all devices (or `devices`) with axes data, fsdp, tensor.

    Args:
      sizes: devices per axis; one of them may be -1 for "whatever is left"; missing axes have size 1. None puts every
        device on `data`.
      devices: default `jax.devices()`.

    Raises:
      ValueError: unknown axis, impossible size, or the sizes do not multiply to the number of devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = dict(sizes or {"data": -1})
    for name, size in sizes.items():
        if name not in AXES:
            raise ValueError(f"unknown mesh axis {name!r}; axes are {', '.join(AXES)}")
        if size < 1 and size != -1:
            raise ValueError(f"mesh {sizes}: sizes must be positive, or -1 for the devices that are left")
    shape = [sizes.get(name, 1) for name in AXES]
    if shape.count(-1) > 1:
        raise ValueError(f"mesh {sizes}: at most one axis may be -1")
    if -1 in shape:
        product = -math.prod(shape)
        if len(devices) % product:
            raise ValueError(f"mesh {sizes}: {len(devices)} devices are not divisible by {product}")
        shape[shape.index(-1)] = len(devices) // product
    if math.prod(shape) != len(devices):
        raise ValueError(f"mesh {sizes} needs {math.prod(shape)} devices, but there are {len(devices)}")
    return jax.make_mesh(tuple(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def single_device_mesh(device: Any = None) -> Mesh:
    """A mesh of one device (default: this process's first), for code that expects a mesh."""
    return make_mesh(devices=[device or jax.local_devices()[0]])


def on_cpu(mesh: Mesh) -> bool:
    """Whether a mesh consists of CPU devices, where other choices are fast than on accelerators."""
    return mesh.devices.flat[0].platform == "cpu"


def on_tpu(mesh: Mesh) -> bool:
    """Whether a mesh consists of TPU devices."""
    return mesh.devices.flat[0].platform == "tpu"


def on_gpu(mesh: Mesh) -> bool:
    """Whether a mesh consists of GPUs."""
    return mesh.devices.flat[0].platform == "gpu"


def batch_shards(mesh: Mesh) -> int:
    """Number of shards into which a batch (or the rows of the KV cache) is split."""
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def replicated(mesh: Mesh) -> NamedSharding:
    """Sharding that keeps a whole copy on every device."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh, axis: int = 0) -> NamedSharding:
    """Sharding that splits array dimension `axis` over the batch axes of the mesh."""
    return NamedSharding(mesh, PartitionSpec(*[None] * axis, BATCH_AXES))
