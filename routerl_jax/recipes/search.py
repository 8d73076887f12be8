"""The plain search recipe: one agent, one growing conversation, a weighted sum of outcome rewards per stage.

Search-R1, R1-Searcher and RouteRAG are this recipe; grammar, budget and reward terms come from the configuration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from routerl_jax.agents.grammar import GRAMMARS
from routerl_jax.agents.search_agent import OnInvalid, SearchAgent
from routerl_jax.recipes.recipe import RECIPES, Recipe, Stage
from routerl_jax.rewards.terms import RewardFunction


class AgentSettings(Protocol):
    """The fields of the run configuration's `agent` section (the schema lives upstairs, in training.config)."""

    @property
    def grammar(self) -> str: ...
    @property
    def max_searches(self) -> int: ...
    @property
    def k(self) -> int: ...
    @property
    def on_invalid(self) -> OnInvalid: ...
    @property
    def max_turn_tokens(self) -> int: ...
    @property
    def max_observation_tokens(self) -> int: ...
    @property
    def answer_tokens(self) -> int: ...
    @property
    def prompt(self) -> str: ...
    @property
    def instruct(self) -> bool: ...
    @property
    def prompt_suffix(self) -> str: ...
    @property
    def sees(self) -> Sequence[str]: ...


class StageSettings(Protocol):
    """The fields of one of the run configuration's `stages`."""

    @property
    def start(self) -> int: ...
    @property
    def reward(self) -> Mapping[str, float | Mapping[str, Any]]: ...


@RECIPES.register("search")
def search(agent: AgentSettings, stages: Mapping[str, StageSettings], tools: Sequence[str], normalizer: str) -> Recipe:
    """Builds the recipe from its configuration.

    Raises:
      ValueError: unknown grammar or reward term, a prompt without `{question}`, or `sees` of another recipe.
    """
    if agent.prompt and "{question}" not in agent.prompt:
        raise ValueError("config.agent.prompt has no {question} in it")
    if agent.sees:
        raise ValueError(
            f"config.agent.sees={tuple(agent.sees)} is for config.recipe='r1_router': here the query says what is asked; leave "
            "it empty"
        )
    grammar = GRAMMARS.get(agent.grammar)(tools=tuple(tools))
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
        headline=grammar.headline,
    )


def stages_of(stages: Mapping[str, StageSettings], normalizer: str) -> list[Stage]:
    """The stages with their rewards, in order of their start. Raises ValueError for an unknown reward term."""
    made = [
        Stage(name=name, start=stage.start, reward=RewardFunction(dict(stage.reward), normalizer))
        for name, stage in stages.items()
    ]
    return sorted(made, key=lambda stage: stage.start)
