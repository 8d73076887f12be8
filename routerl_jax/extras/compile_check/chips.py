"""Published peaks of accelerators, each with its source."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
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
CHIPS = {
    "v5e": Chip(
        name="v5e",
        peak_flops=197e12,
        memory_bandwidth=819e9,
        link_bandwidth=400e9 / 2 / 4,
        torus_axes=2,
        hop_latency=_HOP,
        source="https://docs.cloud.google.com/tpu/docs/v5e",
    ),
    "v5p": Chip(
        name="v5p",
        peak_flops=459e12,
        memory_bandwidth=2765e9,
        link_bandwidth=1200e9 / 2 / 6,
        torus_axes=3,
        hop_latency=_HOP,
        source="https://docs.cloud.google.com/tpu/docs/v5p-training",
    ),
    "v6e": Chip(
        name="v6e",
        peak_flops=918e12,
        memory_bandwidth=1600e9,
        link_bandwidth=800e9 / 2 / 4,
        torus_axes=2,
        hop_latency=_HOP,
        source="https://docs.cloud.google.com/tpu/docs/v6e",
    ),
    "H100": Chip(
        name="H100",
        peak_flops=989e12,
        memory_bandwidth=3.35e12,
        link_bandwidth=450e9,
        torus_axes=0,
        source="https://www.nvidia.com/en-us/data-center/h100 (SXM)",
    ),
    "H200": Chip(
        name="H200",
        peak_flops=989e12,
        memory_bandwidth=4.8e12,
        link_bandwidth=450e9,
        torus_axes=0,
        source="https://www.nvidia.com/en-us/data-center/h200 (SXM)",
    ),
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
