"""How fast a compiled program can be on a chip: the roofline (Williams, Waterman, Patterson, 2009), instruction by instruction.

It is a bound from below: products at the chip's peak, memory at its full rate. Real programs take longer; measured shares of
such bounds are in docs/accelerators.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
from jax.sharding import Mesh

from routerl_jax.parallel.chips import Chip, rings
from routerl_jax.parallel.hlo_costs import Collective, Costs

_MOVES = ("copy", "merge")  # programs that give the engine its weights
_SMALL = 2**16  # bytes that are sent in less than a hop takes, on the links of TPUs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traffic:
    """Collectives of a kind, on one device."""

    count: float
    bytes: float  # that it sends
    seconds: float
    hidden_s: float  # of these, while something else runs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """A program on one chip at best. Seconds are of one call.

    Attributes:
      flops, hbm_bytes: of one device, loops multiplied out.
      compute_s, memory_s: all products at peak; all bytes at the memory's rate.
      network_s, exposed_s: all collectives; those parts of them during which nothing else runs.
      seconds: of the call. Every instruction takes the longer of its products and its bytes, then come exposed collectives.
      bound: what takes most: compute, memory or network.
      mfu: useful FLOPs over what the chip could do in that time (arXiv 2204.02311, appendix B); what is computed again does not
        count.
      hbm_share: bytes moved over what the memory could move in that time.
      token_s: of a decoded token of each row, in a program that decodes.
      traffic: collectives by kind and the axes of the mesh that they go along, `all-reduce/tensor`.
      hint: what to change.
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
      mesh: of the program; it tells along which axes and links a collective goes. None: a device's own ring.
      useful: FLOPs of one device that the work needs, whoever computes it; default: those that are counted.
      decoded: of a program that decodes, its steps and all rows of all devices.
      name: of the program (run_programs.PROGRAMS), for the hint.
    """
    seconds = [max(one.flops / chip.flops, one.bytes / chip.bytes) * one.times for one in costs.operations]
    free = [0.0 if one.apart else time for one, time in zip(costs.operations, seconds)]
    busy = sum(free)  # copies that go on beside others are in the bound of all bytes
    traffic: dict[str, list[float]] = {}
    for one in costs.collectives:
        time = _network_seconds(one, chip, mesh) * one.times
        hidden = 0.0
        for i in range(*one.window):
            part = min(free[i], time - hidden)
            free[i] -= part
            hidden += part
        entry = traffic.setdefault("/".join((one.kind, *_axes(one, mesh))), [0.0, 0.0, 0.0, 0.0])
        for place, value in enumerate((one.times, one.sent * one.times, time, hidden)):
            entry[place] += value
    compute, memory = costs.flops / chip.flops, costs.bytes / chip.bytes
    network = sum(entry[2] for entry in traffic.values())
    exposed = network - sum(entry[3] for entry in traffic.values())
    total = max(busy, memory) + exposed
    parts = {"compute": compute, "memory": memory, "network": exposed}
    bound = max(parts, key=lambda name: parts[name])
    token = total / decoded[0] if decoded else None
    found = Estimate(
        chip=chip.name,
        flops=costs.flops,
        hbm_bytes=costs.bytes,
        compute_s=compute,
        memory_s=memory,
        network_s=network,
        exposed_s=exposed,
        seconds=total,
        bound=bound,
        mfu=(costs.flops if useful is None else useful) / chip.flops / total if total else 0.0,
        hbm_share=memory / total if total else 0.0,
        traffic={
            kind: Traffic(count=count, bytes=sent, seconds=time, hidden_s=hidden)
            for kind, (count, sent, time, hidden) in sorted(traffic.items())
        },
        token_s=token,
        tokens_per_s=decoded[1] / token if decoded and token else None,
        uncounted=costs.uncounted,
    )
    return dataclasses.replace(found, hint=_hint(found, name, useful))


def _axes(one: Collective, mesh: Mesh | None) -> list[str]:
    """The axes of the mesh along which those that take part differ."""
    if mesh is None or max(one.members) >= mesh.size:
        return []
    places = np.unravel_index(np.asarray(one.members), tuple(mesh.shape.values()))
    along = [name for name, place in zip(mesh.shape, places) if len(set(place.tolist())) > 1]
    return ["+".join(along)] if along else []


def _network_seconds(one: Collective, chip: Chip, mesh: Mesh | None) -> float:
    """What it sends over the links that it can use, but not less than the hops there are around half a ring."""
    devices = [] if mesh is None else list(mesh.devices.flat)
    group = [devices[i] for i in one.members] if devices and max(one.members) < len(devices) else []
    hops = 1 if one.kind == "collective-permute" else len(one.members) / 2
    return max(one.sent / (chip.link * rings(chip, group, devices)), chip.hop * hops)


def _hint(found: Estimate, name: str, useful: float | None) -> str:
    """One sentence: what would make it faster, by what binds it."""
    if found.bound == "network":
        return _network_hint(found, name)
    if found.bound == "memory":
        if name == "decode":
            return "weights and cache are read for each token: more engine.rows share the weights, shorter rows have less cache"
        if name in _MOVES:
            return "weights are rewritten once an update"
        return "larger learner.micro_tokens (each micro-batch reads all weights), or weights and optimiser state in bfloat16"
    if useful is not None and found.flops > 1.15 * useful:
        return (
            f"{found.flops / useful - 1:.0%} more FLOPs than needed, as some are computed again: learner.remat='dots' or "
            "'none' where memory allows it"
        )
    return "products bind: only a smaller model, shorter sequences or more chips are faster"


def _network_hint(found: Estimate, name: str) -> str:
    kind, most = max(found.traffic.items(), key=lambda item: item[1].seconds - item[1].hidden_s)
    exposed = f"{kind} is exposed for {1000 * (most.seconds - most.hidden_s):.3g} ms"
    if name in _MOVES:
        return f"{exposed}, once an update"
    if most.bytes / max(most.count, 1) < _SMALL:
        return (
            f"{exposed}, in {most.count:g} small pieces, bound by hops: fewer devices on that axis, or more work a call"
        )
    if kind.endswith("tensor"):
        return f"{exposed}: activations are exchanged in every layer; fewer devices on mesh.tensor"
    return (
        f"{exposed}: weights are gathered, or gradients summed, once for each micro-batch; larger learner.micro_tokens"
    )
