"""SuRe: candidates, a summary in favour of each, and a vote between summaries (Kim et al., arXiv 2404.13081)."""

from __future__ import annotations

import dataclasses
import itertools
import re

from routerl_jax.agents.agent import LLM, Tools
from routerl_jax.baselines.baseline import Asked, Baseline, Found, answered
from routerl_jax.baselines.forms import tidied
from routerl_jax.baselines.registry import baseline
from routerl_jax.core.types import Episode, Example

CANDIDATES = (
    "Read the documents and write {count} different answers that the question may have, most likely first, each of at most a "
    "few words, as a list: (a) .., (b) .."
)
SUMMARY = (
    "Write a short passage that speaks for the given answer to the question. Use what the documents say and nothing else. "
    "Write the passage alone."
)
VALID = "Does the passage support the answer to the question? Write True or False."
BETTER = "Two passages are given. Which of them tells more that answers the question? Write Passage 1 or Passage 2."


@baseline("sure", paper="2404.13081", about="candidate answers; a summary for each; the best supported wins")
@dataclasses.dataclass(frozen=True, kw_only=True)
class SuRe(Baseline):
    """Searches for the question and then asks, in chats of their own: for candidates, with all documents; for each candidate a
    summary of the documents in its favour; whether each summary is valid (1 or 0); and for each ordered pair of summaries which
    is the better (a point to the first if it is, half a point where that can't be read). The candidate with the largest sum of
    validity and points wins, the earlier one of equals.

    A reply in which no candidate can be read ends the episode without an answer, as in FlashRAG, which this follows.

    Attributes:
      k: 10 in the paper.
      candidates: 2 in the paper.
    """

    k: int = 10
    candidates: int = 2

    async def run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        found, question = await self.search(tools, example.question), f"Question: {self.question(example, llm)}"
        asked = self.reading(example, llm, found, CANDIDATES.format(count=self.candidates), question, "Answers: (a)")
        chat, turn, text = await self.ask(example, llm, asked, max_tokens=self.answer_tokens * self.candidates)
        names = listed(text if self.chats(llm) else f"(a){text}")[: self.candidates]
        if not names:
            return chat.episode(answer=answered(turn, None, "no answer of a list (a) .., (b) .. can be read"))
        turn.well_formed = True
        summaries, scores = [], []
        for name in names:
            given = f"{question}\nGiven answer: {llm.tokenizer.plain(name)}"
            asked = self.reading(example, llm, found, SUMMARY, given, "Passage:")
            chat, _, text = await self.ask(example, llm, asked, stop=() if self.chats(llm) else ("\n",))
            summaries.append(llm.tokenizer.plain(text.strip()))
            asked = Asked(task=VALID, text=f"{given}\nPassage: {summaries[-1]}", cue="True or False:")
            chat, turn, text = await self.ask(example, llm, asked, max_tokens=self.answer_tokens)
            scores.append(float("true" in text.lower()))
        for first, second in itertools.permutations(range(len(names)), 2):
            text = f"Passage 1: {summaries[first]}\nPassage 2: {summaries[second]}\n{question}"
            asked = Asked(task=BETTER, text=text, cue="Better: Passage")
            chat, turn, text = await self.ask(example, llm, asked, max_tokens=self.answer_tokens)
            said = re.search(r"[12]", text)
            scores[first] += {"1": 1.0, "2": 0.0}[said[0]] if said else 0.5
        answer = names[scores.index(max(scores))]
        return chat.episode(answer=answered(turn, answer))

    def reading(self, example: Example, llm: LLM, found: Found, task: str, asked: str, cue: str) -> Asked:
        """What is asked of the documents."""

        def asking(documents: str) -> Asked:
            return Asked(task=task, text=f"Documents:\n{documents}\n\n{asked}", cue=cue)

        return self.fitted(example, llm, found.passages, asking, found.trouble)

    @property
    def search_budget(self) -> int:
        """One of each knowledge base."""
        return max(1, len(self.tools))


def listed(text: str) -> list[str]:
    """The entries of a list (a) .., (b) .., each once."""
    found = [tidied(one.strip().rstrip(",;")) for one in re.findall(r"\([a-z]\)[ \t]*([^()\n]+)", text)]
    return list(dict.fromkeys(one for one in found if one))
