"""R1-Searcher's online evaluation (section 4.4): the agent that searched a corpus searches the web, by configuration alone."""

import dataclasses
import pathlib
from typing import Any

import pytest

from routerl_jax.agents.driver import run
from routerl_jax.core.types import Example
from routerl_jax.evaluation.metrics import summarize
from routerl_jax.knowledge.web.kb import build_web
from routerl_jax.recipes.r1_searcher import PROMPT_SUFFIX, STAGE_1
from routerl_jax.rewards.terms import RewardFunction
from routerl_jax.training.config import AgentConfig, EvaluationConfig, KnowledgeConfig, ModelConfig, TrainConfig
from routerl_jax.training.setup import build_recipe, evaluated_agent, open_knowledge
from tests.agents.scripted import ScriptedEngine
from tests.training.small_run import make_encoder, write_rows

QUESTION = Example(id="q", question="How high is the tower of village 2?", answers=("14 metres",))
TURNS = [
    "I must search. <|begin_of_query|>tower village 2<|end_of_query|>",
    "It says so.</think><answer>14 metres</answer>",
]


def make_config(knowledge: KnowledgeConfig) -> TrainConfig:
    return TrainConfig(
        model=ModelConfig(path="unused"),
        agent=AgentConfig(grammar="r1_searcher", max_searches=2, k=1, max_turn_tokens=200, prompt_suffix=PROMPT_SUFFIX),
        knowledge={"text": knowledge},
        evaluation=EvaluationConfig(k=2),
    )


def test_a_corpus_becomes_the_web(world: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passages = [{"id": str(i), "title": f"Page {i}", "text": f"Nothing about towers, {i}."} for i in range(3)]
    write_rows(tmp_path / "corpus.jsonl", passages)
    make_encoder(tmp_path / "encoder")
    corpus = KnowledgeConfig(
        source=str(tmp_path / "corpus.jsonl"),
        encoder=str(tmp_path / "encoder"),
        index="exact",
        directory=str(tmp_path / "kb"),
    )
    build_web(world.config(), tmp_path / "web", progress=False)
    online = KnowledgeConfig(kind="web", directory=str(tmp_path / "web"))
    shown = {}
    for name, knowledge in {"corpus": corpus, "web": online}.items():
        config = make_config(knowledge)
        agent = evaluated_agent(config, build_recipe(config))
        engine: Any = ScriptedEngine(lambda _, __, turn: TURNS[turn], max_length=3000)
        (episode,) = run(agent, [QUESTION], engine, open_knowledge(config, progress=False))
        assert RewardFunction(STAGE_1)([episode])[0]["total"] == 1.0
        assert summarize([episode])["valid_search_share"] == 1.0
        assert episode.calls[0].query == "tower village 2"
        shown[name] = episode.turns[0].observation
    assert "Nothing about towers" in shown["corpus"]
    assert "(2)Title: Village 2 Text: Fact 2 is that the tower of village 2 is 14 metres high." in shown["web"]
    assert "(3)" not in shown["web"]
    assert world.searches.asked[0]["q"] == "tower village 2"

    broken = dataclasses.replace(make_config(online), evaluation=EvaluationConfig(k=1))
    world.searches.key = "another"  # the search engine turns us away: the policy is told, and goes on
    engine = ScriptedEngine(lambda _, __, turn: TURNS[turn].replace("village 2<", "village 3<"), max_length=3000)
    (episode,) = run(
        evaluated_agent(broken, build_recipe(broken)), [QUESTION], engine, open_knowledge(broken, progress=False)
    )
    assert "(1)The search failed: " in episode.turns[0].observation
    assert summarize([episode])["valid_search_share"] == 0.0
    assert episode.answer == "14 metres"
