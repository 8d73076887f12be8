"""SuRe: candidate answers, a summary in favour of each, and a vote between summaries (Kim et al., arXiv 2404.13081)."""

from __future__ import annotations

import dataclasses
import itertools
import re

from routerl_jax.agents.agent import LLM, Tools
from routerl_jax.core.types import Episode, Example
from routerl_jax.extras.baselines.baseline import Baseline, ChatPrompt, SearchResults, answered
from routerl_jax.extras.baselines.forms import tidied
from routerl_jax.extras.baselines.registry import baseline

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
    """Searches for the question, then asks in separate chats:

    1. for candidate answers, with all documents,
    2. for each candidate, for a summary of the documents in its favour,
    3. for each summary, whether it is valid (1 or 0),
    4. for each ordered pair of summaries, which one is better. The first gets a point if it is, and half a point if the reply
       can't be read.

    The candidate with the largest sum of validity and points wins, or the earliest of several. If no candidate can be read, the
    episode ends without an answer, as in FlashRAG, which this follows.

    Attributes:
      k: documents per search; 10 in the paper.
      candidates: number of candidates; 2 in the paper.
    """

    k: int = 10
    candidates: int = 2

    async def run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        results, question = await self.search(tools, example.question), f"Question: {self.question(example, llm)}"
        request = self.reading(
            example, llm, results, CANDIDATES.format(count=self.candidates), question, "Answers: (a)"
        )
        chat, turn, text = await self.ask(example, llm, request, max_tokens=self.answer_tokens * self.candidates)
        names = listed(text if self.chats(llm) else f"(a){text}")[: self.candidates]
        if not names:
            return chat.episode(answer=answered(turn, None, "no answer of a list (a) .., (b) .. can be read"))
        turn.well_formed = True
        summaries, scores = [], []
        for name in names:
            question_and_answer = f"{question}\nGiven answer: {llm.tokenizer.plain(name)}"
            request = self.reading(example, llm, results, SUMMARY, question_and_answer, "Passage:")
            chat, _, text = await self.ask(example, llm, request, stop=() if self.chats(llm) else ("\n",))
            summaries.append(llm.tokenizer.plain(text.strip()))
            request = ChatPrompt(
                task=VALID, text=f"{question_and_answer}\nPassage: {summaries[-1]}", cue="True or False:"
            )
            chat, turn, text = await self.ask(example, llm, request, max_tokens=self.answer_tokens)
            said = re.search(r"\b(?:(not )?true|false|untrue)\b", text.lower())
            scores.append(float(said is not None and said[0] == "true"))
        for first, second in itertools.permutations(range(len(names)), 2):
            text = f"Passage 1: {summaries[first]}\nPassage 2: {summaries[second]}\n{question}"
            request = ChatPrompt(task=BETTER, text=text, cue="Better: Passage")
            chat, turn, text = await self.ask(example, llm, request, max_tokens=self.answer_tokens)
            match = re.search(r"(?<!\d)[12](?!\d)", text)
            scores[first] += {"1": 1.0, "2": 0.0}[match[0]] if match else 0.5
        answer = names[scores.index(max(scores))]
        return chat.episode(answer=answered(turn, answer))

    def reading(
        self, example: Example, llm: LLM, results: SearchResults, task: str, question: str, cue: str
    ) -> ChatPrompt:
        """A prompt with documents, for the given task."""

        def request_of(documents: str) -> ChatPrompt:
            return ChatPrompt(task=task, text=f"Documents:\n{documents}\n\n{question}", cue=cue)

        return self.fitted(example, llm, results.passages, request_of, results.failure)

    @property
    def search_budget(self) -> int:
        """One search of each knowledge base."""
        return max(1, len(self.tools))


def listed(text: str) -> list[str]:
    """The entries of a list (a) .., (b) .., without duplicates."""
    entries = [tidied(entry.strip().rstrip(",;")) for entry in re.findall(r"\([a-z]\)[ \t]*([^()\n]+)", text)]
    return list(dict.fromkeys(entry for entry in entries if entry))
