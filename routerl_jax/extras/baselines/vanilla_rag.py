"""Vanilla RAG: retrieve, then read (arXiv 2005.11401 without its training; R1-Router, 2505.22095, appendix A.5)."""

from __future__ import annotations

import dataclasses

from routerl_jax.agents.agent import LLM, Tools
from routerl_jax.core.types import Episode, Example
from routerl_jax.extras.baselines.baseline import Baseline, ChatPrompt, SearchResults
from routerl_jax.extras.baselines.registry import baseline

READ = (
    "Answer the question. The documents may help: use what is true and fits, and leave the rest. Write the answer alone, in a "
    "few words, without an explanation."
)


@baseline("vanilla_rag", paper="2005.11401", about="one search, for the question itself; reads and answers")
@dataclasses.dataclass(frozen=True, kw_only=True)
class VanillaRAG(Baseline):
    """Searches for the question, and answers with the documents in the prompt.

    With several knowledge bases there are k documents of each, as in R1-Router (five of each). They alternate between the
    knowledge bases.
    """

    async def run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        results = await self.search(tools, example.question)
        return await self.read(example, llm, results)

    async def read(self, example: Example, llm: LLM, results: SearchResults) -> Episode:
        """Answers from documents in a new chat."""
        question = self.question(example, llm)

        def request_of(documents: str) -> ChatPrompt:
            return ChatPrompt(task=READ, text=f"Documents:\n{documents}\n\nQuestion: {question}", cue="Answer:")

        request = self.fitted(example, llm, results.passages, request_of, results.failure, self.answer_tokens)
        return await self.answer(example, llm, request)

    @property
    def search_budget(self) -> int:
        """One search of each knowledge base."""
        return max(1, len(self.tools))
