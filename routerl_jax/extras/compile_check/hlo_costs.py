"""FLOPs, bytes moved and bytes sent of a compiled program, with loops multiplied out. XLA's own analysis counts a body once.

Everything is of one device. An instruction reads its operands from main memory and writes its result there; a fusion counts
as one instruction. Arrays whose layout puts them elsewhere (a TPU's vector memory) don't count. Of a slice, or of an update
in place, only the part that is touched counts. FLOPs are those of matrix products and custom kernels, from their shapes; a
multiply-add is two. Everything else (norms, rotary embeddings, softmax, optimisers) is bound by memory: only its bytes count.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import re
from collections.abc import Iterator, Sequence

import numpy as np

from routerl_jax.extras.compile_check.hlo import Computation, Instruction, Module, Shape, parse, trip_count

# --- matrix products and custom kernels ---


_LANES = 128


def product_flops(computation: Computation, instruction: Instruction) -> float:
    """FLOPs of a `dot`, a `convolution` or a library's matrix product; 0 for all others. For custom kernels see `kernel`."""
    shapes = [operand.shape for operand in computation.operands(instruction) if operand.shapes]
    if instruction.opcode == "dot":
        axes = re.findall(r"\d+", instruction.attribute("lhs_contracting_dims"))
        return 2.0 * instruction.shape.size * math.prod(shapes[0].dims[int(axis)] for axis in axes)
    if instruction.opcode == "convolution":
        return _convolution(instruction, shapes[0], shapes[1])
    target = instruction.attribute("custom_call_target").strip('"')
    if instruction.opcode == "custom-call" and re.search(r"cublas|onednn\$matmul|gemm", target):
        match = re.search(r'"lhs_contracting_dimensions":(\[[^\]]*\])', instruction.rest)
        axes = [int(axis) for axis in json.loads(match.group(1))] if match else [len(shapes[0].dims) - 1]
        return 2.0 * instruction.shape.size * math.prod(shapes[0].dims[axis] for axis in axes)
    return 0.0


def kernel(
    computation: Computation, instruction: Instruction, filled: float = 1.0, grouped: float = 1.0
) -> tuple[float, float] | None:
    """FLOPs and bytes of main memory of a custom call that is a kernel for attention or experts; None for other kernels.

    - Splash attention (training) computes the blocks that its causal mask leaves, whatever segments are in them: two products
      forward; five backward, of which two are computed in both of its kernels.
    - Ragged paged attention (decoding, prefill) reads every row's keys and values once, and multiplies the queries with them.
    - cuDNN's attention is counted without a mask.
    - Grouped products (`jax.lax.ragged_dot` and its gradients) read all groups' matrices, and the rows that are in a group.

    Args:
      filled: for ragged paged attention, the share of each row's pages that holds tokens.
      grouped: for grouped products, the share of the rows that are in a group.
    """
    operands = computation.operands(instruction)
    moved = instruction.bytes + sum(operand.bytes for operand in operands)
    target = instruction.attribute("custom_call_target").strip('"')
    if target.startswith("__cudnn$fmha"):
        q, k = operands[0].shape, operands[1].shape
        products = 5 if "Backward" in target else 2
        return 2.0 * products * q.size * k.dims[1], moved  # [rows, tokens, heads, width]
    if target != "tpu_custom_call":
        return None
    if instruction.name.startswith("splash_mha"):
        return _splash(instruction, operands), moved
    if "ragged_paged_attention" in instruction.name:
        return _paged(instruction, operands, filled)
    if instruction.name.startswith("ragged-dot"):
        return _grouped(instruction, operands, grouped)
    return None


def _grouped(instruction: Instruction, operands: Sequence[Instruction], grouped: float) -> tuple[float, float]:
    shapes = [instruction.shape, *(operand.shape for operand in operands)]
    matrices = next((shape for shape in shapes if len(shape.dims) == 3), None)
    if matrices is None:  # the table of the groups' offsets
        return 0.0, sum(shape.bytes for shape in shapes)
    tables = [shape for shape in shapes if len(shape.dims) == 2]  # of rows, in and out
    moved = matrices.bytes + grouped * sum(shape.bytes for shape in tables)
    return 2.0 * grouped * tables[0].dims[0] * math.prod(matrices.dims[1:]), moved


def _convolution(instruction: Instruction, lhs: Shape, rhs: Shape) -> float:
    """The TPU compiler writes products as convolutions, with batch and head axes as spatial ones. Only positions of the window
    on an entry count: those on padding, and those between dilated entries, don't."""
    labels = instruction.attribute("dim_labels")
    sides = re.fullmatch(r"(\w+)_(\w+)->(\w+)", labels)
    if sides is None:
        raise ValueError(f"the convolution {instruction.name} has dim_labels={labels!r}, which can't be read")
    lhs_labels, rhs_labels, output_labels = sides.groups()
    window = dict(re.findall(r"(\w+)=(\S+)", instruction.attribute("window").strip("{}")))
    spatial = sorted(label for label in lhs_labels if label.isdigit())

    def per_axis(key: str, default: str) -> list[str]:
        return window[key].split("x") if key in window else [default] * len(spatial)

    strides, pads = per_axis("stride", "1"), per_axis("pad", "0_0")
    lhs_dilation, rhs_dilation = per_axis("lhs_dilate", "1"), per_axis("rhs_dilate", "1")
    taps = 1
    for i, label in enumerate(spatial):
        inside = lhs.dims[lhs_labels.index(label)]
        positions = np.arange(instruction.shape.dims[output_labels.index(label)])[:, None] * int(strides[i])
        positions = (
            positions + np.arange(rhs.dims[rhs_labels.index(label)]) * int(rhs_dilation[i]) - int(pads[i].split("_")[0])
        )
        dilation = int(lhs_dilation[i])
        taps *= int(((positions >= 0) & (positions <= (inside - 1) * dilation) & (positions % dilation == 0)).sum())
    batch, features = (instruction.shape.dims[output_labels.index(label)] for label in "bf")
    return 2.0 * taps * batch * features * rhs.dims[rhs_labels.index("i")]


def _splash(instruction: Instruction, operands: Sequence[Instruction]) -> float:
    arrays = [
        operand.shape.dims for operand in operands if len(operand.shape.dims) in (3, 4) and "f" in operand.shape.dtype
    ]
    q, k = arrays[0], arrays[1]  # [rows,] heads, tokens, width
    queries, keys, width = q[-2], k[-2], q[-1]
    kind = "dkv" if "_dkv" in instruction.name else "dq" if "_dq" in instruction.name else "fwd"
    suffix = "" if kind == "fwd" else f"_{kind}"
    rows, columns = (
        _block(instruction, f"block_{side}{suffix}", size) for side, size in (("q", queries), ("kv", keys))
    )
    grid = -(-queries // rows), -(-keys // columns)
    causal = any(dims in ((queries, _LANES), (8, queries)) for dims in (o.shape.dims for o in operands if _is_ids(o)))
    blocks = grid[0] * grid[1]
    if causal:  # it has the queries' positions: the mask is causal, and blocks above the diagonal are left out
        blocks = sum(min(-(-(i + 1) * rows // columns), grid[1]) for i in range(grid[0]))
    visited = [o.shape.dims for o in operands if o.shape.dtype == "s8" and len(o.shape.dims) == 3]
    if visited:  # the grid is no wider than the most blocks that any row of it visits
        blocks = min(blocks, visited[0][-2] * visited[0][-1])
    products = {"fwd": 2, "dq": 3, "dkv": 4}[kind]
    return 2.0 * products * math.prod(q[:-2]) * width * blocks * rows * columns


def _is_ids(operand: Instruction) -> bool:
    return operand.shape.dtype == "s32" and len(operand.shape.dims) == 2


def _block(instruction: Instruction, name: str, size: int) -> int:
    match = re.search(rf'{name}\\*": (\d+)', instruction.rest)
    return min(int(match.group(1)), size) if match else size


def _paged(instruction: Instruction, operands: Sequence[Instruction], filled: float) -> tuple[float, float]:
    table = next(o.shape.dims for o in operands if _is_ids(o))  # [rows, pages of a row]
    pages = max((o.shape for o in operands), key=lambda shape: len(shape.dims))  # [all, tokens, k and v heads, width]
    queries, heads, width = instruction.shape.dims
    rows, tokens = table[0], queries // table[0]
    cached = max(table[1] * pages.dims[1] * filled, tokens)
    pairs = queries * (cached - (tokens - 1) / 2)
    item_bytes = pages.bytes / pages.size
    moved = rows * cached * pages.dims[2] * width * item_bytes
    moved += instruction.bytes + sum(o.bytes for o in operands if o.shape is not pages)
    return 4.0 * heads * width * pairs, moved


# --- Collectives of a compiled program: which devices take part, and how many bytes they send and move. ---


COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")


def collective_kind(instruction: Instruction) -> str:
    """Which of COLLECTIVES an instruction is or begins; empty for all others, and for the end of a collective (`..-done`)."""
    opcode = instruction.opcode.removesuffix("-start").removeprefix("ragged-")
    return opcode if opcode in COLLECTIVES else ""


def kind_in(computation: Computation, instruction: Instruction) -> str:
    """`collective_kind`; "reduce-scatter" for an all-reduce of which only slices are the computation's results.

    TPU compilers write a reduce-scatter like this, as a fusion of an all-reduce with slices.
    """
    kind = collective_kind(instruction)
    if kind != "all-reduce":
        return kind
    results = computation.operands(computation.root) if computation.root.opcode == "tuple" else [computation.root]
    result_names, unvisited = {result.name for result in results}, [instruction]
    while unvisited:
        users = computation.users.get(unvisited.pop().name, [])
        if not users:
            return kind
        for user in users:
            if user.opcode in ("get-tuple-element", "bitcast"):
                unvisited.append(user)
            elif user.opcode != "dynamic-slice" or user.name not in result_names:
                return kind
    return "reduce-scatter"


def result_shapes(instruction: Instruction) -> list[tuple[int, ...]]:
    """Shapes of a collective's results; a combined one has several. `..-start` lists its operands before them."""
    shapes = [shape for shape in instruction.shapes if shape.dims or shape.dtype not in ("u32", "s32")]
    if instruction.opcode.endswith("-start") and instruction.opcode != "all-reduce-start":
        shapes = shapes[len(shapes) // 2 :]
    return [shape.dims for shape in shapes]


def sent_bytes(computation: Computation, instruction: Instruction, group: int) -> float:
    """Bytes that each of the `group` devices must send: the least of any algorithm on a ring.

    With n devices, an all-gather or a reduce-scatter sends (n - 1) / n of the whole array, and an all-reduce twice that. An
    all-to-all sends (n - 1) / n of what a device holds, and a permutation sends all of it. (Chan et al., Collective
    communication: theory, practice, and experience, 2007, table I.)
    """
    kind, n = kind_in(computation, instruction), max(group, 1)
    operands = computation.operands(instruction)
    if instruction.opcode.startswith("ragged-"):  # operand, output, offsets and sizes
        operands = operands[:1]
    operand_bytes = sum(shape.bytes for operand in operands for shape in operand.shapes)
    if kind in ("collective-permute", "collective-broadcast"):
        return operand_bytes
    share = (n - 1) / n
    return {"all-gather": operand_bytes * n, "all-reduce": 2 * operand_bytes}.get(kind, operand_bytes) * share


def moved_bytes(computation: Computation, instruction: Instruction) -> float:
    """Bytes that a collective reads from a device's main memory and writes to it."""
    if instruction.opcode.endswith("-start") and instruction.opcode != "all-reduce-start":
        return instruction.bytes  # operands and results
    return instruction.bytes + sum(operand.bytes for operand in computation.operands(instruction))


def members(instruction: Instruction, partitions: int) -> list[int]:
    """The devices that take part, as numbers in the program's order of devices.

    Of several groups it is the first one; of a permutation, the first pair of two devices.
    """
    pairs = re.findall(r"\{(\d+),(\d+)\}", instruction.attribute("source_target_pairs"))
    if pairs:
        return next(([int(a), int(b)] for a, b in pairs if a != b), [0])
    groups = instruction.attribute("replica_groups")
    listed = re.match(r"\{\{([\d,]+)\}", groups)
    if listed:
        return [int(number) for number in listed.group(1).split(",")]
    iota = re.match(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", groups)
    if iota:
        shape, dims = (tuple(map(int, iota.group(i).split(","))) for i in (1, 2))
        order = tuple(map(int, iota.group(3).split(","))) if iota.group(3) else tuple(range(len(dims)))
        return np.arange(math.prod(dims)).reshape(dims).transpose(order).reshape(shape)[0].tolist()
    mesh = re.match(r"mesh\[([^\]]*)\](.*)\{(.*)\}", groups)
    if mesh:
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh.group(1))}
        within = re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", mesh.group(3))
        if not any(part[1] for part in within) and not re.search(r"device_ids", mesh.group(2)):
            chosen = {name for name, *_ in within}
            every = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
            return every[tuple(slice(None) if name in chosen else 0 for name in sizes)].ravel().tolist()
        size = math.prod(int(part[2]) if part[1] else sizes[part[0]] for part in within)
        return list(range(size))
    return list(range(partitions))


# --- the count of a program ---


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
      members: devices that take part (`members`).
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
            for container, collective in self._nested(inner):
                if collective_kind(collective):
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
