"""How fast a compiled program can be on a chip: the roofline (Williams, Waterman, Patterson, 2009), instruction by instruction.

It is a bound from below: products at the chip's peak, memory at its full rate. Real programs take longer; measured shares of
such bounds are in docs/accelerators.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from routerl_jax.parallel.chips import Chip, rings
from routerl_jax.parallel.hlo_costs import Collective, Costs


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
    devices: Sequence[Any] = (),
    *,
    useful: float | None = None,
    decoded: tuple[int, int] | None = None,
) -> Estimate:
    """The roofline estimate of a program.

    Args:
      devices: in the program's order (`mesh.devices.flat`); they tell along which links a collective goes.
      useful: FLOPs of one device that the work needs, whoever computes it; default: those that are counted.
      decoded: of a program that decodes, its steps and all rows of all devices.
    """
    seconds = [max(one.flops / chip.flops, one.bytes / chip.bytes) * one.times for one in costs.operations]
    free = [0.0 if one.apart else time for one, time in zip(costs.operations, seconds)]
    busy = sum(free)  # copies that go on beside others are in the bound of all bytes
    traffic: dict[str, list[float]] = {}
    for one in costs.collectives:
        time = _network_seconds(one, chip, devices) * one.times
        hidden = 0.0
        for i in range(*one.window):
            part = min(free[i], time - hidden)
            free[i] -= part
            hidden += part
        entry = traffic.setdefault(one.kind, [0.0, 0.0, 0.0, 0.0])
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
    return dataclasses.replace(found, hint=_hint(found, decoded is not None, useful))


def _network_seconds(one: Collective, chip: Chip, devices: Sequence[Any]) -> float:
    """What it sends over the links that it can use, but not less than the hops there are around half a ring."""
    group = [devices[i] for i in one.members] if devices and max(one.members) < len(devices) else []
    links = rings(chip, group, devices)
    hops = 1 if one.kind == "collective-permute" else len(one.members) / 2
    return max(one.sent / (chip.link * links), chip.hop * hops)


def _hint(found: Estimate, decodes: bool, useful: float | None) -> str:
    """One sentence: what would make it faster, by what binds it."""
    if found.bound == "network":
        kind, most = max(found.traffic.items(), key=lambda item: item[1].seconds - item[1].hidden_s)
        if most.bytes / max(most.count, 1) < 2**16:
            return f"many small {kind}s, bound by the time of a hop: fewer devices on mesh.tensor, or more rows a call"
        if decodes:
            return f"{kind} moves {most.bytes / 2**20:.1f} MiB a call: fewer devices on mesh.tensor"
        return (
            f"{kind} is exposed for {most.seconds - most.hidden_s:.3g} s: larger learner.micro_tokens (each micro-batch "
            "gathers the weights), or fewer devices on mesh.tensor"
        )
    if found.bound == "memory":
        if decodes:
            return "weights and cache are read for each token: more engine.rows share the weights; shorter rows move less cache"
        return "memory binds: larger learner.micro_tokens, or bfloat16 weights and optimiser state"
    if useful is not None and found.flops > 1.15 * useful:
        return (
            f"{found.flops / useful - 1:.0%} more FLOPs than needed, as some are computed again: learner.remat='dots' or "
            "'none' where memory allows it"
        )
    return "the chip's products bind: nothing but a smaller model, shorter sequences or more chips is faster"
