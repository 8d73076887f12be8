"""Configuration: whatever the schema does not know or allow is an error that names the key."""

import dataclasses
import pathlib
import sys
from collections.abc import Mapping
from typing import Any, Literal

import ml_collections
import pytest
from absl import flags
from ml_collections import config_flags

from routerl_jax.core.config import first_difference, from_config_dict, to_config_dict, unknown_key
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
