"""Collectives of a compiled program: which devices take part, and what they send."""

from __future__ import annotations

import math
import re

import numpy as np

from routerl_jax.parallel.hlo_text import Computation, Instruction

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")


def collective_kind(one: Instruction) -> str:
    """Which of COLLECTIVES an instruction is or begins; empty if none. What ends one (`..-done`) is none."""
    opcode = one.opcode.removesuffix("-start").removeprefix("ragged-")
    return opcode if opcode in COLLECTIVES else ""


def result_shapes(one: Instruction) -> list[tuple[int, ...]]:
    """Shapes of what a collective gives; a combined one has several. Of one that begins, the operands come first."""
    shapes = [shape for shape in one.shapes if shape.dims or shape.dtype not in ("u32", "s32")]
    if one.opcode.endswith("-start") and one.opcode != "all-reduce-start":
        shapes = shapes[len(shapes) // 2 :]
    return [shape.dims for shape in shapes]


def sent_bytes(computation: Computation, one: Instruction, group: int) -> float:
    """Bytes that each device of a group must send, by the least that an algorithm on a ring takes.

    Of n devices: an all-gather or a reduce-scatter sends (n - 1) / n of the whole array, an all-reduce twice that, an
    all-to-all (n - 1) / n of what a device holds, a permutation all of it. (Chan et al., Collective communication: theory,
    practice, and experience, 2007, table I.)
    """
    kind, n = collective_kind(one), max(group, 1)
    given = sum(shape.bytes for operand in computation.operands(one) for shape in operand.shapes)
    if kind in ("collective-permute", "collective-broadcast"):
        return given
    share = (n - 1) / n
    return {"all-gather": given * n, "all-reduce": 2 * given}.get(kind, given) * share


def members(one: Instruction, partitions: int) -> list[int]:
    """The numbers (in the program's order of devices) of those that take part, of the first of several groups.

    Of a permutation: the first two that differ; of one group of all, all.
    """
    pairs = re.findall(r"\{(\d+),(\d+)\}", one.attribute("source_target_pairs"))
    if pairs:
        return next(([int(a), int(b)] for a, b in pairs if a != b), [0])
    groups = one.attribute("replica_groups")
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
