"""HippoRAG 2's reader: a thought, then an answer, after one worked example with documents (arXiv 2502.14802)."""

from __future__ import annotations

import dataclasses

from routerl_jax.agents.agent import LLM, Tools
from routerl_jax.baselines.baseline import Asked, Baseline, answered, said
from routerl_jax.baselines.forms import last_line, tidied
from routerl_jax.baselines.registry import baseline
from routerl_jax.baselines.worked import WORKED, examples
from routerl_jax.core.types import Episode, Example

TASK = (
    'Read the documents and the question with care. After "Thought:" work out the answer step by step; then, after "Answer:", '
    "write it alone, as short and exact as it can be said."
)


@baseline(
    "hipporag_reader", paper="2502.14802", about="one search, for the question itself; a thought, then the answer"
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class HippoRAGReader(Baseline):
    """Searches for the question and reads with a thought and an answer (the reader of OSU-NLP-Group/HippoRAG, whose one worked
    example has documents). Over a knowledge base of kind "graph" it is HippoRAG 2, over a dense one its baseline.

    A reply without "Answer:" is taken whole in the code; here the answer is asked for, or begun.

    Attributes:
      k: 5 in the paper.
      shots: worked questions with documents in the task, of at most 8.
    """

    shots: int = 1

    async def run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        found, question = await self.search(tools, example.question), self.question(example, llm)
        task = TASK + examples([worked(number) for number in range(min(self.shots, len(WORKED)))])

        def asking(documents: str) -> Asked:
            text = f"Documents:\n{documents}\n\nQuestion: {question}"
            return Asked(task=task, text=text, begun="Thought:")

        asked = self.fitted(example, llm, found.passages, asking, found.trouble)
        chat = self.begin(example, llm, asked)
        turn = await self.generate(chat, self.ends(llm), opening="\nAnswer:")
        text = said(turn, llm).split("\nQuestion:")[0]
        if answer := tidied(last_line(text, "Answer:") or ""):
            return chat.episode(answer=answered(turn, answer))
        return await self.conclude(chat, llm, turn, opening="\nAnswer:")

    @property
    def search_budget(self) -> int:
        """One of each knowledge base."""
        return max(1, len(self.tools))


def worked(number: int) -> str:
    """A worked question with its documents."""
    one = WORKED[number]
    pages = "\n".join(f"[{at}] {hop.title}: {hop.text}" for at, hop in enumerate(one.hops, 1))
    thought = " ".join(hop.fact for hop in one.hops)
    return f"Documents:\n{pages}\n\nQuestion: {one.question}\nThought: {thought}\nAnswer: {one.answer}"
