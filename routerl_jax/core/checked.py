"""Settings with a declared range: the type of a field says which numbers or texts are allowed.

    @dataclasses.dataclass(frozen=True, kw_only=True)
    @checked
    class OptimizerConfig:
        lr: NonNegative = 1e-6
        b2: BelowOne = 0.95

`OptimizerConfig(b2=1.5)` raises `OutOfRange`. So does a number that is not finite, in any field, and a text that its `Literal`
does not list.
`core.config` puts the section before the field: `config.learner.optimizer.b2=1.5 must be in [0, 1)`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, TypeVar

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Range:
    """The numbers from `least` to `most`, and those in `also`. An end that is in `open` does not belong to the range. `all` is
    the one among `also` that stands for all."""

    least: float = -math.inf
    most: float = math.inf
    open: tuple[float, ...] = ()
    also: tuple[float, ...] = ()
    all: float | None = None

    def __contains__(self, value: float) -> bool:
        return value in self.also or (self.least <= value <= self.most and value not in self.open)

    def __str__(self) -> str:
        others = "".join(f", or {value}{' for all' if value == self.all else ''}" for value in self.also)
        if self.most < math.inf:
            brackets = ["(" if self.least in self.open else "[", ")" if self.most in self.open else "]"]
            return f"be in {brackets[0]}{self.least}, {self.most}{brackets[1]}{others}"
        if self.least in self.open:
            return f"be above {self.least}{others}"
        return f"not be negative{others}" if self.least == 0 else f"be at least {self.least}{others}"


Count = Annotated[int, Range(least=0)]
Size = Annotated[int, Range(least=1)]
Amount = Annotated[int, Range(least=1, also=(-1,), all=-1)]  # so many of what there is; -1: all
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

    def __init__(self, key: str, value: float | str, range_: str, complete: bool = False) -> None:
        super().__init__(f"{key}={value!r} must {range_}")
        self.key, self.value, self.range, self.complete = key, value, range_, complete

    def within(self, path: str) -> OutOfRange:
        """The same error with the section's path before the key."""
        return self if self.complete else OutOfRange(f"{path}.{self.key}", self.value, self.range, complete=True)


def checked(cls: type[T]) -> type[T]:
    """Class decorator, below `dataclasses.dataclass`: settings are checked before the class's `__post_init__`, if it has or
    inherits one."""
    inherited = getattr(cls, "__post_init__", None)

    def __post_init__(self: Any) -> None:
        check(self)
        if inherited:
            inherited(self)

    setattr(cls, "__post_init__", __post_init__)  # noqa: B010 (pyright knows no such attribute of a type)
    return cls


def check(settings: Any) -> None:
    """Raises OutOfRange for the first value of a dataclass that its type does not allow: a number that is not finite or out of
    range, or a text that is not listed."""
    for name, hint in _hints(type(settings)).items():
        for key, value, declared in _values(name, getattr(settings, name), hint):
            if complaint := _complaint(value, declared):
                raise OutOfRange(key, value, complaint)


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _values(key: str, value: Any, hint: Any) -> Iterator[tuple[str, float | str, Any]]:
    """The numbers and texts in a field's value, with their keys and declared types."""
    parts = [part for part in typing.get_args(hint) if part not in (Ellipsis, type(None))]
    inner = parts[-1] if parts else None  # X of tuple[X, ...] or Mapping[str, X]
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _values(f"{key}.{name}", item, inner)
    elif isinstance(value, tuple | list):
        for i, item in enumerate(value):
            yield from _values(f"{key}[{i}]", item, inner)
    elif isinstance(value, int | float | str) and not isinstance(value, bool):
        yield key, value, hint


def _complaint(value: float | str, hint: Any) -> str:
    """The rule that a value breaks, such as "be in [0, 1)"; "" if it breaks none."""
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    options = typing.get_args(hint) if union else (hint,)  # X | None: X
    if isinstance(value, str):
        texts = [text for option in options if typing.get_origin(option) is Literal for text in typing.get_args(option)]
        if str in options or not texts or value in texts:
            return ""
        *most, last = map(repr, texts)
        return f"be {', '.join(most)} or {last}" if most else f"be {last}"
    if isinstance(value, float) and not math.isfinite(value):
        return "be a finite number"
    annotated = (option.__metadata__ for option in options if hasattr(option, "__metadata__"))
    range_ = next((item for metadata in annotated for item in metadata if isinstance(item, Range)), None)
    return "" if range_ is None or value in range_ else str(range_)
