"""The recipe "r1_router": Step-GRPO if training questions are golden steps, independent chats for all other questions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from routerl_jax.agents.config import AgentConfig
from routerl_jax.recipes.r1_router.agents import StepwiseAgent
from routerl_jax.recipes.r1_router.calls import RouteCalls, StepCalls
from routerl_jax.recipes.r1_router.steps import StepProtocol
from routerl_jax.recipes.recipe import TOOL_CALLS, Recipe
from routerl_jax.recipes.search import StageSettings, stages_of


def r1_router(agent: AgentConfig, stages: Mapping[str, StageSettings], tools: Sequence[str], normalizer: str) -> Recipe:
    """Builds the recipe from its configuration. (Grammar "r1_router" with recipe "search" is one growing conversation.)

    Raises:
      ValueError: another grammar than `tool_calls`, a prompt or `on_invalid` is set, which this recipe does not have; `sees`
        names no knowledge base; or a reward term is unknown.
    """
    if agent.grammar not in ("", "r1_router", TOOL_CALLS):
        raise ValueError(
            f"config.agent.grammar={agent.grammar!r}: config.recipe='r1_router' has tags and chats of its own; leave "
            f"it empty, or set config.recipe='search', or take {TOOL_CALLS!r}"
        )
    if agent.prompt:
        raise ValueError("config.agent.prompt: config.recipe='r1_router' has three prompts of its own; leave it empty")
    if agent.on_invalid != "remind":
        raise ValueError(
            f"config.agent.on_invalid={agent.on_invalid!r}: config.recipe='r1_router' asks again for what can't be read; leave "
            "on_invalid='remind'"
        )
    if unknown := [name for name in agent.sees if name not in tools]:
        raise ValueError(f"config.agent.sees: {unknown[0]!r} is no knowledge base; there are: {', '.join(tools)}")
    protocol = StepProtocol(tools=tuple(tools))
    if agent.grammar == TOOL_CALLS:
        protocol = StepCalls(tools=tuple(tools), routes=RouteCalls(tools=tuple(tools)))
    return Recipe(
        agent=StepwiseAgent(
            protocol=protocol,
            max_searches=agent.max_searches,
            k=agent.k,
            max_turn_tokens=agent.max_turn_tokens,
            max_observation_tokens=agent.max_observation_tokens,
            answer_tokens=agent.answer_tokens,
            instruct=agent.instruct,
            prompt_suffix=agent.prompt_suffix,
            sees=tuple(agent.sees) or StepwiseAgent.sees,
        ),
        stages=stages_of(stages, normalizer),
        headline=("f1_recall",),
    )
