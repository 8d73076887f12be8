"""VRAG-RL's small run on Atlas's register: what it is shown, what a search finds, and the whole path in small."""

import dataclasses
import json
import pathlib

import pytest

from configs import vrag_rl_small
from routerl_jax.core.config import from_config_dict
from routerl_jax.core.types import Example
from routerl_jax.data.atlas.register import register_questions
from routerl_jax.models.huggingface import load_pretrained
from routerl_jax.models.vision_language import VisionLanguageModel
from routerl_jax.recipes.vrag_rl.agents import VRAGAgent
from routerl_jax.rewards.retrieval import gold_passages_of
from routerl_jax.training import config as schema
from routerl_jax.training.controls import control_config
from routerl_jax.training.knowledge import open_knowledge_bases
from routerl_jax.training.rl import train_rl
from routerl_jax.training.setup import build_recipe

MOST_TOKENS = 256


def few() -> list[Example]:
    return register_questions("train", 6)


def judged() -> list[Example]:
    return register_questions("test", 6)


@pytest.fixture
def config() -> schema.TrainConfig:
    return from_config_dict(schema.TrainConfig, vrag_rl_small.get_config())


def test_variants() -> None:
    whole, one_page = (
        from_config_dict(schema.TrainConfig, vrag_rl_small.get_config(name)) for name in ("whole_page", "one_page")
    )
    agent = build_recipe(whole).agent
    training, _ = vrag_rl_small.shown_raw(whole, agent)
    worked = [training[vrag_rl_small.ONLY_PARTS + i] for i in range(12)]
    model = load_pretrained("atlas-sight")
    assert isinstance(model, VisionLanguageModel)
    model.image_processor = dataclasses.replace(model.image_processor, max_pixels=whole.model.max_pixels)
    sequences = [one.sequence(agent, model) for one in worked]
    assert {image.tokens for one in sequences for _, image in one.images} == {81}
    assert max(map(len, sequences)) <= whole.engine.max_length
    assert {example.metadata["type"] for example in vrag_rl_small.one_page_questions()} == {
        "fine",
        "headline",
        "coarse",
    }
    assert set(one_page.controls) == {"crop_outcome"}
    judged = from_config_dict(schema.TrainConfig, vrag_rl_small.get_config("judge"))
    assert judged.stages["main"].reward["judge"] == pytest.approx(7 / 9)
    with pytest.raises(ValueError, match="two_pages is not known; it may be whole_page, one_page, judge"):
        vrag_rl_small.get_config("two_pages")


def test_demonstrations(config: schema.TrainConfig) -> None:
    """At first all are parts: a search, a mark, a crop. Then most are whole plans; all fit."""
    agent = build_recipe(config).agent
    training, held_out = vrag_rl_small.shown(config, agent)
    first = vrag_rl_small.ONLY_PARTS
    parts = [training[i] for i in range(first - 60, first)]
    assert all(len(one.pieces) == 1 for one in parts)
    assert 5 < sum(not one.bare for one in parts) < 30
    assert all(str(one.pieces[0][0]).endswith("</search>") != one.bare for one in parts)
    worked = [training[i] for i in range(first, first + 45)]
    whole = [i for i, one in enumerate(worked) if len(one.pieces) > 1]
    assert whole == [i for i in range(45) if i % vrag_rl_small.KEPT_PARTS]
    model = load_pretrained("atlas-sight")
    assert isinstance(model, VisionLanguageModel)
    sequences = [one.sequence(agent, model) for one in worked]
    assert max(map(len, sequences)) <= MOST_TOKENS == config.engine.max_length
    assert all(len(sequences[i].images) >= 1 for i in whole)
    again = vrag_rl_small.shown(config, agent)[0]
    assert [again[first + i].example.question for i in range(9)] == [one.example.question for one in worked[:9]]
    assert held_out[1].example.question != worked[1].example.question


def test_titles_find_their_pages_and_names_any_page(config: schema.TrainConfig) -> None:
    tool = open_knowledge_bases(config.knowledge, progress=False)[vrag_rl_small.TOOL]
    asked = vrag_rl_small.test_questions()[:60]
    for place in (0, -1):  # some have two pages
        for one, found in zip(asked, tool.search([one.metadata["supporting_titles"][place] for one in asked], 1)):
            assert gold_passages_of(one)[place].found_in(tuple(found))
    by_name = tool.search([one.metadata["entities"][0] for one in asked], 10)
    first = [gold_passages_of(one)[0].found_in(tuple(found[:1])) for one, found in zip(asked, by_name)]
    assert 0.1 < sum(first) / len(first) < 0.6
    assert sum(gold_passages_of(one)[0].found_in(tuple(found)) for one, found in zip(asked, by_name)) > 50


def test_controls(config: schema.TrainConfig, tmp_path: pathlib.Path) -> None:
    """Table 2's square: with closer looks or without, with the order of pages in the reward or without."""
    square = {}
    for name in config.controls:
        control = control_config(config, tmp_path, name)
        (stage,) = control.stages.values()
        agent = build_recipe(control).agent
        assert isinstance(agent, VRAGAgent)
        square[name] = (agent.looks, sorted(stage.reward))
    assert square == {
        "crop_outcome": (True, ["em"]),
        "search_only": (False, ["em", "vrag_rl.ndcg"]),
        "search_only_outcome": (False, ["em"]),
    }


@pytest.mark.slow
def test_the_whole_path(config: schema.TrainConfig, tmp_path: pathlib.Path) -> None:
    small = dataclasses.replace(
        config,
        steps=1,
        mesh=schema.MeshConfig(cpu_devices=1),
        engine=dataclasses.replace(config.engine, rows=8),
        data=dataclasses.replace(config.data, train=f"{__name__}:few", test=f"{__name__}:judged"),
        rollout=schema.RolloutConfig(examples=2, samples=2),
        evaluation=dataclasses.replace(config.evaluation, every=0),
        warm_start=dataclasses.replace(config.warm_start, steps=2, align=2, examples=6),
        controls={name: config.controls[name] for name in ("search_only",)},
    )
    train_rl(small, tmp_path / "run")
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    agents = {"warm_start", "vrag_rl", "search_only", "vanilla_rag", "react", "random_box", "centre_box"}
    assert agents <= set(results["agents"])
    assert set(results["agents"]["vrag_rl"]["by"]) == {"type", "print"}
    assert {"em", "ndcg", "recall_at_first", "finish_rate", "forced_rate"} <= results["agents"]["vrag_rl"].keys()
    assert results["agents"]["search_only"].get("crops_per_question", 0) == 0
