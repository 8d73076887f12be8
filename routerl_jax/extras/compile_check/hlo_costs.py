"""FLOPs, bytes moved and bytes sent of a compiled program, with loops multiplied out. XLA's own analysis counts a body once.

Everything is of one device. An instruction reads its operands from main memory and writes its result there; a fusion counts
as one instruction. Arrays whose layout puts them elsewhere (a TPU's vector memory) don't count. Of a slice, or of an update
in place, only the part that is touched counts.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator

from routerl_jax.extras.compile_check.hlo_collectives import collective_kind, kind_in, members, moved_bytes, sent_bytes
from routerl_jax.extras.compile_check.hlo_loops import trip_count
from routerl_jax.extras.compile_check.hlo_products import kernel, product_flops
from routerl_jax.extras.compile_check.hlo_text import Computation, Instruction, Module, parse

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
        return sum(operation.flops * operation.times for operation in self.operations)

    @property
    def bytes(self) -> float:
        """Bytes read from and written to main memory."""
        moved = sum(operation.bytes * operation.times for operation in self.operations)
        return moved + sum(collective.moved * collective.times for collective in self.collectives)

    @property
    def sent(self) -> dict[str, float]:
        """Bytes sent, by kind of collective."""
        by_kind: dict[str, float] = collections.defaultdict(float)
        for collective in self.collectives:
            by_kind[collective.kind] += collective.sent * collective.times
        return dict(by_kind)


def count(program: str | Module, *, trips: float = 1, filled: float = 1.0, grouped: float = 1.0) -> Costs:
    """Counts a compiled program: its text (`compiled.as_text()`, or a dump), or a module that was parsed from it.

    Of a conditional, the branch with more FLOPs counts.

    Args:
      trips: iterations of loops whose number only a run can tell.
      filled: share of the cache's rows that holds tokens, for kernels that read no more (engine/pages.py).
      grouped: share of the rows of grouped products that are in a group: those of the device's own experts (models/experts.py).

    Raises:
      ValueError: the text is no program.
    """
    return _Counter(parse(program) if isinstance(program, str) else program, trips, filled, grouped).run()


class _Windows:
    """Open collectives of one computation: the computation that holds each, and how many operations came before it."""

    def __init__(self) -> None:
        self._begun: dict[str, tuple[Computation, Instruction, int]] = {}  # by the instruction that their end names
        # Collectives in fusions, by channel, and the last step of each: a TPU may do one in steps, in several fusions.
        self._fused: dict[str, tuple[Computation, Instruction, int]] = {}
        self._ends: dict[str, int] = {}

    def open(self, name: str, computation: Computation, instruction: Instruction, index: int) -> None:
        """The instruction `name` begins the collective `instruction`, before operation number `index`."""
        self._begun[name] = computation, instruction, index

    def is_open(self, name: str) -> bool:
        """Whether `name` has begun a collective."""
        return name in self._begun

    def rename(self, name: str, new: str) -> None:
        """Its end will name the instruction `new`."""
        self._begun[new] = self._begun.pop(name)

    def close(self, name: str) -> tuple[Computation, Instruction, int]:
        """A collective that ends: its computation, its instruction, and the number of operations before its start."""
        return self._begun.pop(name)

    def step(self, computation: Computation, instruction: Instruction, index: int) -> None:
        """The fusion at operation number `index` does the collective `instruction`, or a step of it."""
        channel = instruction.attribute("channel_id") or f"{computation.name}.{instruction.name}"
        self._fused.setdefault(channel, (computation, instruction, index))
        self._ends[channel] = index

    def fused(self) -> Iterator[tuple[Computation, Instruction, tuple[int, int]]]:
        """The collectives in fusions, with the operations between their first and last step."""
        for channel, (computation, instruction, first) in self._fused.items():
            yield computation, instruction, (first, self._ends[channel])


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
        """The costs that have been counted so far."""
        return Costs(
            operations=tuple(self._operations),
            collectives=tuple(self._collectives),
            unknown_loops=tuple(dict.fromkeys(self._unknown)),
            uncounted=tuple(dict.fromkeys(self._uncounted)),
        )

    def _walk(self, computation: Computation, times: float) -> None:
        windows = _Windows()
        for instruction in computation.instructions.values():
            self._visit(computation, instruction, times, windows)
        for container, collective, window in windows.fused():
            self._collect(container, collective, times, window, fused=True)

    def _visit(self, computation: Computation, instruction: Instruction, times: float, windows: _Windows) -> None:
        index, inner = len(self._operations), self._called_computation(instruction)
        if instruction.opcode == "while":
            self._loop(computation, instruction, times)
        elif instruction.opcode == "conditional":
            self._costlier_branch(instruction, times)
        elif instruction.opcode == "call" and inner is not None:
            self._walk(inner, times)
        elif instruction.opcode == "async-start" and inner is not None:
            collective = next((x for x in inner.instructions.values() if collective_kind(x)), None)
            if collective is not None:
                windows.open(instruction.name, inner, collective, index)
            else:
                self._add(instruction.name, self._flops(inner), self._async_bytes(inner), times, asynchronous=True)
        elif collective_kind(instruction):
            if instruction.opcode.endswith("-start"):
                windows.open(instruction.name, computation, instruction, index)
            else:
                self._collect(computation, instruction, times, (index, index))
        elif (
            instruction.opcode.endswith(("-done", "-update"))
            and instruction.operands
            and windows.is_open(instruction.operands[0])
        ):
            if instruction.opcode.endswith("-update"):
                windows.rename(instruction.operands[0], instruction.name)
            else:
                container, start, first = windows.close(instruction.operands[0])
                self._collect(container, start, times, (first, index))
        elif instruction.opcode == "fusion" and inner is not None:
            for container, collective in self._fused_collectives(inner):
                windows.step(container, collective, index)
            self._add(instruction.name, self._flops(inner), self._fusion_bytes(computation, instruction, inner), times)
        elif instruction.opcode not in _FREE:
            self._single(computation, instruction, times)

    def _loop(self, computation: Computation, instruction: Instruction, times: float) -> None:
        count = trip_count(self._module, computation, instruction)
        if count is None:
            self._unknown.append(instruction.name)
        for part in ("body", "condition"):
            inner = self._module.computations[instruction.computation(part)]
            self._walk(inner, times * (self._trips if count is None else count))

    def _add(self, name: str, flops: float, moved: float, times: float, *, asynchronous: bool = False) -> None:
        if flops or moved:
            self._operations.append(
                Operation(name=name, flops=flops, bytes=moved, times=times, asynchronous=asynchronous)
            )

    def _collect(
        self,
        computation: Computation,
        instruction: Instruction,
        times: float,
        window: tuple[int, int],
        *,
        fused: bool = False,
    ) -> None:
        group = members(instruction, self._module.partitions)
        if len(group) < 2:
            return
        self._collectives.append(
            Collective(
                kind=kind_in(computation, instruction),
                sent=sent_bytes(computation, instruction, len(group)),
                members=tuple(group),
                times=times,
                window=window,
                moved=0.0 if fused else moved_bytes(computation, instruction),
            )
        )

    def _costlier_branch(self, instruction: Instruction, times: float) -> None:
        listed = instruction.attribute("branch_computations").strip("{}").replace("%", "").split(",")
        names = [name.strip() for name in listed if name.strip()]
        names = names or [instruction.computation("true_computation"), instruction.computation("false_computation")]
        branches = []
        for name in names:
            alone = _Counter(self._module, self._trips, self._filled, self._grouped)
            alone._walk(self._module.computations[name], times)
            costs = alone.costs()
            branches.append((costs.flops, costs.bytes, name))
        self._walk(self._module.computations[max(branches)[2]], times)

    def _single(self, computation: Computation, instruction: Instruction, times: float) -> None:
        """An instruction that is no fusion."""
        target = instruction.attribute("custom_call_target").strip('"') if instruction.opcode == "custom-call" else ""
        if target in _FREE_CALLS:
            return
        counted = kernel(computation, instruction, self._filled, self._grouped) if target else None
        if counted is not None:
            self._add(instruction.name, *counted, times)
            return
        flops = product_flops(computation, instruction)
        if target == "tpu_custom_call" or (target.startswith("__") and not flops):
            self._uncounted.append(instruction.name)
        self._add(
            instruction.name,
            flops,
            self._bytes(computation, instruction),
            times,
            asynchronous=instruction.opcode == "copy-start",
        )

    def _bytes(self, computation: Computation, instruction: Instruction) -> float:
        operands = computation.operands(instruction)
        if instruction.opcode == "copy-start":  # (destination, source, context)
            return sum(shape.bytes for shape in instruction.shapes[:2] if not shape.memory)
        if instruction.opcode in _SLICES:
            return instruction.bytes + (0 if operands[0].shape.memory else instruction.shape.bytes)
        if instruction.opcode == "dynamic-update-slice":
            part = operands[1].shape.bytes
            return (0 if operands[1].shape.memory else part) + (0 if instruction.shape.memory else part)
        if instruction.opcode == "scatter":
            count = (len(operands) - 1) // 2
            return sum(3 * update.shape.bytes for update in operands[count + 1 :] if not instruction.shape.memory)
        return instruction.bytes + sum(operand.bytes for operand in operands)

    def _called_computation(self, instruction: Instruction) -> Computation | None:
        return self._module.computations.get(instruction.computation("calls") or instruction.computation("to_apply"))

    def _nested(self, computation: Computation) -> Iterator[tuple[Computation, Instruction]]:
        """The instructions of a fusion, with those of fusions inside of it."""
        for instruction in computation.instructions.values():
            inner = self._called_computation(instruction) if instruction.opcode in ("fusion", "call") else None
            if inner is None:
                yield computation, instruction
            else:
                yield from self._nested(inner)

    def _flops(self, computation: Computation) -> float:
        return sum(product_flops(container, instruction) for container, instruction in self._nested(computation))

    def _fused_collectives(self, computation: Computation) -> Iterator[tuple[Computation, Instruction]]:
        return (
            (container, instruction)
            for container, instruction in self._nested(computation)
            if collective_kind(instruction)
        )

    def _fusion_bytes(self, computation: Computation, instruction: Instruction, inner: Computation) -> float:
        read = sum(
            operand.bytes * self._read_share(inner, inner.parameters[i])
            for i, operand in enumerate(computation.operands(instruction))
            if operand.bytes and i in inner.parameters
        )
        return read + self._written_bytes(inner, instruction)

    def _async_bytes(self, inner: Computation) -> float:
        """Bytes of a computation of one instruction that runs while others run, such as a slice that is fetched early."""
        return sum(
            self._bytes(inner, instruction)
            for instruction in inner.instructions.values()
            if instruction.opcode not in _FREE
        )

    def _read_share(self, computation: Computation, name: str) -> float:
        """The share of a value (a parameter, or the same in another shape) that is read."""
        key = computation.name, name
        if key not in self._used:
            self._used[key] = min(
                sum(self._read_share_of_use(computation, name, user) for user in computation.users.get(name, [])), 1.0
            )
        return self._used[key]

    def _read_share_of_use(self, computation: Computation, name: str, user: Instruction) -> float:
        if user.opcode in _SLICES and user.operands[0] == name:
            return user.shape.size / max(computation.instructions[name].shape.size, 1)
        if user.opcode in _THROUGH:
            return self._read_share(computation, user.name)
        if user.opcode in ("dynamic-update-slice", "scatter") and user.operands[0] == name:
            return 0.0  # updated in place, and not read
        inner = self._called_computation(user) if user.opcode == "fusion" else None
        if inner is not None:
            indices = [i for i, operand in enumerate(user.operands) if operand == name and i in inner.parameters]
            return min(sum(self._read_share(inner, inner.parameters[i]) for i in indices), 1.0)
        return 1.0

    def _written_bytes(self, inner: Computation, instruction: Instruction) -> float:
        roots = inner.operands(inner.root) if inner.root.opcode == "tuple" else [inner.root]
        if len(roots) != len(instruction.shapes):
            return instruction.bytes
        return sum(
            self._written_bytes_of_root(inner, root, shape.bytes)
            for root, shape in zip(roots, instruction.shapes)
            if not shape.memory
        )

    def _written_bytes_of_root(self, inner: Computation, root: Instruction, whole: float) -> float:
        """Bytes of a result that are written: of an update in place, the updated part."""
        while root.opcode in _THROUGH and root.operands and root.operands[0] in inner.instructions:
            root = inner.instructions[root.operands[0]]
        if root.opcode in ("dynamic-update-slice", "scatter"):
            part = inner.instructions[root.operands[1 if root.opcode == "dynamic-update-slice" else -1]].shape
            return min(part.bytes, whole)
        nested = self._called_computation(root) if root.opcode == "fusion" else None
        if nested is not None and nested.root.opcode != "tuple":
            return self._written_bytes_of_root(nested, nested.root, whole)
        return whole
