"""Collectives of a compiled program: which devices take part, and how many bytes they send and move."""

from __future__ import annotations

import math
import re

import numpy as np

from routerl_jax.extras.compile_check.hlo_text import Computation, Instruction

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
