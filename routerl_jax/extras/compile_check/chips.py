"""Chips: their published peaks, each with its source; and TPU slices that are not attached, to compile for."""

from __future__ import annotations

import dataclasses
import fnmatch
import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Sequence
from typing import Any

from routerl_jax.core.packages import install_hint


@dataclasses.dataclass(frozen=True)
class Chip:
    """The peaks of one chip. The two cores of a TPU v5p work as one device, so that they count together.

    Attributes:
      peak_flops: of products in bfloat16 without sparsity, FLOP/s.
      memory_bandwidth: bytes/s, read and written together.
      link_bandwidth: of one link to a neighbour, in one direction, bytes/s.
      torus_axes: axes of the torus that the links form; a chip has two links along each. 0: all chips are on a switch, with one
        link each.
      hop_latency: seconds from a chip to its neighbour; 0 if no source is known.
      source: where the peaks are published.
    """

    name: str
    peak_flops: float
    memory_bandwidth: float
    link_bandwidth: float
    torus_axes: int
    hop_latency: float = 0.0
    source: str = ""


# The pages give the bandwidth of a chip, both directions together: one link in one direction has half of that, divided by the
# number of links (4 or 6). A hop takes about a microsecond ("How to scale your model", jax-ml.github.io/scaling-book/sharding).
_HOP = 1e-6
_TPUS, _NVIDIA = "https://docs.cloud.google.com/tpu/docs", "https://www.nvidia.com/en-us/data-center"
CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v5e", 197e12, 819e9, 400e9 / 2 / 4, 2, _HOP, f"{_TPUS}/v5e"),
        Chip("v5p", 459e12, 2765e9, 1200e9 / 2 / 6, 3, _HOP, f"{_TPUS}/v5p-training"),
        Chip("v6e", 918e12, 1600e9, 800e9 / 2 / 4, 2, _HOP, f"{_TPUS}/v6e"),
        Chip("H100", 989e12, 3.35e12, 450e9, 0, 0.0, f"{_NVIDIA}/h100 (SXM)"),
        Chip("H200", 989e12, 4.8e12, 450e9, 0, 0.0, f"{_NVIDIA}/h200 (SXM)"),
    )
}
_KINDS = {  # jax.Device.device_kind
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "NVIDIA H100 80GB HBM3": "H100",  # SXM; those for PCIe and of GH200 have other peaks
    "NVIDIA H200": "H200",
}


def chip_of(device: Any) -> Chip | None:
    """The chip of a device (attached, or of a topology); None if its peaks are not in `CHIPS`."""
    return CHIPS.get(_KINDS.get(device.device_kind, ""))


def usable_links(chip: Chip, group: Sequence[Any], every: Sequence[Any]) -> int:
    """How many links of each device a collective of a group can use at once.

    On a torus these are the links along the axes on which the group's devices differ. An axis gives two if its links close a
    ring, else one, because what goes one way must come back. Links close a ring if the group spans a whole axis of 16 chips
    (v5e, v6e) or of a multiple of 4 (v5p).

    Args:
      every: the devices of the slice.
    """
    if not chip.torus_axes or len(group) < 2:
        return 1
    count = 0
    for axis in range(len(getattr(group[0], "coords", ()))):
        occupied, whole = ({device.coords[axis] for device in devices} for devices in (group, every))
        closed = occupied == whole and (len(whole) == 16 if chip.torus_axes == 2 else len(whole) % 4 == 0)
        count += (2 if closed else 1) if len(occupied) > 1 else 0
    return max(count, 1)


# --- slices that are not attached ---


# GiB that a program may use on one device of each kind: the available memory that the TPU compiler of libtpu 0.0.52 reports
# when a program does not fit. The chip has more, because the runtime keeps some. In a v4 topology, the two cores of a chip are
# separate devices with half of its memory each.
HBM_GIB = {
    "TPU v4": 15.25,
    "TPU v5 lite": 15.75,  # v5e
    "TPU v5": 95.73,  # v5p
    "TPU v6 lite": 31.24,  # v6e
    "TPU7x": 94.74,
}


def topology_devices(name: str) -> list[Any]:
    """The devices of a TPU slice, such as `v5e:16x16` or `v5p:4x4x4`, for compiling only.

    Set JAX_PLATFORMS=cpu before JAX starts where no TPU is attached.

    Raises:
      ValueError: there is no such slice, or libtpu is not installed.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError(f"compiling for TPUs needs the libtpu wheel: run {install_hint('compile_check')}")
    # Without these, libtpu asks a cloud machine's metadata server for its location, and waits.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    from jax.experimental import topologies

    try:
        return list(topologies.get_topology_desc(platform="tpu", topology_name=name).devices)
    except Exception as error:  # jaxlib raises its own types, by version
        raise ValueError(
            f"--topology={name}: the TPU compiler knows no such slice ({error}); examples: v4:2x2x2, v5e:16x16, v5p:4x4x4, "
            f"v6e:16x16"
        ) from error


def compiler() -> str:
    """Which TPU compiler and JAX this Python has, for reports. Says so if a TPU install of this JAX has another compiler."""
    jax, libtpu = (importlib.metadata.version(package) for package in ("jax", "libtpu"))
    asked = re.search(r"libtpu==([\d.*]+)", " ".join(importlib.metadata.requires("jax") or ()))
    same = asked is None or fnmatch.fnmatch(f"{libtpu}.0", asked[1])
    other = "" if same or asked is None else f", with which a TPU install has libtpu {asked[1]}"
    return f"libtpu {libtpu}, jax {jax}{other}"


def hbm_gib(device: Any) -> float:
    """Memory of a device that programs can use, in GiB. Raises ValueError for a kind that is not in `HBM_GIB`."""
    if device.device_kind not in HBM_GIB:
        raise ValueError(f"memory of {device.device_kind!r} is unknown; known: {', '.join(HBM_GIB)}")
    return HBM_GIB[device.device_kind]
