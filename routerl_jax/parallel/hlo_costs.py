"""FLOPs, bytes moved and bytes sent of a compiled program, with loops multiplied out. XLA's own analysis counts a body once.

Everything is of one device. An instruction reads its operands from main memory and writes its result there; a fusion counts
as one instruction. Arrays whose layout puts them elsewhere (a TPU's vector memory) don't count. Of a slice, or of an update
in place, only the part that is touched counts.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator

from routerl_jax.parallel.hlo_collectives import collective_kind, kind_in, members, moved_bytes, sent_bytes
from routerl_jax.parallel.hlo_loops import trip_count
from routerl_jax.parallel.hlo_products import kernel, product_flops
from routerl_jax.parallel.hlo_text import Computation, Instruction, Module, parse

# Instructions and custom calls that neither compute nor move anything.
_FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"),
    *("optimization-barrier", "add-dependency", "domain"),
    *("copy-done", "async-done", "async-update", "send-done", "recv-done"),
}
_FREE_CALLS = {
    *("AllocateBuffer", "AssumeGatherIndicesInBound", "ConcatBitcast", "GatherScatterIndicesBitpacked"),
    *("Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape", "AsyncCollectiveStart", "AsyncCollectiveDone"),
}
_SLICES = ("dynamic-slice", "slice", "gather")
_THROUGH = ("bitcast", "convert", "copy", "reshape", "transpose", "negate")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operation:
    """An instruction that computes or moves something. It runs `times` times; `flops` and `bytes` are of one run."""

    name: str
    flops: float
    bytes: float
    times: float
    asynchronous: bool = False  # a copy that goes on while other instructions run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """A collective. It runs `times` times; the numbers are of one run.

    Attributes:
      sent: bytes that leave each device.
      members: devices that take part (hlo_collectives.members).
      window: the operations between its start and its end, which may run meanwhile: indices into Costs.operations, of the
        first and of the one after the last.
      moved: bytes of main memory that it reads and writes; 0 in a fusion, whose bytes have them.
    """

    kind: str
    sent: float
    members: tuple[int, ...]
    times: float
    window: tuple[int, int]
    moved: float = 0.0

    @property
    def overlaps(self) -> bool:
        """Whether any operation may run meanwhile."""
        return self.window[0] < self.window[1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    """A program on one device."""

    operations: tuple[Operation, ...]
    collectives: tuple[Collective, ...]
    unknown_loops: tuple[str, ...] = ()  # loops whose trip count is not in the text: `trips` of `count` was used
    uncounted: tuple[str, ...] = ()  # custom kernels whose FLOPs are not known

    @property
    def flops(self) -> float:
        """FLOPs of matrix products and attention."""
        return sum(one.flops * one.times for one in self.operations)

    @property
    def bytes(self) -> float:
        """Bytes read from and written to main memory."""
        return sum(one.bytes * one.times for one in self.operations) + sum(
            one.moved * one.times for one in self.collectives
        )

    @property
    def sent(self) -> dict[str, float]:
        """Bytes sent, by kind of collective."""
        by_kind: dict[str, float] = collections.defaultdict(float)
        for one in self.collectives:
            by_kind[one.kind] += one.sent * one.times
        return dict(by_kind)


def count(program: str | Module, *, trips: float = 1, filled: float = 1.0, grouped: float = 1.0) -> Costs:
    """Counts a compiled program: its text (`compiled.as_text()`, or a dump), or a module that was parsed from it.

    Of a conditional, the branch with more FLOPs counts.

    Args:
      trips: iterations of loops whose number only a run can tell.
      filled: share of the cache's rows that holds tokens, for kernels that read no more (generation/pages.py).
      grouped: share of the rows of grouped products that are in a group: those of the device's own experts (models/experts.py).

    Raises:
      ValueError: the text is no program.
    """
    return _Counter(parse(program) if isinstance(program, str) else program, trips, filled, grouped).run()


class _Windows:
    """Collectives of one computation that have begun: where each is, and how many operations came before it."""

    def __init__(self) -> None:
        self._begun: dict[str, tuple[Computation, Instruction, int]] = {}  # by the instruction that their end names
        # Collectives in fusions, by channel, and the last step of each: a TPU may do one in steps, in several fusions.
        self._fused: dict[str, tuple[Computation, Instruction, int]] = {}
        self._ends: dict[str, int] = {}

    def open(self, name: str, where: Computation, one: Instruction, here: int) -> None:
        """The instruction `name` begins the collective `one`."""
        self._begun[name] = where, one, here

    def is_open(self, name: str) -> bool:
        """Whether `name` has begun a collective."""
        return name in self._begun

    def rename(self, name: str, new: str) -> None:
        """Its end will name the instruction `new`."""
        self._begun[new] = self._begun.pop(name)

    def close(self, name: str) -> tuple[Computation, Instruction, int]:
        """A collective that ends: where it is, and the number of operations before its start."""
        return self._begun.pop(name)

    def step(self, where: Computation, one: Instruction, here: int) -> None:
        """A fusion does the collective `one`, or a step of it."""
        channel = one.attribute("channel_id") or f"{where.name}.{one.name}"
        self._fused.setdefault(channel, (where, one, here))
        self._ends[channel] = here

    def fused(self) -> Iterator[tuple[Computation, Instruction, tuple[int, int]]]:
        """The collectives in fusions, with the operations between their first and last step."""
        for channel, (where, one, since) in self._fused.items():
            yield where, one, (since, self._ends[channel])


class _Counter:
    """Walks all computations except those inside of fusions and reductions."""

    def __init__(self, module: Module, trips: float, filled: float, grouped: float) -> None:
        self._module, self._trips, self._filled, self._grouped = module, trips, filled, grouped
        self._operations: list[Operation] = []
        self._collectives: list[Collective] = []
        self._unknown: list[str] = []
        self._uncounted: list[str] = []
        self._used: dict[tuple[str, str], float] = {}

    def run(self) -> Costs:
        self._walk(self._module.entry, 1.0)
        return self.costs()

    def costs(self) -> Costs:
        """What has been counted so far."""
        return Costs(
            operations=tuple(self._operations),
            collectives=tuple(self._collectives),
            unknown_loops=tuple(dict.fromkeys(self._unknown)),
            uncounted=tuple(dict.fromkeys(self._uncounted)),
        )

    def _walk(self, computation: Computation, times: float) -> None:
        windows = _Windows()
        for one in computation.instructions.values():
            self._visit(computation, one, times, windows)
        for where, part, window in windows.fused():
            self._collect(where, part, times, window, fused=True)

    def _visit(self, computation: Computation, one: Instruction, times: float, windows: _Windows) -> None:
        here, inner = len(self._operations), self._inside(one)
        if one.opcode == "while":
            self._loop(computation, one, times)
        elif one.opcode == "conditional":
            self._costlier_branch(one, times)
        elif one.opcode == "call" and inner is not None:
            self._walk(inner, times)
        elif one.opcode == "async-start" and inner is not None:
            within = next((x for x in inner.instructions.values() if collective_kind(x)), None)
            if within is not None:
                windows.open(one.name, inner, within, here)
            else:
                self._add(one.name, self._flops(inner), self._async_bytes(inner), times, asynchronous=True)
        elif collective_kind(one):
            if one.opcode.endswith("-start"):
                windows.open(one.name, computation, one, here)
            else:
                self._collect(computation, one, times, (here, here))
        elif one.opcode.endswith(("-done", "-update")) and one.operands and windows.is_open(one.operands[0]):
            if one.opcode.endswith("-update"):
                windows.rename(one.operands[0], one.name)
            else:
                where, start, since = windows.close(one.operands[0])
                self._collect(where, start, times, (since, here))
        elif one.opcode == "fusion" and inner is not None:
            for where, part in self._fused_collectives(inner):
                windows.step(where, part, here)
            self._add(one.name, self._flops(inner), self._fusion_bytes(computation, one, inner), times)
        elif one.opcode not in _FREE:
            self._single(computation, one, times)

    def _loop(self, computation: Computation, one: Instruction, times: float) -> None:
        count = trip_count(self._module, computation, one)
        if count is None:
            self._unknown.append(one.name)
        for part in ("body", "condition"):
            inner = self._module.computations[one.computation(part)]
            self._walk(inner, times * (self._trips if count is None else count))

    def _add(self, name: str, flops: float, moved: float, times: float, *, asynchronous: bool = False) -> None:
        if flops or moved:
            self._operations.append(
                Operation(name=name, flops=flops, bytes=moved, times=times, asynchronous=asynchronous)
            )

    def _collect(
        self, where: Computation, one: Instruction, times: float, window: tuple[int, int], *, fused: bool = False
    ) -> None:
        group = members(one, self._module.partitions)
        if len(group) < 2:
            return
        self._collectives.append(
            Collective(
                kind=kind_in(where, one),
                sent=sent_bytes(where, one, len(group)),
                members=tuple(group),
                times=times,
                window=window,
                moved=0.0 if fused else moved_bytes(where, one),
            )
        )

    def _costlier_branch(self, one: Instruction, times: float) -> None:
        listed = one.attribute("branch_computations").strip("{}").replace("%", "").split(",")
        names = [name.strip() for name in listed if name.strip()]
        names = names or [one.computation("true_computation"), one.computation("false_computation")]
        branches = []
        for name in names:
            alone = _Counter(self._module, self._trips, self._filled, self._grouped)
            alone._walk(self._module.computations[name], times)
            costs = alone.costs()
            branches.append((costs.flops, costs.bytes, name))
        self._walk(self._module.computations[max(branches)[2]], times)

    def _single(self, computation: Computation, one: Instruction, times: float) -> None:
        """An instruction that is no fusion."""
        target = one.attribute("custom_call_target").strip('"') if one.opcode == "custom-call" else ""
        if target in _FREE_CALLS:
            return
        known = kernel(computation, one, self._filled, self._grouped) if target else None
        if known is not None:
            self._add(one.name, *known, times)
            return
        flops = product_flops(computation, one)
        if target == "tpu_custom_call" or (target.startswith("__") and not flops):
            self._uncounted.append(one.name)
        self._add(one.name, flops, self._bytes(computation, one), times, asynchronous=one.opcode == "copy-start")

    def _bytes(self, computation: Computation, one: Instruction) -> float:
        operands = computation.operands(one)
        if one.opcode == "copy-start":  # (destination, source, context)
            return sum(shape.bytes for shape in one.shapes[:2] if not shape.memory)
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
        """The instructions of a fusion, with those of fusions inside of it."""
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
        """Bytes of a computation of one instruction that runs beside others, such as a slice that is fetched ahead."""
        return sum(self._bytes(inner, one) for one in inner.instructions.values() if one.opcode not in _FREE)

    def _share(self, computation: Computation, name: str) -> float:
        """The share of a value (a parameter, or the same in another shape) that is read."""
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
            return 0.0  # updated in place, and not read
        inner = self._inside(user) if user.opcode == "fusion" else None
        if inner is not None:
            indices = [i for i, operand in enumerate(user.operands) if operand == name and i in inner.parameters]
            return min(sum(self._share(inner, inner.parameters[i]) for i in indices), 1.0)
        return 1.0

    def _written(self, inner: Computation, one: Instruction) -> float:
        roots = inner.operands(inner.root) if inner.root.opcode == "tuple" else [inner.root]
        if len(roots) != len(one.shapes):
            return one.bytes
        return sum(
            self._written_part(inner, root, shape.bytes) for root, shape in zip(roots, one.shapes) if not shape.memory
        )

    def _written_part(self, inner: Computation, root: Instruction, whole: float) -> float:
        """Bytes of a result that are written: of an update in place, the updated part."""
        while root.opcode in _THROUGH and root.operands and root.operands[0] in inner.instructions:
            root = inner.instructions[root.operands[0]]
        if root.opcode in ("dynamic-update-slice", "scatter"):
            part = inner.instructions[root.operands[1 if root.opcode == "dynamic-update-slice" else -1]].shape
            return min(part.bytes, whole)
        nested = self._inside(root) if root.opcode == "fusion" else None
        if nested is not None and nested.root.opcode != "tuple":
            return self._written_part(nested, nested.root, whole)
        return whole
