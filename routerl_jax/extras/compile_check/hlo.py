"""Reading the text of a compiled program (XLA's HLO): computations, instructions, their operands, and how often loops run.

Text and not a protocol buffer, because libtpu's own dump of a program is text, and jaxlib can't read all of it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re

_ITEM_BITS = {"pred": 8, "token": 0, "opaque": 0, "c64": 64, "c128": 128}
_SHAPE = re.compile(r"([a-z]\w*)\[([^\]]*)\](?:\{([^}]*)\})?")
_BEGINS = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+)(?: \(.*| )\{\s*$")
_NAME = re.compile(r"%([\w.\-]+(?:#\d+)*)")  # `%name#2` is element 2 of a tuple
_COMPUTATION = r"=\{?%?([\w.\-]+)"


@dataclasses.dataclass(frozen=True)
class Shape:
    """An array. `memory` is the number of its memory space, from its layout; 0 is the device's main memory."""

    dtype: str
    dims: tuple[int, ...]
    memory: int = 0

    @property
    def size(self) -> int:
        """Entries."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> float:
        return self.size * item_bits(self.dtype) / 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Instruction:
    """One line of a computation.

    Attributes:
      shapes: of its result; a tuple has one for each array in it.
      raw: the text in its parentheses: the operands, or a constant.
      rest: the text after them: the attributes.
    """

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    raw: str
    rest: str

    @functools.cached_property
    def operands(self) -> tuple[str, ...]:
        return tuple(_NAME.findall(self.raw))

    @property
    def shape(self) -> Shape:
        """The shape of the result, or of the first array of a tuple."""
        return self.shapes[0]

    @property
    def bytes(self) -> float:
        """Bytes of the result, without arrays in other memories than the main one."""
        return sum(shape.bytes for shape in self.shapes if not shape.memory)

    def attribute(self, name: str) -> str:
        """The value of `name=..`, with the brackets that open in it closed; empty if there is no such attribute."""
        match = re.search(rf"(?:^|[ ,]){name}=", self.rest)
        return "" if match is None else _balanced(self.rest, match.end())

    def computation(self, name: str) -> str:
        """The name of the computation in an attribute (`calls`, `body`, ..); empty if there is no such attribute."""
        match = re.search(rf"\b{name}{_COMPUTATION}", self.rest)
        return "" if match is None else match.group(1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Computation:
    """Instructions by name, in the order of the text. In a scheduled module this is the order of execution."""

    name: str
    instructions: dict[str, Instruction]
    root: Instruction

    @functools.cached_property
    def parameters(self) -> dict[int, str]:
        """Names of the parameters by their number."""
        return {
            int(instruction.raw): instruction.name
            for instruction in self.instructions.values()
            if instruction.opcode == "parameter" and instruction.raw.isdigit()
        }

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """The instructions that take each result as an operand, by its name."""
        users: dict[str, list[Instruction]] = {}
        for instruction in self.instructions.values():
            for name in dict.fromkeys(instruction.operands):
                users.setdefault(name, []).append(instruction)
        return users

    def operands(self, instruction: Instruction) -> list[Instruction]:
        """The instructions whose results this one takes."""
        return [self.instructions[name] for name in instruction.operands if name in self.instructions]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Module:
    """A compiled program, as each of its `partitions` devices runs it."""

    name: str
    computations: dict[str, Computation]
    entry: Computation
    partitions: int = 1


def item_bits(dtype: str) -> int:
    """Bits of one entry: 16 of `bf16`, 8 of `f8e4m3fn`, 4 of `s4`."""
    if dtype in _ITEM_BITS:
        return _ITEM_BITS[dtype]
    match = re.match(r"[a-z]+(\d+)", dtype)
    return int(match.group(1)) if match else 32


def parse(text: str) -> Module:
    """Reads a module's text, as `compiled.as_text()` or a dump gives it.

    Raises:
      ValueError: it has no entry computation, or an instruction can't be read.
    """
    computations: dict[str, Computation] = {}
    entry, name, lines, types, root = "", "", dict[str, Instruction](), dict[str, str](), ""
    for line in _logical_lines(text):
        begins = _BEGINS.match(line)
        if begins:
            instruction = _instruction(begins.group(2), line[begins.end() :])
            for operand in instruction.operands:
                _name_element(operand, lines, types)
            lines[instruction.name], types[instruction.name] = instruction, line[begins.end() :]
            root = instruction.name if begins.group(1) or not root else root
        elif (header := _HEADER.match(line)) is not None and not line.startswith("HloModule"):
            name, lines, types, root = header.group(2), {}, {}, ""
            entry = name if header.group(1) else entry
        elif line.startswith("}") and name and lines:
            computations[name] = Computation(name=name, instructions=lines, root=lines[root])
            name = ""
    if entry not in computations:
        raise ValueError("this is no text of a compiled program: it has no ENTRY computation")
    module = re.match(r"HloModule ([\w.\-]+)", text)
    partitions = re.search(r"num_partitions=(\d+)", text[: text.index("\n")])
    return Module(
        name=module.group(1) if module else "",
        computations=computations,
        entry=computations[entry],
        partitions=int(partitions.group(1)) if partitions else 1,
    )


def _logical_lines(text: str) -> list[str]:
    """The lines of the text. An instruction that is broken over several (a kernel's metadata) becomes one."""
    lines: list[str] = []
    for line in text.splitlines():
        apart = _BEGINS.match(line) or (line.startswith(("}", "%", "ENTRY ")) and not line.startswith("}}"))
        if lines and not apart and _BEGINS.match(lines[-1]) and line.strip():
            lines[-1] += " " + line.strip()
        else:
            lines.append(line)
    return lines


def _instruction(name: str, text: str) -> Instruction:
    """Reads `TYPE opcode(operands), attributes`."""
    end = _close(text, 0) if text.startswith("(") else text.index(" ")
    match = re.match(r"\s*([\w\-]+)\(", text[end:])
    if match is None:
        raise ValueError(f"the instruction {name} can't be read: {text[:120]}")
    opens = end + match.end() - 1
    closes = _close(text, opens)
    return Instruction(
        name=name,
        opcode=match.group(1),
        shapes=tuple(_shapes(text[:end])),
        raw=text[opens + 1 : closes - 1],
        rest=text[closes:],
    )


def _name_element(name: str, lines: dict[str, Instruction], types: dict[str, str]) -> None:
    """Adds the instruction that `tuple#2` stands for, which libtpu 0.0.50 writes: a get-tuple-element.

    Args:
      lines: the instructions before it, to which it is added.
      types: the text of each of their types; what follows a type is not read.
    """
    source, _, index = name.rpartition("#")
    if not source or name in lines:
        return
    _name_element(source, lines, types)
    start = 1
    for _ in range(int(index)):  # elements may be tuples
        start = _end_of_element(types[source], start) + 1
    types[name] = types[source][start : _end_of_element(types[source], start)].strip()
    shapes = tuple(_shapes(types[name]))
    lines[name] = Instruction(
        name=name, opcode="get-tuple-element", shapes=shapes, raw=f"%{source}", rest=f", index={index}"
    )


def _end_of_element(text: str, start: int) -> int:
    """The position of the comma or bracket after the element of a tuple's type that begins at `start`."""
    depth = 0
    for i in range(start, len(text)):
        if depth == 0 and text[i] in ",)":
            return i
        depth += (text[i] in "([{") - (text[i] in ")]}")
    return len(text)


def _shapes(text: str) -> list[Shape]:
    """All arrays in a type."""
    shapes = []
    for dtype, dims, layout in _SHAPE.findall(text):
        sizes = tuple(int(size.lstrip("<=")) for size in dims.split(",") if size.strip())
        memory = re.search(r"S\((\d+)\)", layout)
        shapes.append(Shape(dtype, sizes, int(memory.group(1)) if memory else 0))
    return shapes


def _close(text: str, start: int) -> int:
    """The position after the bracket that closes the one at `start`."""
    depth = 0
    for match in re.finditer(r"[()\[\]{}]", text[start:]):
        depth += 1 if match.group() in "([{" else -1
        if not depth:
            return start + match.end()
    return len(text)


def _balanced(text: str, start: int) -> str:
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] in "([{") - (text[i] in ")]}")
        if depth < 0 or (text[i] == "," and not depth):
            return text[start:i]
    return text[start:]


# --- trip counts of loops ---


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
