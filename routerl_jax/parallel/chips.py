"""What accelerators can do at best: published peaks, each with its source."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """One chip (of a TPU v4 or v5p, whose two cores work as one).

    Attributes:
      flops: products of bfloat16, FLOP/s, without sparsity.
      bytes: of its memory, bytes/s.
      link: what one of its links to a neighbour sends, bytes/s, in one direction.
      axes: of the torus that the links span; each has two. 0: a switch, which any two chips reach at the rate of `link`.
      hop: seconds from chip to chip; 0 where no source is known.
      source: where the peaks are published.
    """

    name: str
    flops: float
    bytes: float
    link: float
    axes: int
    hop: float = 0.0
    source: str = ""


# A link sends half of what the pages give for a chip, both directions together, over its number of ports (4 or 6). The
# time of a hop is that of "How to scale your model" (jax-ml.github.io/scaling-book/sharding), about a microsecond.
_HOP = 1e-6
CHIPS = {
    "v5e": Chip(
        name="v5e",
        flops=197e12,
        bytes=819e9,
        link=400e9 / 2 / 4,
        axes=2,
        hop=_HOP,
        source="https://docs.cloud.google.com/tpu/docs/v5e",
    ),
    "v5p": Chip(
        name="v5p",
        flops=459e12,
        bytes=2765e9,
        link=1200e9 / 2 / 6,
        axes=3,
        hop=_HOP,
        source="https://docs.cloud.google.com/tpu/docs/v5p-training",
    ),
    "v6e": Chip(
        name="v6e",
        flops=918e12,
        bytes=1600e9,
        link=800e9 / 2 / 4,
        axes=2,
        hop=_HOP,
        source="https://docs.cloud.google.com/tpu/docs/v6e",
    ),
    "H100": Chip(
        name="H100",
        flops=989e12,
        bytes=3.35e12,
        link=450e9,
        axes=0,
        source="https://www.nvidia.com/en-us/data-center/h100 (SXM)",
    ),
    "H200": Chip(
        name="H200",
        flops=989e12,
        bytes=4.8e12,
        link=450e9,
        axes=0,
        source="https://www.nvidia.com/en-us/data-center/h200 (SXM)",
    ),
}
_KINDS = {
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
}


def chip_of(device: Any) -> Chip | None:
    """The chip of a device (attached, or of a topology); None if its peaks are not in `CHIPS`."""
    kind = device.device_kind
    name = _KINDS.get(kind) or next((name for name in ("H100", "H200") if name in kind), "")
    return CHIPS.get(name)


def rings(chip: Chip, group: Sequence[Any], every: Sequence[Any]) -> int:
    """How many links of each device a collective among a group can use at once, going round in rings.

    On a torus: along each axis along which the group's devices differ, two where the links close a ring (the group spans a
    whole axis of 16 on v5e and v6e, of a multiple of 4 on v5p), else one, as what goes one way must come back.

    Args:
      every: the devices of the slice.
    """
    if not chip.axes or len(group) < 2:
        return 1
    count = 0
    for axis in range(len(getattr(group[0], "coords", ()))):
        places, whole = ({device.coords[axis] for device in devices} for devices in (group, every))
        closed = places == whole and (len(whole) == 16 if chip.axes == 2 else len(whole) % 4 == 0)
        count += (2 if closed else 1) if len(places) > 1 else 0
    return max(count, 1)
