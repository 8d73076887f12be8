"""Configuration: what the schema does not know or allow is an error that names the key; ranges; words from the source."""

import dataclasses
import math
import pathlib
import sys
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import ml_collections
import pytest
from absl import flags
from ml_collections import config_flags

from routerl_jax.core.config import (
    MISSING,
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
    default_in_words,
    fields_of,
    first_difference,
    from_config_dict,
    override,
    sections,
    settings,
    summary,
    to_config_dict,
    type_in_words,
    unknown_key,
)
from routerl_jax.training.config import KnowledgeConfig, ModelConfig, RolloutConfig, StageConfig, TrainConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inner:
    rate: float = 0.5
    sizes: tuple[int, ...] = (1, 2)
    mode: Literal["fast", "slow"] = "fast"

    def __post_init__(self) -> None:
        if self.rate < 0:
            raise ValueError("rate must not be negative")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outer:
    name: str
    count: int = 3
    flag: bool = False
    limit: int | None = None
    inner: Inner = Inner()
    parts: Mapping[str, Inner] = dataclasses.field(default_factory=dict)
    values: Mapping[str, int | float | bool | str] = dataclasses.field(default_factory=dict)
    anything: Any = 0


FULL = {
    "name": "n",
    "count": 4,
    "flag": True,
    "limit": 9,
    "inner": {"rate": 2, "sizes": [3, 4, 5], "mode": "slow"},
    "parts": {"left": {"rate": 0.25}, "right": {}},
    "values": {"a": 1, "b": 2.5, "c": True, "d": "x"},
    "anything": ("free", 1),
}


@pytest.mark.parametrize("wrap", [dict, ml_collections.ConfigDict])
def test_every_kind_of_field(wrap: type) -> None:
    result = from_config_dict(Outer, wrap(FULL))
    assert result == Outer(
        name="n",
        count=4,
        flag=True,
        limit=9,
        inner=Inner(rate=2.0, sizes=(3, 4, 5), mode="slow"),
        parts={"left": Inner(rate=0.25), "right": Inner()},
        values={"a": 1, "b": 2.5, "c": True, "d": "x"},
        anything=("free", 1),
    )
    assert type(result.inner.rate) is float  # given as 2
    assert type(result.inner.sizes) is tuple  # given as a list
    assert [type(value) for value in result.values.values()] == [int, float, bool, str]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cuont": 1}, r"^unknown config key config\.cuont; did you mean config\.count\?$"),
        ({"inner": {"raet": 1.0}}, r"^unknown config key config\.inner\.raet; did you mean config\.inner\.rate\?$"),
        ({"inner": {"zzz": 1.0}}, r"^unknown config key config\.inner\.zzz; known keys: mode, rate, sizes$"),
        ({"parts": {"left": {"raet": 1}}}, r"config\.parts\.left\.raet; did you mean config\.parts\.left\.rate"),
        ({"count": "4"}, r"^config\.count='4' must be of type int$"),
        ({"count": 4.0}, r"^config\.count=4\.0 must be of type int$"),
        ({"count": True}, r"^config\.count=True must be of type int$"),
        ({"count": None}, r"^config\.count=None must be of type int$"),
        ({"flag": 1}, r"^config\.flag=1 must be of type bool$"),
        ({"name": 5}, r"^config\.name=5 must be of type str$"),
        ({"limit": "many"}, r"^config\.limit='many' must be of type int$"),
        ({"inner": {"rate": True}}, r"^config\.inner\.rate=True must be of type float$"),
        ({"inner": {"rate": "0.5"}}, r"^config\.inner\.rate='0\.5' must be of type float$"),
        ({"inner": {"mode": "medium"}}, r"^config\.inner\.mode='medium' is not one of 'fast', 'slow'$"),
        ({"inner": {"sizes": 3}}, r"^config\.inner\.sizes must be a sequence, got 3$"),
        ({"inner": {"sizes": "34"}}, r"^config\.inner\.sizes must be a sequence, got '34'$"),
        ({"inner": {"sizes": (1, "b")}}, r"^config\.inner\.sizes\[1\]='b' must be of type int$"),
        ({"inner": 3}, r"^config\.inner must be a section, got 3$"),
        ({"parts": 3}, r"^config\.parts must be a mapping of names to sections, got 3$"),
        ({"parts": {"left": 3}}, r"^config\.parts\.left must be a section, got 3$"),
        ({"values": {"a": (1,)}}, r"config\.values\.a=\(1,\) must be of type int"),
        ({"inner": {"rate": -1.0}}, r"^config\.inner: rate must not be negative$"),  # the dataclass's own check
    ],
)
def test_errors_name_the_key(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_config_dict(Outer, FULL | change)


def test_missing_required_key() -> None:
    with pytest.raises(ValueError, match=r"^config\.name is missing$"):
        from_config_dict(Outer, {})
    with pytest.raises(ValueError, match=r"^config\.stage\.name is missing$"):
        from_config_dict(Outer, {}, "config.stage")


def test_an_optional_field_may_be_set_through_its_placeholder() -> None:
    config = to_config_dict(Outer(name="n"))
    assert from_config_dict(Outer, config).limit is None
    config.limit = 12
    assert from_config_dict(Outer, config).limit == 12
    with pytest.raises(TypeError):  # ml_collections knows the field's type although its value was None
        config.limit = "twelve"


def test_unknown_key_message_lists_the_known_keys_in_order() -> None:
    assert unknown_key("c", "q", ["beta", "alpha"]) == "unknown config key c.q; known keys: alpha, beta"


TRAIN = [
    TrainConfig(model=ModelConfig(path="somewhere"), knowledge={"text": KnowledgeConfig(source="atlas/text")}),
    TrainConfig(
        kind="sft",
        model=ModelConfig(
            architecture={"model_type": "llama", "embed": 64, "rope_theta": 1e4, "tied_embeddings": True}
        ),
        stages={"a": StageConfig(reward={"f1": 1.0}), "b": StageConfig(start=10, reward={"em": 2.0, "format": -0.5})},
    ),
]


@pytest.mark.parametrize("config", TRAIN)
def test_round_trip_of_a_run(config: TrainConfig) -> None:
    tree = to_config_dict(config)
    assert from_config_dict(TrainConfig, tree) == config
    # as launch.train writes it to config.json, and as evaluation reads it back
    assert from_config_dict(TrainConfig, ml_collections.ConfigDict(tree.to_dict())) == config
    keys = {field.name for field in dataclasses.fields(TrainConfig)}
    assert set(tree) == keys  # a default that to_config_dict left out could not be set on the command line


def parse(monkeypatch: pytest.MonkeyPatch, directory: pathlib.Path, *overrides: str) -> TrainConfig:
    """What `python -m launch.train --config=FILE overrides` makes of its arguments."""
    file = directory / "run.py"
    file.write_text(
        "from routerl_jax.core.config import to_config_dict\n"
        "from routerl_jax.training.config import *\n"
        "def get_config():\n"
        "    knowledge = {'text': KnowledgeConfig(source='atlas/text')}\n"
        "    return to_config_dict(TrainConfig(model=ModelConfig(path='m'), knowledge=knowledge))\n"
    )
    arguments = ["train", f"--config={file}", *overrides]
    monkeypatch.setattr(sys, "argv", arguments)  # config_flags looks for overrides there
    values = flags.FlagValues()
    config_flags.DEFINE_config_file("config", None, flag_values=values)
    values(arguments)
    return from_config_dict(TrainConfig, values.config)


def test_overrides_on_the_command_line(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    config = parse(
        monkeypatch,
        tmp_path,
        "--config.learner.optimizer.lr=1",
        "--config.data.train_range=(3, 7)",
        "--config.knowledge.text.index=exact",
        "--config.rollout.deterministic=false",
        "--config.kind=rl",
    )
    assert config.learner.optimizer.lr == 1.0
    assert type(config.learner.optimizer.lr) is float
    assert config.data.train_range == (3, 7)
    assert config.knowledge["text"].index == "exact"
    assert config.rollout.deterministic is False
    assert config.rollout.samples == RolloutConfig().samples


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("--config.stepz=3", r"stepz"),
        ("--config.learner.optimiser.lr=1", r"optimiser"),
        ("--config.learner.optimizer.Lr=1", r"Lr"),
        ("--config.knowledge.tables.index=exact", r"tables"),
        ("--config.steps=1.5", r"config\.steps"),
        ("--config.learner.optimizer.schedule=foo", r"config\.learner\.optimizer\.schedule='foo' is not one of"),
        ("--config.data.train_range=(1,'a')", r"config\.data\.train_range\[1\]='a'"),
        ("--config.rollout.samples=1", r"config\.learner\.advantage='grpo' compares attempts"),
        ("--config.rollout.examples=0", r"config\.rollout\.examples=0 must be at least 1"),
    ],
)
def test_bad_overrides_are_errors_that_name_the_key(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, override: str, named: str
) -> None:
    with pytest.raises((ValueError, KeyError, AttributeError, flags.Error), match=named):
        parse(monkeypatch, tmp_path, override)


def test_the_first_difference() -> None:
    """A setting that is None on one side and not there on the other differs, too."""
    assert first_difference({"a": 1, "b": {"c": None}}, {"a": 1, "b": {}}, "config") == ("config.b.c", None, None)
    assert first_difference({"a": 1}, {"a": 2, "b": 3}, "config") == ("config.a", 1, 2)
    assert first_difference({"a": {"b": 1}}, {"a": {"b": 1, "c": 2}}, "config") == ("config.a.c", None, 2)


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class Bounded:
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
class Nested:
    inner: Bounded = Bounded()
    parts: Mapping[str, Bounded] = dataclasses.field(default_factory=dict)


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
        Bounded(**change)
    assert str(direct.value) == complaint
    for raw, path in (({"inner": change}, "config.inner"), ({"parts": {"one": change}}, "config.parts.one")):
        with pytest.raises(ValueError, match="must") as read:
            from_config_dict(Nested, raw)
        assert str(read.value) == f"{path}.{complaint}"
    with pytest.raises(ValueError, match="must") as overridden:
        override(Nested(), {"inner": change}, "config.stages.main")
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
        Bounded(**change)
    assert str(direct.value) == complaint
    assert Bounded(kind="sequence", layout="columns", by="cost", orders=("down",)).by == "cost"
    assert Bounded(by=7).by == 7


def test_bounds_belong_to_ranges() -> None:
    edges = Bounded(count=0, size=1, seed=2**31 - 1, share=1.0, decay=0.0, kept=1.0, axis=1, limit=None, sizes=(1,))
    assert dataclasses.replace(edges, share=0.0, flag=True).shares == {}
    assert Bounded(options={"em": 1, "f1": {"by": "cost"}}).options


@dataclasses.dataclass(frozen=True, kw_only=True)
class Box:
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
class Commented(Base):
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
    inner: Box = Box(width=7)  # where it is 7 wide
    again: Box = Box(width=7)
    narrow: Box = Box()
    parts: Mapping[str, Box] = dataclasses.field(default_factory=lambda: {"usual": Box(height=5)})

    def method(self) -> int:
        # of no field
        return self.needed


def test_descriptions_of_fields() -> None:
    words = {field.name: field.description for field in fields_of(Commented)}
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
    assert [field.description for field in fields_of(Box)] == ["of a box, in pixels: both.", "at its end"]
    assert summary(Commented) == "All of it. In two sentences."
    assert summary(Box) == "What is inside."
    needed, shared = (
        next(field for field in fields_of(Commented) if field.name == name) for name in ("needed", "shared")
    )
    assert default_in_words(needed.default) == "(must be set)"
    assert default_in_words(shared.default) == "'other'"


def test_sections_are_told_once() -> None:
    told = {section.path: section for section in sections(Commented)}
    assert list(told) == ["config", "config.inner", "config.again", "config.narrow", "config.parts.NAME"]
    assert [field.name for field in told["config"].fields] == ["shared", "needed", "above", "both", "long", "parts"]
    assert [(field.name, field.default) for field in told["config.inner"].fields] == [("width", 7), ("height", 2)]
    assert told["config.inner"].description == "where it is 7 wide"
    assert told["config.again"].like == "config.inner"
    assert told["config.again"].fields == []
    assert [(field.name, field.default) for field in told["config.narrow"].fields] == [("width", 1)]
    assert told["config.parts.NAME"].like == "config.inner"
    seen = {}
    sections(Commented, "first", seen)
    assert [section.like for section in sections(Box, "second", seen)] == ["first.inner"]


def test_settings_and_what_differs() -> None:
    config = Commented(needed=3, inner=Box(width=7, height=3), parts={"usual": Box(height=5), "new": Box(height=6)})
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
        (Box, "Box"),
    ],
)
def test_types_in_words(hint: Any, words: str) -> None:
    assert type_in_words(hint) == words
