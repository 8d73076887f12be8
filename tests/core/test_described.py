"""Words of configurations come from their source."""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import pytest

from routerl_jax.core.config import (
    MISSING,
    BelowOne,
    Count,
    Fraction,
    Positive,
    PositiveFraction,
    Range,
    Size,
    default_in_words,
    fields_of,
    sections,
    settings,
    summary,
    type_in_words,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inner:
    """What is inside.

    Attributes:
      width, height: of a box,
        in pixels: both.
      name: not of a field
    """

    width: int = 1
    height: int = 2  # at its end


@dataclasses.dataclass(frozen=True, kw_only=True)
class Base:
    """Common."""

    shared: str = "#1"  # of all # kinds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outer(Base):
    """All of it. In two
    sentences."""

    needed: int

    # a heading that is no comment of a field

    above: float = 0.5
    # two lines
    # above ..
    both: tuple[str, ...] = ()  # .. and one at the end
    # of a value that is broken over lines
    long: Mapping[str, float] = dataclasses.field(
        default_factory=lambda: {
            "a": 1.0,  # is not of the field
        }
    )  # after its last
    shared: str = "other"
    inner: Inner = Inner(width=7)  # where it is 7 wide
    again: Inner = Inner(width=7)
    narrow: Inner = Inner()
    parts: Mapping[str, Inner] = dataclasses.field(default_factory=lambda: {"usual": Inner(height=5)})

    def method(self) -> int:
        # of no field
        return self.needed


def test_descriptions_of_fields() -> None:
    words = {field.name: field.description for field in fields_of(Outer)}
    assert words == {
        "shared": "of all # kinds",
        "needed": "",
        "above": "",
        "both": "two lines above .. .. and one at the end",
        "long": "of a value that is broken over lines after its last",
        "inner": "where it is 7 wide",
        "again": "",
        "narrow": "",
        "parts": "",
    }
    assert [field.description for field in fields_of(Inner)] == ["of a box, in pixels: both.", "at its end"]
    assert summary(Outer) == "All of it. In two sentences."
    assert summary(Inner) == "What is inside."
    needed, shared = (next(field for field in fields_of(Outer) if field.name == name) for name in ("needed", "shared"))
    assert default_in_words(needed.default) == "(must be set)"
    assert default_in_words(shared.default) == "'other'"


def test_sections_are_told_once() -> None:
    told = {section.path: section for section in sections(Outer)}
    assert list(told) == ["config", "config.inner", "config.again", "config.narrow", "config.parts.NAME"]
    assert [field.name for field in told["config"].fields] == ["shared", "needed", "above", "both", "long", "parts"]
    assert [(field.name, field.default) for field in told["config.inner"].fields] == [("width", 7), ("height", 2)]
    assert told["config.inner"].description == "where it is 7 wide"
    assert told["config.again"].like == "config.inner"
    assert told["config.again"].fields == []
    assert [(field.name, field.default) for field in told["config.narrow"].fields] == [("width", 1)]
    assert told["config.parts.NAME"].like == "config.inner"
    seen = {}
    sections(Outer, "first", seen)
    assert [section.like for section in sections(Inner, "second", seen)] == ["first.inner"]


def test_settings_and_what_differs() -> None:
    config = Outer(needed=3, inner=Inner(width=7, height=3), parts={"usual": Inner(height=5), "new": Inner(height=6)})
    rows = {setting.key: setting for setting in settings(config)}
    assert [key for key, setting in rows.items() if setting.differs] == [
        "config.needed",
        "config.inner.height",
        "config.parts.new",
        "config.parts.new.height",
    ]
    assert rows["config.parts.new"].section
    assert rows["config.needed"].default is MISSING
    assert (rows["config.inner.width"].value, rows["config.inner.width"].default) == (7, 7)
    assert rows["config.parts.usual.height"].default == 5
    assert rows["config.parts.new.height"].default == 2
    emptied = {setting.key: setting for setting in settings(dataclasses.replace(config, parts={}))}
    assert emptied["config.parts"].differs


@pytest.mark.parametrize(
    ("hint", "words"),
    [
        (Count, "int >= 0"),
        (Size, "int >= 1"),
        (Positive, "float > 0"),
        (Fraction, "float in [0, 1]"),
        (BelowOne, "float in [0, 1)"),
        (PositiveFraction, "float in (0, 1]"),
        (Annotated[int, Range(least=1, also=(-1,))], "int >= 1 or -1"),
        (Literal["a", "b"], '"a" or "b"'),
        (Literal["a"] | Literal[""], '"a" or ""'),
        (int | None, "int or None"),
        (tuple[Count, ...], "list of int >= 0"),
        (Mapping[str, float | Mapping[str, Any]], "names with float or names with anything"),
        (Inner, "Inner"),
    ],
)
def test_types_in_words(hint: Any, words: str) -> None:
    assert type_in_words(hint) == words
