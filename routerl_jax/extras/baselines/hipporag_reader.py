"""HippoRAG 2's reader: a thought, then an answer, after one worked example with documents (arXiv 2502.14802)."""

from __future__ import annotations

import dataclasses

from routerl_jax.agents.agent import LLM, Tools
from routerl_jax.core.types import Episode, Example
from routerl_jax.extras.baselines.baseline import Baseline, ChatPrompt, answered, reply_text
from routerl_jax.extras.baselines.forms import last_line, tidied
from routerl_jax.extras.baselines.registry import baseline
from routerl_jax.extras.baselines.worked import WORKED, examples

TASK = (
    'Read the documents and the question with care. After "Thought:" work out the answer step by step; then, after "Answer:", '
    "write it alone, as short and exact as it can be said."
)


@baseline(
    "hipporag_reader", paper="2502.14802", about="one search, for the question itself; a thought, then the answer"
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class HippoRAGReader(Baseline):
    """Searches for the question, then writes a thought and an answer.

    This is the reader of OSU-NLP-Group/HippoRAG, which has one worked example with documents. With a knowledge base of kind
    "graph" it is HippoRAG 2, with a dense one it is that paper's baseline. The code takes a reply without "Answer:" as a whole;
    here the policy is asked for the answer, or the answer is begun for it.

    Attributes:
      k: 5 in the paper.
      shots: number of worked questions with documents in the task, at most 8.
    """

    shots: int = 1

    async def run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        results, question = await self.search(tools, example.question), self.question(example, llm)
        task = TASK + examples([worked(number) for number in range(min(self.shots, len(WORKED)))])

        def request_of(documents: str) -> ChatPrompt:
            text = f"Documents:\n{documents}\n\nQuestion: {question}"
            return ChatPrompt(task=task, text=text, begun="Thought:")

        request = self.fitted(example, llm, results.passages, request_of, results.failure)
        chat = self.begin(example, llm, request)
        turn = await self.generate(chat, self.ends(llm), opening="\nAnswer:")
        text = reply_text(turn, llm).split("\nQuestion:")[0]
        if answer := tidied(last_line(text, "Answer:") or ""):
            return chat.episode(answer=answered(turn, answer))
        return await self.conclude(chat, llm, turn, opening="\nAnswer:")

    @property
    def search_budget(self) -> int:
        """One search of each knowledge base."""
        return max(1, len(self.tools))


def worked(number: int) -> str:
    """A worked question with its documents, as text."""
    question = WORKED[number]
    documents = "\n".join(f"[{rank}] {hop.title}: {hop.text}" for rank, hop in enumerate(question.hops, 1))
    thought = " ".join(hop.fact for hop in question.hops)
    return f"Documents:\n{documents}\n\nQuestion: {question.question}\nThought: {thought}\nAnswer: {question.answer}"
