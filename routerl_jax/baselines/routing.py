"""Routing baselines: the same policy and loop, but the knowledge base is not the policy's choice."""

from __future__ import annotations

import dataclasses
import zlib

from routerl_jax.agents.search_agent import SearchAgent
from routerl_jax.core.types import Action, Example


@dataclasses.dataclass(frozen=True, kw_only=True)
class FixedRouting(SearchAgent):
    """Every search goes to one knowledge base, whatever the policy names."""

    tool: str

    def choose(self, action: Action, example: Example, sample: int, step: int) -> str:
        return self.tool


@dataclasses.dataclass(frozen=True, kw_only=True)
class RandomRouting(SearchAgent):
    """Every search goes to a knowledge base drawn uniformly, by a hash of (seed, example, sample, step)."""

    seed: int = 0

    def choose(self, action: Action, example: Example, sample: int, step: int) -> str:
        draw = zlib.crc32(f"{self.seed}/{example.id}/{sample}/{step}".encode())
        return self.grammar.tools[draw % len(self.grammar.tools)]


def no_search(agent: SearchAgent) -> SearchAgent:
    """The same policy, made to answer at once."""
    return dataclasses.replace(agent, max_searches=0)
