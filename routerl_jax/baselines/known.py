"""The same policy with its choices taken away: where to search, whether, or for what."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from routerl_jax.agents.agent import Agent
from routerl_jax.agents.routing import Always, Drawn
from routerl_jax.agents.search_agent import SearchAgent
from routerl_jax.baselines.vanilla_rag import NoSearch, OneSearch, VanillaRAG
from routerl_jax.recipes.r1_router_agents import StepwiseAgent

Searcher = SearchAgent | StepwiseAgent


def routing_baselines(agent: Agent) -> dict[str, Agent]:
    """`only_KB` for each knowledge base and `random_kb`, where there are several, else `vanilla_rag`; and `no_search`. For an
    agent that works in steps also always as many searches as there may be: `full_budget`, where the policy says what the
    further ones are for, so that only its stopping is taken away; `full_budget_random`, where they put the question itself to a
    drawn knowledge base.

    There are none of an agent that is neither a SearchAgent nor a StepwiseAgent.
    """
    if not isinstance(agent, Searcher):
        return {}
    if len(agent.tools) > 1:
        baselines: dict[str, Agent] = {
            f"only_{tool}": dataclasses.replace(agent, routing=Always(tool)) for tool in agent.tools
        }
        baselines["random_kb"] = dataclasses.replace(agent, routing=Drawn())
    else:
        baselines = vanilla_rag(agent)
    if isinstance(agent, StepwiseAgent):
        baselines["full_budget"] = dataclasses.replace(agent, beyond="own")
        baselines["full_budget_random"] = dataclasses.replace(agent, beyond=Drawn())
    direct = NoSearch if isinstance(agent, SearchAgent) else StepwiseAgent
    return {**baselines, "no_search": direct(**{**_fields(agent), "max_searches": 0})}


def vanilla_rag(agent: Agent) -> dict[str, Agent]:
    """The same policy given what its question finds: `vanilla_rag`, or `vanilla_rag_KB` for each of several; see above."""
    if not isinstance(agent, Searcher):
        return {}
    make = VanillaRAG if isinstance(agent, SearchAgent) else OneSearch
    several = len(agent.tools) > 1
    return {
        f"vanilla_rag_{tool}" if several else "vanilla_rag": make(**_fields(agent), tool=tool) for tool in agent.tools
    }


def _fields(agent: Searcher) -> Mapping[str, Any]:
    return {field.name: getattr(agent, field.name) for field in dataclasses.fields(agent)}
