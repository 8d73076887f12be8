"""The peaks of chips, each with its source, and the least time of a compiled program on one: the roofline (Williams, Waterman,
Patterson, 2009) of each instruction.

Products run at the chip's peak and memory at its full bandwidth. Real programs take longer; docs/accelerators.md has measured
shares of such bounds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from routerl_jax.extras.compile_check.hlo_costs import Collective, Costs

_MOVES = ("copy", "merge")  # programs that give the engine its weights
_LEARNS = ("update", "reference")  # programs that work through micro-batches
_SMALL = 2**16  # bytes: a TPU's link sends so many in about a microsecond, the time of a hop

# --- chips ---


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


# --- estimates ---


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traffic:
    """All collectives of one kind along the same axes of the mesh, on one device."""

    count: float
    bytes: float  # sent
    seconds: float
    hidden_s: float  # those of them during which other instructions run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """The least time of a program on a chip. All numbers are of one call and one device, with loops multiplied out.

    Attributes:
      flops: of matrix products and attention.
      hbm_bytes: read from and written to the device's memory.
      compute_s: all products, at the chip's peak.
      memory_s: all bytes, at the memory's bandwidth.
      network_s: all collectives.
      exposed_s: collectives, without the time during which other instructions run.
      seconds: the least time. An instruction takes the longer of its products and its bytes, and exposed collectives come on
        top. It is never less than `memory_s`.
      bound: the part that takes longest: compute, memory or network.
      mfu: model FLOPs utilisation (arXiv 2204.02311, appendix B): useful FLOPs over the chip's peak FLOPs in `seconds`.
        Recomputation does not count.
      hbm_share: bytes moved over the memory's peak bytes in `seconds`.
      traffic: collectives by kind and axes of the mesh, such as `all-reduce/tensor`.
      token_s: seconds per decoded token of a row, in a program that decodes.
      tokens_per_s: tokens that all rows of all devices decode per second.
      uncounted: custom kernels whose FLOPs are not known.
      hint: a change that would make the program faster.
    """

    chip: str
    flops: float
    hbm_bytes: float
    compute_s: float
    memory_s: float
    network_s: float
    exposed_s: float
    seconds: float
    bound: str
    mfu: float
    hbm_share: float
    traffic: Mapping[str, Traffic] = dataclasses.field(default_factory=dict)
    token_s: float | None = None
    tokens_per_s: float | None = None
    uncounted: tuple[str, ...] = ()
    hint: str = ""


def estimate(
    costs: Costs,
    chip: Chip,
    mesh: Mesh | None = None,
    *,
    useful: float | None = None,
    decoded: tuple[int, int] | None = None,
    name: str = "",
) -> Estimate:
    """The roofline estimate of a program.

    Args:
      mesh: the program's mesh, for the axes and links of collectives. None: every collective has one link.
      useful: FLOPs that the work needs on one device; default: those that are counted.
      decoded: for a program that decodes: steps of a call, and rows of all devices.
      name: the program's name (run_programs.PROGRAMS), for the hint.
    """
    seconds = [
        max(operation.flops / chip.peak_flops, operation.bytes / chip.memory_bandwidth) * operation.times
        for operation in costs.operations
    ]
    free = [0.0 if operation.asynchronous else time for operation, time in zip(costs.operations, seconds)]
    busy = sum(free)  # the bytes of asynchronous copies are in `memory`
    traffic: dict[str, list[float]] = {}
    for collective in costs.collectives:
        time = _network_seconds(collective, chip, mesh) * collective.times
        hidden = 0.0
        for i in range(*collective.window):
            part = min(free[i], time - hidden)
            free[i] -= part
            hidden += part
        entry = traffic.setdefault("/".join((collective.kind, *_axes(collective, mesh))), [0.0, 0.0, 0.0, 0.0])
        for index, value in enumerate((collective.times, collective.sent * collective.times, time, hidden)):
            entry[index] += value
    compute, memory = costs.flops / chip.peak_flops, costs.bytes / chip.memory_bandwidth
    network = sum(entry[2] for entry in traffic.values())
    exposed = network - sum(entry[3] for entry in traffic.values())
    total = max(
        busy + exposed, memory
    )  # copies and the memory traffic of collectives may go on during exposed collectives
    parts = {"compute": compute, "memory": memory, "network": exposed}
    bound = max(parts, key=lambda name: parts[name])
    token = total / decoded[0] if decoded else None
    result = Estimate(
        chip=chip.name,
        flops=costs.flops,
        hbm_bytes=costs.bytes,
        compute_s=compute,
        memory_s=memory,
        network_s=network,
        exposed_s=exposed,
        seconds=total,
        bound=bound,
        mfu=(costs.flops if useful is None else useful) / chip.peak_flops / total if total else 0.0,
        hbm_share=memory / total if total else 0.0,
        traffic={
            kind: Traffic(count=count, bytes=sent, seconds=time, hidden_s=hidden)
            for kind, (count, sent, time, hidden) in sorted(traffic.items())
        },
        token_s=token,
        tokens_per_s=decoded[1] / token if decoded and token else None,
        uncounted=costs.uncounted,
    )
    return dataclasses.replace(result, hint=_hint(result, name, useful))


def _axes(collective: Collective, mesh: Mesh | None) -> list[str]:
    """The axes of the mesh along which the collective goes, as one name."""
    if mesh is None or max(collective.members) >= mesh.size:
        return []
    coordinates = np.unravel_index(np.asarray(collective.members), tuple(mesh.shape.values()))
    along = [name for name, positions in zip(mesh.shape, coordinates) if len(set(positions.tolist())) > 1]
    return ["+".join(along)] if along else []


def _network_seconds(collective: Collective, chip: Chip, mesh: Mesh | None) -> float:
    """The bytes sent over the usable links, but at least the hops to the other side of a ring."""
    devices = [] if mesh is None else list(mesh.devices.flat)
    group = [devices[i] for i in collective.members] if devices and max(collective.members) < len(devices) else []
    hops = 1 if collective.kind == "collective-permute" else len(collective.members) / 2
    bandwidth = chip.link_bandwidth * usable_links(chip, group, devices)
    return max(collective.sent / bandwidth, chip.hop_latency * hops)


def _hint(roofline: Estimate, name: str, useful: float | None) -> str:
    """A change that would make the program faster, given its bound."""
    if roofline.bound == "network":
        return _network_hint(roofline, name)
    if roofline.bound == "memory":
        if name == "decode":
            return (
                "weights and cache are read for each token: more engine.rows share the weights, shorter rows have less "
                "cache, engine.weight_qtype='int8' has smaller weights"
            )
        if name in _MOVES:
            return "weights are rewritten once an update"
        if name not in _LEARNS:
            return "weights are read once a call: a call with more rows shares them"
        return "larger learner.micro_tokens (each micro-batch reads all weights), or weights and optimiser state in bfloat16"
    if name == "update" and useful is not None and roofline.flops > 1.15 * useful:
        return (
            f"{roofline.flops / useful - 1:.0%} more FLOPs than needed, as some are computed again: learner.remat='dots' or "
            "'none' where memory allows it"
        )
    return "products bind: only a smaller model, shorter sequences or more chips are faster"


def _network_hint(roofline: Estimate, name: str) -> str:
    kind, most = max(roofline.traffic.items(), key=lambda item: item[1].seconds - item[1].hidden_s)
    exposed = f"{kind} is exposed for {1000 * (most.seconds - most.hidden_s):.3g} ms"
    if name in _MOVES:
        return f"{exposed}, once an update"
    if most.bytes / max(most.count, 1) < _SMALL:
        return (
            f"{exposed}, in {most.count:g} small pieces, bound by hops: fewer devices on that axis, or more work a call"
        )
    if kind.endswith("tensor") or name not in _LEARNS:
        return f"{exposed}: activations are exchanged in every layer; fewer devices on mesh.tensor"
    return (
        f"{exposed}: weights are gathered, or gradients summed, once for each micro-batch; larger learner.micro_tokens"
    )
