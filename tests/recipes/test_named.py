"""config.recipe names papers: each has its own grammar, agent and headline, and takes another grammar where one is named."""

import dataclasses

import pytest

from routerl_jax.agents.search_agent import SearchAgent
from routerl_jax.recipes.r1_router.agents import StepwiseAgent
from routerl_jax.recipes.recipe import RECIPES, AgentConfig, Recipe
from routerl_jax.recipes.vrag_rl.agents import VRAGAgent
from routerl_jax.recipes.vrag_rl.rewards import AFTER_SFT
from routerl_jax.training import config as schema
from routerl_jax.training.setup import build_recipe


def made(name: str, tools: tuple[str, ...] = ("passage",), agent: AgentConfig | None = None) -> Recipe:
    knowledge = {tool: schema.KnowledgeConfig(source="atlas/text") for tool in tools}
    model = schema.ModelConfig(path="atlas-warm-start")
    return build_recipe(schema.TrainConfig(recipe=name, model=model, agent=agent or AgentConfig(), knowledge=knowledge))


@pytest.mark.parametrize(
    ("name", "grammar", "headline"),
    [
        ("search_r1", "SearchR1Grammar", ("em",)),
        ("r1_searcher", "R1SearcherGrammar", ("cover_em",)),
        ("routerag", "RouteRAGGrammar", ("em", "f1")),
        ("search", "R1RouterGrammar", ("em",)),
    ],
)
def test_papers_with_a_growing_conversation(name: str, grammar: str, headline: tuple[str, ...]) -> None:
    recipe = made(name)
    assert isinstance(recipe.agent, SearchAgent)
    assert (type(recipe.agent.grammar).__name__, recipe.headline) == (grammar, headline)


def test_r1_router_has_chats_of_its_own() -> None:
    recipe = made("r1_router", ("text", "text_image"))
    assert isinstance(recipe.agent, StepwiseAgent)
    assert recipe.headline == ("f1_recall",)
    assert made("r1_router", ("text",), AgentConfig(grammar="r1_router")).agent is not None
    with pytest.raises(
        ValueError, match=r"config.agent.grammar='routerag'.*leave it empty, or set config.recipe='search'"
    ):
        made("r1_router", ("text",), AgentConfig(grammar="routerag"))


def test_vrag_rl_reads_pages_in_turns_of_its_own() -> None:
    recipe = made("vrag_rl", ("pages",), AgentConfig(max_searches=4, k=10, settings={"looks": False}))
    assert isinstance(recipe.agent, VRAGAgent)
    assert (recipe.agent.tool, recipe.agent.max_turns, recipe.agent.k, recipe.agent.looks) == ("pages", 4, 10, False)
    assert recipe.reward == AFTER_SFT.reward


@pytest.mark.parametrize(
    ("agent", "tools", "error"),
    [
        (AgentConfig(), ("pages", "text"), "needs one knowledge base, of pages; config.knowledge has pages, text"),
        (AgentConfig(max_searches=0), ("pages",), "max_searches=0: .* needs a turn at least"),
        (AgentConfig(grammar="search_r1"), ("pages",), "config.agent.grammar='search_r1': .* has tags of its own"),
        (AgentConfig(prompt="{question}"), ("pages",), "config.agent.prompt and prompt_suffix: .* a prompt of its own"),
        (AgentConfig(on_invalid="end"), ("pages",), "config.agent.on_invalid='end': .* tells the policy why"),
        (AgentConfig(sees=("pages",)), ("pages",), "config.agent.sees=.* in words alone"),
    ],
)
def test_vrag_rl_says_what_it_can_t_use(agent: AgentConfig, tools: tuple[str, ...], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        made("vrag_rl", tools, agent)


def test_another_grammar_keeps_the_papers_headline() -> None:
    recipe = made("r1_searcher", agent=AgentConfig(grammar="r1_searcher_answer"))
    assert isinstance(recipe.agent, SearchAgent)
    assert recipe.agent.grammar.forces_answer
    assert recipe.headline == ("cover_em",)


def test_each_paper_is_known_and_an_unknown_name_is_refused() -> None:
    assert {"search_r1", "r1_searcher", "routerag", "r1_router"} <= set(RECIPES)
    with pytest.raises(ValueError, match=r"unknown recipe 'route_rag'; did you mean 'routerag'\?"):
        made("route_rag")


def test_settings_reach_the_agent() -> None:
    given = {"max_searches": 7, "k": 5, "on_invalid": "end", "max_turn_tokens": 99, "max_observation_tokens": 88}
    given |= {"answer_tokens": 11, "prompt": "Q {question}", "instruct": True, "prompt_suffix": "<think>"}
    agent = made("search_r1", agent=AgentConfig(**given)).agent
    fields = {field.name for field in dataclasses.fields(AgentConfig)}
    assert set(given) == fields - {"grammar", "sees", "settings", "raw_results"}  # what every search agent has
    assert {name: getattr(agent, name) for name in given} == given
    shown = made("search_r1", agent=AgentConfig(raw_results=True)).agent
    assert not shown.foreign
    assert set(agent.foreign) == set(agent.special_tokens)
