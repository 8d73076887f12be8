"""Iter-RetGen: the reply of each round is part of the next query (Shao et al., arXiv 2305.15294)."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from routerl_jax.agents.agent import LLM, Tools
from routerl_jax.core.types import Episode, Example
from routerl_jax.extras.baselines.baseline import Baseline, ChatPrompt
from routerl_jax.extras.baselines.ircot import TASK
from routerl_jax.extras.baselines.registry import baseline
from routerl_jax.extras.baselines.worked import chains


@baseline(
    "iter_retgen", paper="2305.15294", about="reads and writes a chain of thought, then searches with it, in rounds"
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class IterRetGen(Baseline):
    """Searches and writes a chain of thought in rounds.

    A round searches, and writes a whole chain of thought from the documents of this round only. The first query is the
    question. Each later query is the chain of the previous round, followed by the question (section 3.2). The conclusion of
    the last chain is the answer.

    FlashRAG puts the question before the chain, and has 3 rounds. R1-Router's row with this name is another method: it asks for
    sub-questions until "None", answers each, and answers the question from these.

    Attributes:
      rounds: number of rounds. The paper recommends 2, and goes up to 7.
      shots: number of worked questions in the task, at most 8.
    """

    searches_field: ClassVar[str] = "rounds"

    rounds: int = 2
    shots: int = 4

    async def run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        query, question = example.question, self.question(example, llm)

        def request_of(documents: str) -> ChatPrompt:
            text = f"Documents:\n{documents}\n\nQuestion: {question}"
            return ChatPrompt(task=f"{TASK}{chains(self.shots)}", text=text, cue="Answer:")

        for _ in range(self.rounds - 1):
            results = await self.search(tools, query)
            request = self.fitted(example, llm, results.passages, request_of, results.failure)
            _, turn, text = await self.ask(example, llm, request, stop=self.ends(llm))
            chain = " ".join(text.split("\nQuestion:")[0].split())
            query = f"{chain} {example.question}".strip()
            turn.action, turn.well_formed = self.search_action(query, thought=chain), bool(chain)
        results = await self.search(tools, query)
        request = self.fitted(example, llm, results.passages, request_of, results.failure)
        return await self.think(self.begin(example, llm, request), llm)

    @property
    def search_budget(self) -> int:
        """One search per round, of each knowledge base."""
        return self.rounds * max(1, len(self.tools))
