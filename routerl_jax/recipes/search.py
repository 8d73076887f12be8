"""The search recipe: one agent, one growing conversation, and a weighted sum of outcome rewards per stage.

Search-R1, R1-Searcher and RouteRAG are this recipe, each with its own grammar and headline metrics. Budget and reward terms
come from the configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from routerl_jax.agents.grammar import GRAMMARS
from routerl_jax.agents.search_agent import SearchAgent
from routerl_jax.core.config import naming
from routerl_jax.recipes.recipe import AgentConfig, Recipe, Stage
from routerl_jax.rewards.terms import RewardFunction


class StageSettings(Protocol):
    """The part of a stage in the run's configuration that a recipe reads."""

    @property
    def start(self) -> int: ...
    @property
    def reward(self) -> Mapping[str, float | Mapping[str, Any]]: ...


def search_recipe(own_grammar: str, headline: tuple[str, ...] = ("em",)) -> Callable[..., Recipe]:
    """The search recipe of a paper.

    Args:
      own_grammar: used if config.agent.grammar is empty.
      headline: the paper's main metrics (evaluation.metrics.ANSWER), which lead tables.

    Returns:
      An entry for RECIPES. It raises ValueError for an unknown grammar or reward term, a prompt without `{question}`, or a
      setting of `sees`, which other recipes have.
    """

    def build(agent: AgentConfig, stages: Mapping[str, StageSettings], tools: Sequence[str], normalizer: str) -> Recipe:
        if agent.prompt and "{question}" not in agent.prompt:
            raise ValueError("config.agent.prompt has no {question} in it")
        if agent.sees:
            raise ValueError(
                f"config.agent.sees={tuple(agent.sees)} is for config.recipe='r1_router': here the query says what is asked; "
                "leave it empty"
            )
        name = agent.grammar or own_grammar
        with naming("config.agent.grammar"):
            make = GRAMMARS.get(name)
        try:
            grammar = make(tools=tuple(tools), **({"raw_results": True} if agent.raw_results else {}))
        except TypeError as error:
            raise ValueError(
                f"config.agent.grammar={name!r} can't be made ({error}); it must be a class that derives from "
                "routerl_jax.agents.grammar.Grammar and writes its abstract methods"
            ) from error
        return Recipe(
            agent=SearchAgent(
                grammar=grammar,
                max_searches=agent.max_searches,
                k=agent.k,
                on_invalid=agent.on_invalid,
                max_turn_tokens=agent.max_turn_tokens,
                max_observation_tokens=agent.max_observation_tokens,
                answer_tokens=agent.answer_tokens,
                prompt=agent.prompt or None,
                instruct=agent.instruct,
                prompt_suffix=agent.prompt_suffix,
            ),
            stages=stages_of(stages, normalizer),
            headline=headline,
        )

    return build


# Not from a paper: R1-Router's tags in one growing conversation. With config.agent.grammar, any protocol of your own.
recipe = search_recipe("r1_router")


def stages_of(stages: Mapping[str, StageSettings], normalizer: str) -> list[Stage]:
    """The stages with their rewards, in order of their start. Raises ValueError for an unknown reward term."""
    result = []
    for name, stage in stages.items():
        with naming(f"config.stages.{name}.reward"):
            reward = RewardFunction(dict(stage.reward), normalizer)
        result.append(Stage(name=name, start=stage.start, reward=reward))
    return sorted(result, key=lambda stage: stage.start)
