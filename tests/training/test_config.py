"""The schema of a run: every field means something, every mistake is named."""

import dataclasses
import json
import pathlib
import re

import pytest

from configs import atlas_warm_start, quickstart, smollm2_search
from routerl_jax.core.config import from_config_dict
from routerl_jax.training import config as schema

ROOT = pathlib.Path(__file__).parents[2]
KB = {"text": schema.KnowledgeConfig(source="atlas/text")}


def leaves(cls: type) -> set[str]:
    """Names of all settings, of sections' too."""
    names: set[str] = set()
    for field in dataclasses.fields(cls):
        default = field.default if field.default is not dataclasses.MISSING else None
        names |= leaves(type(default)) if dataclasses.is_dataclass(default) else {field.name}
    return names


def test_every_field_is_read_somewhere() -> None:
    source = "\n".join(
        path.read_text()
        for folder in ("routerl_jax", "launch")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path != pathlib.Path(schema.__file__)
    )
    settings = leaves(schema.TrainConfig) | leaves(schema.KnowledgeConfig) | leaves(schema.StageConfig)
    assert len(settings) > 50
    unread = [name for name in sorted(settings) if not re.search(rf"\.{name}\b", source)]
    assert not unread


@pytest.mark.parametrize("module", [quickstart, atlas_warm_start, smollm2_search])
def test_shipped_configurations_are_valid(module) -> None:
    config = from_config_dict(schema.TrainConfig, module.get_config())
    again = from_config_dict(schema.TrainConfig, json.loads(json.dumps(dataclasses.asdict(config))))
    assert again == config  # what a workdir's config.json holds is the same configuration


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": schema.ModelConfig()}, "config.model.path is empty"),
        ({"knowledge": {}}, "name at least one knowledge base"),
        ({"steps": -1}, "config.steps must not be negative"),
        ({"rollout": schema.RolloutConfig(samples=0)}, "needs examples and samples"),
        ({"rollout": schema.RolloutConfig(samples=1)}, "set config.rollout.samples above 1"),
        ({"learner": schema.LearnerConfig(minibatches=1000)}, "exceeds the episodes of a step"),
        ({"stages": {"late": schema.StageConfig(start=3)}}, "no stage starts at step 0"),
    ],
)
def test_mistakes_are_named(changes, message) -> None:
    fields = {"model": schema.ModelConfig(path="somewhere"), "knowledge": KB, **changes}
    with pytest.raises(ValueError, match=re.escape(message)):
        schema.TrainConfig(**fields)
