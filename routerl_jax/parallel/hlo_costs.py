"""What a compiled program computes, moves and sends, loops multiplied out: XLA's own cost analysis counts a body once.

Everything is of one device. An instruction that is no fusion, and a fusion as a whole, reads what it is given from main
memory and writes what it gives; what a layout says lies elsewhere (a TPU's vector memory) is neither. Of a slice, or an
update in place, only the part counts that is touched.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator

from routerl_jax.parallel.hlo_collectives import collective_kind, members, sent_bytes
from routerl_jax.parallel.hlo_loops import trip_count
from routerl_jax.parallel.hlo_products import attention, product_flops
from routerl_jax.parallel.hlo_text import Computation, Instruction, Module, parse

_FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"),
    *(
        "optimization-barrier",
        "copy-done",
        "async-done",
        "async-update",
        "send-done",
        "recv-done",
        "add-dependency",
        "domain",
    ),
}
_FREE_CALLS = {
    *("AllocateBuffer", "AssumeGatherIndicesInBound", "ConcatBitcast", "GatherScatterIndicesBitpacked"),
    *("Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape", "AsyncCollectiveStart", "AsyncCollectiveDone"),
}
_SLICES = ("dynamic-slice", "slice", "gather")
_THROUGH = ("bitcast", "convert", "copy", "reshape", "transpose", "negate")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operation:
    """An instruction that computes or moves something, `times` times; `flops` and `bytes` are of one time."""

    name: str
    flops: float
    bytes: float
    times: float
    apart: bool = False  # a copy that goes on while others compute


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """A collective, `times` times; `sent` bytes leave each device one time. Operations `window` may run meanwhile."""

    kind: str
    sent: float
    members: tuple[int, ...]
    times: float
    window: tuple[int, int]  # indices into Costs.operations: first, and one after the last

    @property
    def overlaps(self) -> bool:
        """Whether it is begun and ended apart, with something in between."""
        return self.window[0] < self.window[1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    """A program on one device."""

    operations: tuple[Operation, ...]
    collectives: tuple[Collective, ...]
    unknown_loops: tuple[str, ...] = ()  # whose trips the text doesn't say; the caller's number was taken
    uncounted: tuple[str, ...] = ()  # kernels whose FLOPs are not known from their shapes

    @property
    def flops(self) -> float:
        """Of products and attention."""
        return sum(one.flops * one.times for one in self.operations)

    @property
    def bytes(self) -> float:
        """Read from and written to main memory."""
        return sum(one.bytes * one.times for one in self.operations)

    @property
    def sent(self) -> dict[str, float]:
        """Bytes sent, by kind of collective."""
        found: dict[str, float] = collections.defaultdict(float)
        for one in self.collectives:
            found[one.kind] += one.sent * one.times
        return dict(found)


def count(program: str | Module, *, trips: float = 1, filled: float = 1.0) -> Costs:
    """Counts a compiled program, given as its text (`compiled.as_text()`, or a dump) or as what was read from it.

    Args:
      trips: of loops that go round as often as a value says that is known only when the program runs.
      filled: share of the cache's rows that holds tokens, where a kernel reads only that (generation/pages.py).

    Of a conditional the costlier branch counts. Raises ValueError for text that is no program.
    """
    return _Counter(parse(program) if isinstance(program, str) else program, trips, filled).run()


class _Counter:
    """Walks the computations that run as such (not those that are fused or applied element by element)."""

    def __init__(self, module: Module, trips: float, filled: float) -> None:
        self._module, self._trips, self._filled = module, trips, filled
        self._operations: list[Operation] = []
        self._collectives: list[Collective] = []
        self._unknown: list[str] = []
        self._uncounted: list[str] = []
        self._used: dict[tuple[str, str], float] = {}

    def run(self) -> Costs:
        self._walk(self._module.entry, 1.0)
        return Costs(
            operations=tuple(self._operations),
            collectives=tuple(self._collectives),
            unknown_loops=tuple(dict.fromkeys(self._unknown)),
            uncounted=tuple(dict.fromkeys(self._uncounted)),
        )

    def _walk(self, computation: Computation, times: float) -> None:
        begun: dict[str, tuple[Computation, Instruction, int]] = {}  # asynchronous, by the instruction that begins it
        fused: dict[
            str, tuple[Computation, Instruction, int]
        ] = {}  # by channel: a TPU's steps of one in several fusions
        ends: dict[str, int] = {}
        for one in computation.instructions.values():
            here = len(self._operations)
            inner = self._inside(one)
            if one.opcode == "while":
                count = trip_count(self._module, computation, one)
                if count is None:
                    self._unknown.append(one.name)
                for part in ("body", "condition"):
                    self._walk(
                        self._module.computations[one.computation(part)],
                        times * (self._trips if count is None else count),
                    )
            elif one.opcode == "conditional":
                self._costlier_branch(one, times)
            elif one.opcode in ("call", "async-start") and inner is not None:
                within = next((x for x in inner.instructions.values() if collective_kind(x)), None)
                if one.opcode == "async-start" and within is not None:
                    begun[one.name] = (inner, within, here)
                elif one.opcode == "async-start":
                    self._add(one.name, self._flops(inner), self._async_bytes(inner), times, apart=True)
                else:
                    self._walk(inner, times)
            elif kind := collective_kind(one):
                if one.opcode != kind:
                    begun[one.name] = (computation, one, here)
                else:
                    self._collect(computation, one, times, (here, here))
            elif one.opcode.endswith("-done") and one.operands and one.operands[0] in begun:
                where, start, since = begun.pop(one.operands[0])
                self._collect(where, start, times, (since, here))
            elif one.opcode == "fusion" and inner is not None:
                for where, part in self._fused_collectives(inner):
                    channel = part.attribute("channel_id") or f"{where.name}.{part.name}"
                    fused.setdefault(channel, (where, part, here))
                    ends[channel] = here
                self._add(one.name, self._flops(inner), self._fusion_bytes(computation, one, inner), times)
            elif one.opcode not in _FREE:
                self._single(computation, one, times)
        for channel, (where, part, since) in fused.items():
            self._collect(where, part, times, (since, ends[channel]))

    def _add(self, name: str, flops: float, moved: float, times: float, *, apart: bool = False) -> None:
        if flops or moved:
            self._operations.append(Operation(name=name, flops=flops, bytes=moved, times=times, apart=apart))

    def _collect(self, where: Computation, one: Instruction, times: float, window: tuple[int, int]) -> None:
        group = members(one, self._module.partitions)
        if len(group) < 2:
            return
        self._collectives.append(
            Collective(
                kind=collective_kind(one),
                sent=sent_bytes(where, one, len(group)),
                members=tuple(group),
                times=times,
                window=window,
            )
        )

    def _costlier_branch(self, one: Instruction, times: float) -> None:
        listed = one.attribute("branch_computations").strip("{}").replace("%", "").split(",")
        names = [name.strip() for name in listed if name.strip()]
        names = names or [one.computation("true_computation"), one.computation("false_computation")]
        branches = []
        for name in names:
            alone = _Counter(self._module, self._trips, self._filled)
            alone._walk(self._module.computations[name], times)
            branches.append((sum(o.flops * o.times for o in alone._operations), alone.moved(), name))
        self._walk(self._module.computations[max(branches)[2]], times)

    def moved(self) -> float:
        """Bytes so far."""
        return sum(one.bytes * one.times for one in self._operations)

    def _single(self, computation: Computation, one: Instruction, times: float) -> None:
        """An instruction by itself."""
        target = one.attribute("custom_call_target").strip('"') if one.opcode == "custom-call" else ""
        if target in _FREE_CALLS:
            return
        known = attention(computation, one, self._filled) if target else None
        if known is not None:
            self._add(one.name, *known, times)
            return
        flops = product_flops(computation, one)
        if target == "tpu_custom_call" or (target.startswith("__") and not flops):
            self._uncounted.append(one.name)
        self._add(one.name, flops, self._bytes(computation, one), times, apart=one.opcode == "copy-start")

    def _bytes(self, computation: Computation, one: Instruction) -> float:
        operands = computation.operands(one)
        if one.opcode == "copy-start":  # (there, here, context)
            there, here = one.shapes[:2]
            return sum(shape.bytes for shape in (there, here) if not shape.memory)
        if one.opcode in _SLICES:
            return one.bytes + (0 if operands[0].shape.memory else one.shape.bytes)
        if one.opcode == "dynamic-update-slice":
            part = operands[1].shape.bytes
            return (0 if operands[1].shape.memory else part) + (0 if one.shape.memory else part)
        if one.opcode == "scatter":
            count = (len(operands) - 1) // 2
            return sum(3 * update.shape.bytes for update in operands[count + 1 :] if not one.shape.memory)
        return one.bytes + sum(operand.bytes for operand in operands)

    def _inside(self, one: Instruction) -> Computation | None:
        return self._module.computations.get(one.computation("calls") or one.computation("to_apply"))

    def _nested(self, computation: Computation) -> Iterator[tuple[Computation, Instruction]]:
        """All that is fused, fusions within included."""
        for one in computation.instructions.values():
            inner = self._inside(one) if one.opcode in ("fusion", "call") else None
            if inner is None:
                yield computation, one
            else:
                yield from self._nested(inner)

    def _flops(self, computation: Computation) -> float:
        return sum(product_flops(where, one) for where, one in self._nested(computation))

    def _fused_collectives(self, computation: Computation) -> Iterator[tuple[Computation, Instruction]]:
        return ((where, one) for where, one in self._nested(computation) if collective_kind(one))

    def _fusion_bytes(self, computation: Computation, one: Instruction, inner: Computation) -> float:
        read = sum(
            operand.bytes * self._share(inner, inner.parameters[i])
            for i, operand in enumerate(computation.operands(one))
            if operand.bytes and i in inner.parameters
        )
        return read + self._written(inner, one)

    def _async_bytes(self, inner: Computation) -> float:
        """Of a computation of one instruction that goes on beside others: a slice that is fetched ahead, say."""
        return sum(self._bytes(inner, one) for one in inner.instructions.values() if one.opcode not in _FREE)

    def _share(self, computation: Computation, name: str) -> float:
        """Which share of a parameter is read, or of what is merely the parameter in another shape."""
        key = computation.name, name
        if key not in self._used:
            self._used[key] = min(
                sum(self._share_of_use(computation, name, user) for user in computation.users.get(name, [])), 1.0
            )
        return self._used[key]

    def _share_of_use(self, computation: Computation, name: str, user: Instruction) -> float:
        if user.opcode in _SLICES and user.operands[0] == name:
            return user.shape.size / max(computation.instructions[name].shape.size, 1)
        if user.opcode in _THROUGH:
            return self._share(computation, user.name)
        if user.opcode in ("dynamic-update-slice", "scatter") and user.operands[0] == name:
            return 0.0  # what it is written to, in place
        inner = self._inside(user) if user.opcode == "fusion" else None
        if inner is not None:
            places = [i for i, operand in enumerate(user.operands) if operand == name and i in inner.parameters]
            return min(sum(self._share(inner, inner.parameters[i]) for i in places), 1.0)
        return 1.0

    def _written(self, inner: Computation, one: Instruction) -> float:
        roots = inner.operands(inner.root) if inner.root.opcode == "tuple" else [inner.root]
        if len(roots) != len(one.shapes):
            return one.bytes
        return sum(
            self._written_part(inner, root, shape.bytes) for root, shape in zip(roots, one.shapes) if not shape.memory
        )

    def _written_part(self, inner: Computation, root: Instruction, whole: float) -> float:
        """Of a result that is an array with a part replaced, the part."""
        while root.opcode in _THROUGH and root.operands and root.operands[0] in inner.instructions:
            root = inner.instructions[root.operands[0]]
        if root.opcode in ("dynamic-update-slice", "scatter"):
            part = inner.instructions[root.operands[1 if root.opcode == "dynamic-update-slice" else -1]].shape
            return min(part.bytes, whole)
        nested = self._inside(root) if root.opcode == "fusion" else None
        if nested is not None and nested.root.opcode != "tuple":
            return self._written_part(nested, nested.root, whole)
        return whole
