"""Baselines without a search: a direct answer, and chain of thought (arXiv 2201.11903; zero-shot 2205.11916)."""

from __future__ import annotations

import dataclasses

from routerl_jax.agents.agent import LLM, Tools
from routerl_jax.core.types import Episode, Example
from routerl_jax.extras.baselines.baseline import Baseline, ChatPrompt
from routerl_jax.extras.baselines.forms import CONCLUSION
from routerl_jax.extras.baselines.registry import baseline
from routerl_jax.extras.baselines.worked import chains

DIRECT = "Answer the question with the answer alone, in a few words, without an explanation."
THINK = (
    "Think about the question step by step, one fact per sentence. End with a sentence that begins with "
    f'"{CONCLUSION}" and has the answer alone, in a few words.'
)


@baseline("direct", paper="", about="answers at once, without a search", searches="nothing")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Direct(Baseline):
    """Answers in one turn."""

    async def run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        request = ChatPrompt(task=DIRECT, text=f"Question: {self.question(example, llm)}", cue="Answer:")
        return await self.answer(example, llm, request)

    @property
    def search_budget(self) -> int:
        """0: it never searches."""
        return 0


@baseline("cot", paper="2201.11903", about="thinks step by step, then answers, without a search", searches="nothing")
@dataclasses.dataclass(frozen=True, kw_only=True)
class ChainOfThought(Baseline):
    """Thinks step by step, and ends with "So the answer is:".

    If the policy does not end so, it is asked once more, as in the second stage of zero-shot chain of thought (2205.11916).
    That method has no worked questions in its prompts (`shots=0`).

    Attributes:
      shots: number of worked questions in the task, at most 8 (`worked`).
    """

    shots: int = 4

    async def run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        text = f"Question: {self.question(example, llm)}"
        chat = self.begin(example, llm, ChatPrompt(task=f"{THINK}{chains(self.shots)}", text=text, cue="Answer:"))
        return await self.think(chat, llm)

    @property
    def search_budget(self) -> int:
        """0: it never searches."""
        return 0
