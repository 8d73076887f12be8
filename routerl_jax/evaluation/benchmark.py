"""Running agents over a fixed set of questions."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from routerl_jax.agents.agent import Agent, SearchTool
from routerl_jax.agents.driver import run
from routerl_jax.agents.search_agent import SearchAgent
from routerl_jax.baselines import stepwise
from routerl_jax.baselines.routing import FixedRouting, RandomRouting, no_search, vanilla_rag
from routerl_jax.core.types import Episode, Example
from routerl_jax.evaluation.metrics import summarize
from routerl_jax.evaluation.records import episode_record, write_records
from routerl_jax.generation.engine import Engine
from routerl_jax.generation.sampling import GREEDY, Sampling
from routerl_jax.parallel import multihost
from routerl_jax.recipes.r1_router_agents import StepwiseAgent


def score(
    agent: Agent,
    examples: Sequence[Example],
    engine: Engine,
    tools: Mapping[str, SearchTool],
    normalizer: str = "search_r1",
    *,
    sampling: Sampling = GREEDY,
    seed: int = 0,
    progress: str = "",
) -> tuple[dict[str, Any], list[Episode]]:
    """Runs an agent once on every example, greedily unless asked otherwise; returns metrics and episodes."""
    episodes = run(agent, examples, engine, tools, samples=1, seed=seed, sampling=sampling, progress=progress)
    return summarize(episodes, normalizer), episodes


def compare(
    agents: Mapping[str, Agent],
    examples: Sequence[Example],
    engine: Engine,
    tools: Mapping[str, SearchTool],
    normalizer: str = "search_r1",
    *,
    progress: bool = True,
    records: pathlib.Path | None = None,
) -> dict[str, dict[str, Any]]:
    """Metrics of several agents with one policy on the same questions, by name; their episodes in `records`/NAME.jsonl."""
    table = {}
    for name, agent in agents.items():
        said = f"evaluating {name}" if progress else ""
        table[name], episodes = score(agent, examples, engine, tools, normalizer, progress=said)
        if records is not None and multihost.is_main():
            write_records(records / f"{name}.jsonl", (episode_record(episode) for episode in episodes))
    return table


def routing_baselines(agent: Agent) -> dict[str, Agent]:
    """The same policy with its choices taken away: always one knowledge base, random, one search for the question, none.

    There are none of an agent that is neither a SearchAgent nor a StepwiseAgent.
    """
    if isinstance(agent, StepwiseAgent):
        several = stepwise.fixed_and_random(agent)
        single = {} if several else stepwise.one_search(agent)
        return {**several, **single, "no_search": dataclasses.replace(agent, max_searches=0)}
    if not isinstance(agent, SearchAgent):
        return {}
    fields = {name: getattr(agent, name) for name in agent.__dataclass_fields__}
    fixed = {
        f"only_{tool}": FixedRouting(**fields, tool=tool)
        for tool in agent.grammar.tools
        if len(agent.grammar.tools) > 1
    }
    several = {"random_kb": RandomRouting(**fields)} if fixed else {}
    single = {} if several else vanilla_rag(agent)
    return {**fixed, **several, **single, "no_search": no_search(agent)}


def one_search(agent: Agent) -> dict[str, Agent]:
    """The same policy given what its question finds, with each knowledge base: `vanilla_rag`, `vanilla_rag_KB`."""
    if isinstance(agent, StepwiseAgent):
        return {**stepwise.one_search(agent)}
    return {**vanilla_rag(agent)} if isinstance(agent, SearchAgent) else {}
