"""Baselines of agents that work in steps: the policy's own weights, without its choice of where to search, or whether."""

from __future__ import annotations

import dataclasses

from routerl_jax.agents.agent import LLM, Tools
from routerl_jax.baselines.routing import drawn
from routerl_jax.core.types import Action, Episode, Example
from routerl_jax.recipes.r1_router_agents import StepwiseAgent


@dataclasses.dataclass(frozen=True, kw_only=True)
class FixedSteps(StepwiseAgent):
    """Every sub-question goes to one knowledge base, whatever the policy names."""

    tool: str

    def choose(self, action: Action, example: Example, sample: int, step: int) -> str:
        return self.tool


@dataclasses.dataclass(frozen=True, kw_only=True)
class RandomSteps(StepwiseAgent):
    """Every sub-question goes to a knowledge base drawn uniformly (the paper's random routing)."""

    seed: int = 0

    def choose(self, action: Action, example: Example, sample: int, step: int) -> str:
        return drawn(self.protocol.tools, self.seed, example, sample, step)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FullBudget(StepwiseAgent):
    """Always as many sub-questions as there may be: where the policy would stop, the question itself is asked, of a knowledge
    base drawn uniformly."""

    seed: int = 0

    def next_search(self, action: Action | None, example: Example, sample: int, step: int) -> Action | None:
        found = super().next_search(action, example, sample, step)
        if found is not None:
            return found
        tool = drawn(self.protocol.tools, self.seed, example, sample, step)
        return Action(kind="search", tool=tool, query=example.question)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneSearch(StepwiseAgent):
    """Retrieve, then read: one search for the question as it is, and the answer from what it finds."""

    tool: str

    async def run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        call = await tools[self.tool].search(self.query(self.tool, example.question, example), self.k)
        chats = []
        answer = await self._answer(self.read(example.question, call, example, llm), example, llm, chats)
        episode = chats[-1].episode(answer=answer)
        episode.turns[0].calls.append(call)  # it was made before there was a turn
        return episode


def fixed_and_random(agent: StepwiseAgent) -> dict[str, StepwiseAgent]:
    """`only_KB` for each of several knowledge bases, `random_kb` and `full_budget`; none where there is one."""
    fields = {field.name: getattr(agent, field.name) for field in dataclasses.fields(StepwiseAgent)}
    tools = agent.protocol.tools
    if len(tools) == 1:
        return {}
    return {
        **{f"only_{tool}": FixedSteps(**fields, tool=tool) for tool in tools},
        "random_kb": RandomSteps(**fields),
        "full_budget": FullBudget(**fields),
    }


def one_search(agent: StepwiseAgent) -> dict[str, StepwiseAgent]:
    """The same policy given what its question finds: `vanilla_rag`, or `vanilla_rag_KB` for each of several."""
    fields = {field.name: getattr(agent, field.name) for field in dataclasses.fields(StepwiseAgent)}
    tools = agent.protocol.tools
    return {
        "vanilla_rag" if len(tools) == 1 else f"vanilla_rag_{tool}": OneSearch(**fields, tool=tool) for tool in tools
    }
