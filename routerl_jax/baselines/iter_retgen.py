"""Iter-RetGen: each answer helps the next search (Shao et al., arXiv 2305.15294)."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from routerl_jax.agents.agent import LLM, Tools
from routerl_jax.baselines.baseline import Asked, Baseline
from routerl_jax.baselines.ircot import TASK
from routerl_jax.baselines.registry import baseline
from routerl_jax.baselines.worked import chains
from routerl_jax.core.types import Episode, Example


@baseline(
    "iter_retgen", paper="2305.15294", about="reads and writes a chain of thought, then searches with it, in rounds"
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class IterRetGen(Baseline):
    """A round searches and writes a whole chain of thought from what was found in this round alone. The first query is the
    question, each later one the chain of the round before and the question (section 3.2). The last chain's conclusion is the
    answer.

    FlashRAG has the question before the chain, and 3 rounds. R1-Router's row is another method under this name: it asks
    for sub-questions until "None", answers each, and answers from these.

    Attributes:
      rounds: 2 is what the paper recommends; it goes up to 7.
      shots: worked questions in the task, of at most 8.
    """

    searches_field: ClassVar[str] = "rounds"

    rounds: int = 2
    shots: int = 4

    async def run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        query, question = example.question, self.question(example, llm)

        def asking(documents: str) -> Asked:
            text = f"Documents:\n{documents}\n\nQuestion: {question}"
            return Asked(task=f"{TASK}{chains(self.shots)}", text=text, cue="Answer:")

        for _ in range(self.rounds - 1):
            found = await self.search(tools, query)
            asked = self.fitted(example, llm, found.passages, asking, found.trouble)
            _, turn, text = await self.ask(example, llm, asked, stop=self.ends(llm))
            chain = " ".join(text.split("\nQuestion:")[0].split())
            query = f"{chain} {example.question}".strip()
            turn.action, turn.well_formed = self.searching(query, thought=chain), bool(chain)
        found = await self.search(tools, query)
        asked = self.fitted(example, llm, found.passages, asking, found.trouble)
        return await self.think(self.begin(example, llm, asked), llm)

    @property
    def search_budget(self) -> int:
        """One search a round, of each knowledge base."""
        return self.rounds * max(1, len(self.tools))
