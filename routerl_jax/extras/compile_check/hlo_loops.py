"""The trip counts of the loops of a compiled program, from its text."""

from __future__ import annotations

import dataclasses
import math
import re

from routerl_jax.extras.compile_check.hlo_text import Computation, Instruction, Module

_SAME = {"copy", "bitcast", "convert", "reshape", "copy-done", "broadcast", "optimization-barrier"}


@dataclasses.dataclass(frozen=True)
class _Carried:
    """The i-th value that a loop carries."""

    index: int


@dataclasses.dataclass(frozen=True)
class _Stepped:
    """A carried number plus a constant."""

    index: int
    by: int


_Value = int | _Carried | _Stepped | None


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """How often a `while` of `computation` runs its body; None if only a run can tell.

    The compiler may have noted it (`known_trip_count`). If not, the condition must compare a counter with a constant. A
    condition may ask for more, so that the loop can end early; then the constant gives the most iterations. A counter that
    counts up and whose first value isn't in the text begins at 0, as in JAX's scans.
    """
    noted = re.search(r'known_trip_count[^\d]*"?n"?[^\d]*(\d+)', loop.rest)
    if noted:
        return int(noted.group(1))
    condition = module.computations.get(loop.computation("condition"))
    body = module.computations.get(loop.computation("body"))
    if condition is None or body is None:
        return None
    start = computation.instructions.get(loop.operands[0]) if loop.operands else None
    counts = [
        count
        for comparison, scope, arguments in _comparisons(module, condition)
        if (count := _trip_count_of(module, comparison, scope, arguments, body, computation, start)) is not None
    ]
    return min(counts, default=None)


def _comparisons(module: Module, condition: Computation) -> list[tuple[Instruction, Computation, list[_Value]]]:
    """The comparisons that must all hold, each with its computation and the arguments of that one."""
    comparisons, unvisited = [], [(condition.root, condition, [])]
    while unvisited:
        instruction, scope, arguments = unvisited.pop()
        inner = module.computations.get(instruction.computation("calls") or instruction.computation("to_apply"))
        if instruction.opcode == "compare":
            comparisons.append((instruction, scope, arguments))
        elif instruction.opcode in ("fusion", "call") and inner is not None:
            unvisited.append(
                (inner.root, inner, [_value(module, scope, name, arguments) for name in instruction.operands])
            )
        elif instruction.opcode == "and" or instruction.opcode in _SAME:
            unvisited += [(operand, scope, arguments) for operand in scope.operands(instruction)]
    return comparisons


def _trip_count_of(
    module: Module,
    comparison: Instruction,
    scope: Computation,
    arguments: list[_Value],
    body: Computation,
    outside: Computation,
    start: Instruction | None,
) -> int | None:
    left, right = (_value(module, scope, name, arguments) for name in comparison.operands[:2])
    direction = comparison.attribute("direction")
    if isinstance(right, _Carried) and isinstance(left, int):
        left, right, direction = right, left, {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE"}.get(direction, direction)
    if not isinstance(left, _Carried):
        return None

    def at_first(index: int) -> _Value:
        if start is None or start.opcode != "tuple" or index >= len(start.operands):
            return None
        return _value(module, outside, start.operands[index], [])

    def afterwards(index: int) -> _Value:
        root = body.root
        if root.opcode != "tuple" or index >= len(root.operands):
            return None
        return _value(module, body, root.operands[index], [])

    if isinstance(right, _Carried) and afterwards(right.index) == right:  # the loop does not change it
        right = at_first(right.index)
    if not isinstance(right, int):
        return None
    first, stepped = at_first(left.index), afterwards(left.index)
    down = direction in ("GT", "GE")
    step = stepped.by if isinstance(stepped, _Stepped) and stepped.index == left.index else (-1 if down else 1)
    if not isinstance(first, int):
        if step < 0:
            return None
        first = 0
    distance = (right - first) * (1 if step > 0 else -1) + (direction in ("LE", "GE"))
    return max(math.ceil(distance / abs(step)), 0) if step else None


def _value(module: Module, scope: Computation, name: str, arguments: list[_Value]) -> _Value:
    """A value as a constant, a carried value, or a carried value plus a constant. `arguments`: of the computation's call."""
    instruction = scope.instructions.get(name)
    if instruction is None:
        return None
    if instruction.opcode == "constant":
        return int(instruction.raw) if re.fullmatch(r"-?\d+", instruction.raw.strip()) else None
    if instruction.opcode == "parameter":
        number = int(instruction.raw)
        return arguments[number] if number < len(arguments) else None
    if instruction.opcode == "get-tuple-element":
        source = scope.instructions.get(instruction.operands[0]) if instruction.operands else None
        return (
            _Carried(int(instruction.attribute("index")))
            if source is not None and source.opcode == "parameter"
            else None
        )
    if instruction.opcode in _SAME and instruction.operands:
        return _value(module, scope, instruction.operands[0], arguments)
    if instruction.opcode == "add":
        sides = [_value(module, scope, operand, arguments) for operand in instruction.operands]
        carried = [side for side in sides if isinstance(side, _Carried)]
        constants = [side for side in sides if isinstance(side, int)]
        return _Stepped(carried[0].index, constants[0]) if len(carried) == len(constants) == 1 else None
    inner = module.computations.get(instruction.computation("calls") or instruction.computation("to_apply"))
    if instruction.opcode in ("fusion", "call") and inner is not None:
        operands = [_value(module, scope, operand, arguments) for operand in instruction.operands]
        return _value(module, inner, inner.root.name, operands)
    return None
