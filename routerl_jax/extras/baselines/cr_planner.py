"""CR-Planner: proposes candidates for every step, and a critic chooses (Li et al., arXiv 2410.01428)."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import ClassVar

from routerl_jax.agents.agent import LLM, Tools
from routerl_jax.agents.conversation import Conversation
from routerl_jax.core.types import Episode, Example, Turn
from routerl_jax.extras.baselines.baseline import Baseline, ChatPrompt, answered, documents
from routerl_jax.extras.baselines.forms import CONCLUSION, concluded, tidied
from routerl_jax.extras.baselines.registry import baseline
from routerl_jax.extras.baselines.universal_rag import chosen

REASON, SEARCH = "reason", "search"
_SETTING = "A question is answered step by step: a step is a thought, or a search that fetches one document. "
PLAN = _SETTING + f'Say what should come next: write "{REASON}" or "{SEARCH}", alone.'
THOUGHTS = _SETTING + (
    "Propose {count} different thoughts that could come next, as a list with a line each: 1. .., 2. .. A thought draws one "
    f'conclusion from the steps so far; one that settles the question ends with "{CONCLUSION}" and the answer alone, in a few '
    "words."
)
QUERIES = _SETTING + (
    "Propose {count} different queries that could be searched for next, as a list with a line each: 1. .., 2. .. A query asks "
    "for one thing that is missing."
)
CHOOSE = (
    _SETTING + "Below are proposals for the next one. Write the number of the proposal that brings the answer nearest."
)
DOCUMENT = _SETTING + "Below is what the last search found. Write the number of the document that helps most."
ANSWER = _SETTING + "The steps are below. Write the answer to the question alone, in a few words."

_NUMBERED = re.compile(r"^[ \t]*\d+[.)][ \t]*(.+)$", re.MULTILINE)


@baseline(
    "cr_planner", paper="2410.01428", about="proposes thoughts, queries and documents; a critic chooses each step"
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class CRPlanner(Baseline):
    """Plans step by step. A step is a thought, or a query with one of the documents that it finds.

    First the sub-goal critic chooses between a thought and a search. Then candidates are proposed, and the execution critic
    takes one: among thoughts, among queries, and among the k documents of the chosen query. The episode ends with a thought
    that gives the answer. When no steps are left, the policy is asked for the answer. When no searches are left, all further
    steps are thoughts.

    Every choice and every list of candidates is a new chat over the steps so far, or over the latest ones that have room. A
    single candidate is taken without a choice. If a choice can't be read, it is invalid, and the first candidate is taken. If a
    plan can't be read, the step is a thought.

    The paper's critics are reward models, trained on values that a Monte Carlo tree search estimates. Here the policy chooses
    itself, which needs no log-probabilities. Its candidates come in one list; the paper samples each. Neither the paper's full
    text nor its code was at hand, so details may differ.

    Attributes:
      k: documents that a query finds; one of them is kept.
      candidates: number of thoughts or queries that are proposed.
      max_steps: most thoughts and searches together.
      max_searches: most searches among these steps.
    """

    searches_field: ClassVar[str] = "max_searches"

    candidates: int = 3
    max_steps: int = 8
    max_searches: int = 3

    async def run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        steps: list[str] = []
        searches = 0
        for _ in range(self.max_steps):
            goal = await self.goal(example, llm, steps) if searches < self.max_searches else REASON
            if goal == SEARCH:
                searches += 1
                steps += await self.searched(example, llm, tools, steps)
                continue
            chat, turn, thought = await self.select(example, llm, steps, THOUGHTS, "Thoughts", self.max_turn_tokens)
            if answer := concluded(thought):
                return chat.episode(answer=answered(turn, answer))
            steps.append(f"Thought: {thought}")
        request = self.over(example, llm, steps, ANSWER, "", "Answer:", self.answer_tokens)
        return await self.answer(example, llm, request)

    async def goal(self, example: Example, llm: LLM, steps: Sequence[str]) -> str:
        """Chooses whether a thought or a search comes next."""
        request = self.over(example, llm, steps, PLAN, "", "Next:", self.answer_tokens)
        _, turn, text = await self.ask(example, llm, request, stop=self.line(llm), max_tokens=self.answer_tokens)
        goal = chosen(text, (REASON, SEARCH))
        if goal not in (REASON, SEARCH):
            answered(turn, None, f"it says neither {REASON} nor {SEARCH}")
            return REASON
        turn.asked, turn.well_formed = "route", True
        return goal

    async def searched(self, example: Example, llm: LLM, tools: Tools, steps: Sequence[str]) -> list[str]:
        """Chooses a query and one of the documents that it finds. Returns both as steps."""
        tokens = self.answer_tokens * self.candidates
        _, turn, query = await self.select(example, llm, steps, QUERIES, "Queries", tokens)
        turn.action = self.search_action(query)
        step = f"Query: {llm.tokenizer.plain(query)}"
        results = await self.search(tools, query)
        if not results.passages:
            return [step, f"Document: {results.failure or 'Nothing was found.'}"]
        shown_count = 0

        def request_of(text: str) -> ChatPrompt:
            nonlocal shown_count
            shown_count = text.count("\n") + 1
            return self.over(example, llm, [*steps, step], DOCUMENT, f"Found:\n{text}", "Number:", self.answer_tokens)

        request = self.fitted(example, llm, results.passages, request_of, tokens=self.answer_tokens)
        number = await self.choice(example, llm, request, min(shown_count, len(results.passages)))
        return [step, f"Document: {documents([results.passages[number]], llm).removeprefix('[1] ')}"]

    async def select(
        self, example: Example, llm: LLM, steps: Sequence[str], task: str, name: str, tokens: int
    ) -> tuple[Conversation, Turn, str]:
        """Has candidates proposed and takes one. Returns the chat and the turn of the proposals, and the candidate."""
        request = self.over(example, llm, steps, task.format(count=self.candidates), "", f"{name}:\n1.", tokens)
        chat, turn, text = await self.ask(example, llm, request, stop=self.ends(llm), max_tokens=tokens)
        text = text if self.chats(llm) else f"1.{text}".split("\nQuestion:")[0]
        plain = " ".join(text.removeprefix("1.").split())
        proposed = list(dict.fromkeys(filter(None, map(tidied, _NUMBERED.findall(text)))))[: self.candidates]
        turn.asked, turn.well_formed = name.lower(), bool(proposed)
        if not proposed:
            answered(turn, None, "there is no list 1. .., 2. .. in it")
            return chat, turn, example.question if task == QUERIES else plain
        listed = "\n".join(f"[{number}] {candidate}" for number, candidate in enumerate(proposed, 1))
        proposals = f"Proposals:\n{llm.tokenizer.plain(listed)}"
        request = self.over(example, llm, steps, CHOOSE, proposals, "Number:", self.answer_tokens)
        return chat, turn, proposed[await self.choice(example, llm, request, len(proposed))]

    async def choice(self, example: Example, llm: LLM, request: ChatPrompt, count: int) -> int:
        """The index (from 0) of the critic's choice among `count` candidates."""
        if count <= 1:
            return 0
        _, turn, text = await self.ask(example, llm, request, stop=self.line(llm), max_tokens=self.answer_tokens)
        number = re.search(r"\d+", text)
        if number is None or not 1 <= int(number[0]) <= count:
            answered(turn, None, f"there is no number from 1 to {count} in it")
            return 0
        turn.asked, turn.well_formed = "choice", True
        return int(number[0]) - 1

    def line(self, llm: LLM) -> tuple[str, ...]:
        """Stop strings of a reply of one line."""
        return () if self.chats(llm) else ("\n",)

    def over(
        self, example: Example, llm: LLM, steps: Sequence[str], task: str, suffix: str, cue: str, tokens: int
    ) -> ChatPrompt:
        """A prompt with the steps so far, and `suffix` after them.

        It has as many of the latest steps as leave room for a turn (or for half of the room, if that is less).
        """

        def request_of(latest_steps: Sequence[str]) -> ChatPrompt:
            parts = [
                f"Question: {self.question(example, llm)}",
                *(["\n".join(latest_steps)] if latest_steps else []),
                suffix,
            ]
            return ChatPrompt(task=task, text="\n\n".join(filter(None, parts)), cue=cue)

        def room(request: ChatPrompt) -> int:
            return llm.room(self.prompt(llm, request), example.images)

        least = min(tokens, room(request_of(())) // 2)
        latest = (steps[start:] for start in range(len(steps)))
        return request_of(
            next((latest_steps for latest_steps in latest if room(request_of(latest_steps)) >= least), ())
        )

    @property
    def search_budget(self) -> int:
        """`max_searches` for each knowledge base."""
        return self.max_searches * max(1, len(self.tools))
