"""Baselines with the policy's own weights: it does not choose where to search, whether, or for what."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence

from routerl_jax.agents.agent import LLM, Tools
from routerl_jax.agents.search_agent import SearchAgent
from routerl_jax.core.types import Action, Episode, Example


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
        return drawn(self.grammar.tools, self.seed, example, sample, step)


def drawn(tools: Sequence[str], seed: int, example: Example, sample: int, step: int) -> str:
    """A knowledge base drawn uniformly by a hash, the same in every run."""
    return tools[zlib.crc32(f"{seed}/{example.id}/{sample}/{step}".encode()) % len(tools)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class VanillaRAG(SearchAgent):
    """Retrieve, then read: one search for the question as it is, written in the policy's place, and then its answer."""

    tool: str

    async def run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        chat = llm.conversation(self.opening(example, llm.tokenizer, llm.image_marker), example.images)
        reserve = self.answer_tokens + chat.tokens_of(self.grammar.answer_opening)
        search = self.grammar.write_search("", example.question, self.tool)
        if chat.tokens_of(search) <= chat.room - reserve:
            turn = chat.write(search)
            turn.action = Action(kind="search", tool=self.tool, query=example.question)
            self.show(await tools[self.tool].search(example.question, self.k), chat, reserve)
        return await self.final_answer(chat, reserve)


def vanilla_rag(agent: SearchAgent) -> dict[str, SearchAgent]:
    """The same policy given what its question finds: `vanilla_rag`, or `vanilla_rag_KB` for each of several."""
    fields = {name: getattr(agent, name) for name in agent.__dataclass_fields__}
    tools = agent.grammar.tools
    return {
        "vanilla_rag" if len(tools) == 1 else f"vanilla_rag_{tool}": VanillaRAG(**fields, tool=tool) for tool in tools
    }


def no_search(agent: SearchAgent) -> SearchAgent:
    """The same policy, made to answer at once."""
    return dataclasses.replace(agent, max_searches=0)
