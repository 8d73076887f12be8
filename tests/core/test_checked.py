"""Numbers are in the ranges that their types declare, and finite; the error has the whole key."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import pytest

from routerl_jax.core.config import (
    BelowOne,
    Count,
    Fraction,
    NonNegative,
    OutOfRange,
    Positive,
    PositiveFraction,
    Range,
    Seed,
    Size,
    checked,
    from_config_dict,
    override,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class Inner:
    count: Count = 0
    size: Size = 1
    seed: Seed = 0
    weight: NonNegative = 0.0
    rate: Positive = 1.0
    share: Fraction = 0.5
    decay: BelowOne = 0.5
    kept: PositiveFraction = 0.5
    free: float = -3.0
    axis: Annotated[int, Range(least=1, also=(-1,))] = -1
    limit: Size | None = None
    sizes: tuple[Size, ...] = ()
    shares: Mapping[str, Fraction] = dataclasses.field(default_factory=dict)
    options: Mapping[str, float | Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    flag: bool = False
    kind: Literal["token", "sequence"] = "token"
    layout: Literal["rows", "columns"] | Literal[""] = ""
    by: Literal["cost"] | int | None = None
    orders: tuple[Literal["up", "down"], ...] = ()

    def __post_init__(self) -> None:
        assert 1 / self.rate > 0  # what a class checks by itself relies on the ranges


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outer:
    inner: Inner = Inner()
    parts: Mapping[str, Inner] = dataclasses.field(default_factory=dict)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"count": -1}, "count=-1 must not be negative"),
        ({"size": 0}, "size=0 must be at least 1"),
        ({"seed": 2**31}, "seed=2147483648 must be in [0, 2147483647]"),
        ({"weight": -0.1}, "weight=-0.1 must not be negative"),
        ({"rate": 0.0}, "rate=0.0 must be above 0"),
        ({"share": 1.1}, "share=1.1 must be in [0, 1]"),
        ({"decay": 1.0}, "decay=1.0 must be in [0, 1)"),
        ({"kept": 0.0}, "kept=0.0 must be in (0, 1]"),
        ({"free": math.nan}, "free=nan must be a finite number"),
        ({"share": math.inf}, "share=inf must be a finite number"),
        ({"axis": 0}, "axis=0 must be at least 1, or -1"),
        ({"limit": 0}, "limit=0 must be at least 1"),
        ({"sizes": (4, 0)}, "sizes[1]=0 must be at least 1"),
        ({"shares": {"a": 0.5, "b.c": 2.0}}, "shares.b.c=2.0 must be in [0, 1]"),
        ({"options": {"em": {"weight": math.nan}}}, "options.em.weight=nan must be a finite number"),
    ],
)
def test_what_is_out_of_range_is_named_where_it_stands(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(OutOfRange) as direct:
        Inner(**change)
    assert str(direct.value) == complaint
    for raw, path in (({"inner": change}, "config.inner"), ({"parts": {"one": change}}, "config.parts.one")):
        with pytest.raises(ValueError, match="must") as read:
            from_config_dict(Outer, raw)
        assert str(read.value) == f"{path}.{complaint}"
    with pytest.raises(ValueError, match="must") as overridden:
        override(Outer(), {"inner": change}, "config.stages.main")
    assert str(overridden.value) == f"config.stages.main.inner.{complaint}"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"kind": "tokens"}, "kind='tokens' must be 'token' or 'sequence'"),
        ({"layout": "diagonals"}, "layout='diagonals' must be 'rows', 'columns' or ''"),
        ({"orders": ("up", "left")}, "orders[1]='left' must be 'up' or 'down'"),
        ({"by": "size"}, "by='size' must be 'cost'"),
    ],
)
def test_a_choice_is_one_of_those_of_its_type(change: dict[str, Any], complaint: str) -> None:
    """Also where no configuration was read; what is read from one, core.config checks."""
    with pytest.raises(OutOfRange) as direct:
        Inner(**change)
    assert str(direct.value) == complaint
    assert Inner(kind="sequence", layout="columns", by="cost", orders=("down",)).by == "cost"
    assert Inner(by=7).by == 7


def test_bounds_belong_to_ranges() -> None:
    edges = Inner(count=0, size=1, seed=2**31 - 1, share=1.0, decay=0.0, kept=1.0, axis=1, limit=None, sizes=(1,))
    assert dataclasses.replace(edges, share=0.0, flag=True).shares == {}
    assert Inner(options={"em": 1, "f1": {"by": "cost"}}).options
