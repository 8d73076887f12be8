"""The policy's answer without a search, or after one that is made in its place: for the question as it is."""

from __future__ import annotations

import dataclasses

from routerl_jax.agents.agent import LLM, Conversation, Tools
from routerl_jax.agents.search_agent import SearchAgent
from routerl_jax.core.types import Action, Episode, Example
from routerl_jax.recipes.r1_router_agents import StepwiseAgent


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoSearch(SearchAgent):
    """The answer is begun for the policy at once, whatever ends its budget: left alone, it would search."""

    max_searches: int = 0

    @property
    def last_opening(self) -> str:
        return self.grammar.answer_opening


@dataclasses.dataclass(frozen=True, kw_only=True)
class VanillaRAG(NoSearch):
    """Retrieve, then read, in one conversation: the search is written in the policy's place."""

    tool: str

    async def run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        chat = llm.conversation(self.opening(example, llm.tokenizer, llm.image_marker), example.images)
        reserve = self.answer_tokens + chat.tokens_of(self.last_opening)
        search = self.grammar.write_search("", example.question, self.tool)
        if chat.tokens_of(search) <= chat.room - reserve:
            turn = chat.write(search)
            turn.action = Action(kind="search", tool=self.tool, query=example.question)
            self.show(await tools[self.tool].search(example.question, self.k), chat, reserve)
        return await self.final_answer(chat, reserve)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneSearch(StepwiseAgent):
    """Retrieve, then read, in a chat: what was found, and the question, asked in the words of the final answer."""

    tool: str

    async def run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        call = await tools[self.tool].search(self.query(self.tool, example.question, example), self.k)
        chats: list[Conversation] = []
        answer = await self._answer(self.read(example.question, call, example, llm, last=True), example, llm, chats)
        return chats[-1].episode(answer=answer)
