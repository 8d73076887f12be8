"""Settings with a declared range: the type of a field says which numbers are allowed.

    @dataclasses.dataclass(frozen=True, kw_only=True)
    @checked
    class OptimizerConfig:
        lr: NonNegative = 1e-6
        b2: BelowOne = 0.95

`OptimizerConfig(b2=1.5)` raises `OutOfRange`. So does any number that is not finite, in fields without a range too.
`core.config` puts the section before the field: `config.learner.optimizer.b2=1.5 must be in [0, 1)`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import typing
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, TypeVar

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Range:
    """The numbers from `least` to `most`, and those in `also`. An end that is in `open` does not belong to the range."""

    least: float = -math.inf
    most: float = math.inf
    open: tuple[float, ...] = ()
    also: tuple[float, ...] = ()

    def __contains__(self, value: float) -> bool:
        return value in self.also or (self.least <= value <= self.most and value not in self.open)

    def __str__(self) -> str:
        others = "".join(f", or {value}" for value in self.also)
        if self.most < math.inf:
            brackets = ["(" if self.least in self.open else "[", ")" if self.most in self.open else "]"]
            return f"be in {brackets[0]}{self.least}, {self.most}{brackets[1]}{others}"
        if self.least in self.open:
            return f"be above {self.least}{others}"
        return f"not be negative{others}" if self.least == 0 else f"be at least {self.least}{others}"


Count = Annotated[int, Range(least=0)]
Size = Annotated[int, Range(least=1)]
Seed = Annotated[int, Range(least=0, most=2**31 - 1)]
NonNegative = Annotated[float, Range(least=0)]
Positive = Annotated[float, Range(least=0, open=(0,))]
Fraction = Annotated[float, Range(least=0, most=1)]
BelowOne = Annotated[float, Range(least=0, most=1, open=(1,))]
PositiveFraction = Annotated[float, Range(least=0, most=1, open=(0,))]


class OutOfRange(ValueError):
    """A setting is outside its range.

    Attributes:
      key: key of the setting, beginning with the innermost section known so far.
      complete: whether `key` begins with the outermost section.
    """

    def __init__(self, key: str, value: float, range_: str, complete: bool = False) -> None:
        super().__init__(f"{key}={value!r} must {range_}")
        self.key, self.value, self.range, self.complete = key, value, range_, complete

    def within(self, path: str) -> OutOfRange:
        """The same error with the section's path before the key."""
        return self if self.complete else OutOfRange(f"{path}.{self.key}", self.value, self.range, complete=True)


def checked(cls: type[T]) -> type[T]:
    """Class decorator, below `dataclasses.dataclass`: numbers are checked before the class's `__post_init__`, if it has or
    inherits one."""
    own = getattr(cls, "__post_init__", None)

    def __post_init__(self: Any) -> None:
        check(self)
        if own:
            own(self)

    setattr(cls, "__post_init__", __post_init__)  # noqa: B010 (pyright knows no such attribute of a type)
    return cls


def check(settings: Any) -> None:
    """Raises OutOfRange for the first number of a dataclass that is not finite or not in the range of its type."""
    for name, hint in _hints(type(settings)).items():
        for key, value, range_ in _numbers(name, getattr(settings, name), hint):
            if isinstance(value, float) and not math.isfinite(value):
                raise OutOfRange(key, value, "be a finite number")
            if range_ is not None and value not in range_:
                raise OutOfRange(key, value, str(range_))


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _numbers(key: str, value: Any, hint: Any) -> Iterator[tuple[str, float, Range | None]]:
    """The numbers in a field's value, with their keys and the ranges that its type declares."""
    parts = [part for part in typing.get_args(hint) if part not in (Ellipsis, type(None))]
    if isinstance(value, int | float) and not isinstance(value, bool):
        declared = next((part for part in (hint, *parts) if hasattr(part, "__metadata__")), None)  # X, or X | None
        yield key, value, declared and next(item for item in declared.__metadata__ if isinstance(item, Range))
        return
    inner = parts[-1] if parts else None  # X of tuple[X, ...] or Mapping[str, X]
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _numbers(f"{key}.{name}", item, inner)
    elif isinstance(value, tuple | list):
        for i, item in enumerate(value):
            yield from _numbers(f"{key}[{i}]", item, inner)
