"""One attempt at a question by a language model, in R1-Router's chats (arXiv 2505.22095, appendix A.2, equations 14 to 17)."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from routerl_jax.agents.grammar import NO_TOOL, between
from routerl_jax.core.types import Action, Example, Message, Query
from routerl_jax.data.trajectories import NONE, AnswerStep, Document, FinalStep, RouteStep, Step, document_of
from routerl_jax.extras.curation.golden_config import ACCURACY, AttemptConfig
from routerl_jax.extras.curation.services import Services
from routerl_jax.extras.curation.shots import Kind, shots
from routerl_jax.knowledge.query import with_picture
from routerl_jax.recipes.r1_router.rewards import final_accuracy
from routerl_jax.recipes.r1_router.steps import History, StepPrompt, StepProtocol
from routerl_jax.rewards.metrics import ANSWER_METRICS, accepted_answers
from routerl_jax.services.base import without_thinking

Outcome = Literal[
    "accepted",
    "wrong answer",
    "unreadable route",
    "unreadable answer",
    "too few searches",
    "no gold path",
    "gold passage not found",
    "model failed",
    "search failed",
    "refused",
    "unreadable turn",
    "out of form",
    "too long",
    "no picture",
    "not shown",
    "unreadable reply",
    "answer without the concept",
    "no question word",
    "given away",
    "not as one would ask",
    "unknown kind",
    "empty reply",
    "no thought",
    "no action",
    "several actions",
    "unreadable box",
    "refused box",
    "look before a page",
    "answer before a search",
    "no answer",
    "too few steps",
    "unreadable verdict",
    "judge failed",
]
# Outcomes that say nothing about the question. It is tried again.
FAILED: tuple[Outcome, ...] = ("model failed", "search failed", "judge failed")


@dataclasses.dataclass(kw_only=True)
class Attempt:
    """The result of an attempt, and its cost.

    Attributes:
      detail: what could not be read or reached, in one line.
      answer: the model's final answer; "" if it gave none.
      steps: the steps of the trajectory. The final one has the accepted answers of the data set.
      replies: the model's reply in each chat.
      prompt_tokens, tokens: number of tokens read and written, if the model's server counts them.
    """

    outcome: Outcome = "accepted"
    detail: str = ""
    answer: str = ""
    steps: list[Step] = dataclasses.field(default_factory=list)
    replies: list[str] = dataclasses.field(default_factory=list)
    searches: int = 0
    prompt_tokens: int = 0
    tokens: int = 0

    def record(self) -> dict[str, Any]:
        """All fields except the steps, and the number of replies; JSON-serialisable."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "steps"}
        return {"calls": len(self.replies), **fields}

    @property
    def subquestions(self) -> int:
        """Number of sub-questions that were answered."""
        return sum(isinstance(step, AnswerStep) for step in self.steps)


class AttemptFailed(Exception):
    """Ends an attempt that can't go on, with its outcome."""

    def __init__(self, outcome: Outcome, detail: str) -> None:
        super().__init__(detail)
        self.outcome: Outcome = outcome


async def model_reply(
    services: Services,
    conversation: Sequence[Message],
    attempt: Attempt,
    *,
    max_tokens: int,
    temperature: float,
    sample: int,
) -> str:
    """The model's reply, which is also added to its attempt. Raises AttemptFailed if the model failed."""
    reply = await services.ask(conversation, max_tokens=max_tokens, temperature=temperature, sample=sample)
    attempt.prompt_tokens += reply.prompt_tokens
    attempt.tokens += reply.tokens
    attempt.replies.append(reply.text)
    if reply.error is not None:
        raise AttemptFailed("model failed", reply.error)
    return reply.text


@dataclasses.dataclass(frozen=True, kw_only=True)
class Teacher:
    """A language model that makes attempts. It gets the chats of training, after worked examples that only the teacher sees.

    Attributes:
      protocol: writes the prompts and reads the replies.
    """

    protocol: StepProtocol
    config: AttemptConfig
    services: Services

    async def attempt(self, example: Example, number: int) -> Attempt:
        """Works on a question from beginning to end. Failures of the model or of a search are outcomes; they don't raise.

        Args:
          number: number of the attempt, from 0. Different attempts get different samples of the model.
        """
        attempt = Attempt()
        try:
            history = await self._gather(example, number, attempt)
            prompt = self.protocol.final(example.question, history)
            attempt.answer = (await self._reply("final", prompt, example, number, attempt)).answer
        except AttemptFailed as reason:
            attempt.outcome, attempt.detail = reason.outcome, str(reason)
            return attempt
        if not self._right(attempt.answer, example):
            attempt.outcome = "wrong answer"
        # If a range of numbers is accepted, these include the model's own number.
        accepted = accepted_answers(example, attempt.answer)
        attempt.steps.append(FinalStep(answers=accepted, **prompt_fields(prompt, example)))
        return attempt

    async def _gather(self, example: Example, number: int, attempt: Attempt) -> list[tuple[str, str]]:
        """Adds routes and answers until the model asks no more, or may not. Returns the sub-questions with their answers."""
        history: list[tuple[str, str]] = []
        while len(history) < self.config.max_searches:
            prompt = self._route(example.question, history)
            actions = await self._replies("route", prompt, example, number, attempt)
            query = NONE if actions[0].tool == NO_TOOL else actions[0].query
            labels = tuple(self.protocol.label(action.tool) for action in actions)
            attempt.steps.append(RouteStep(query=query, retrievers=labels, **prompt_fields(prompt, example)))
            if query == NONE:
                break
            documents = await self._search(actions, example, attempt)
            prompt = self.protocol.answer(query, documents)
            answer = (await self._reply("answer", prompt, example, number, attempt)).answer
            attempt.steps.append(AnswerStep(answer=answer, documents=documents, **prompt_fields(prompt, example)))
            history.append((query, answer))
        if len(history) < self.config.min_searches:
            raise AttemptFailed("too few searches", f"{len(history)} of at least {self.config.min_searches}")
        return history

    def _route(self, question: str, history: History) -> StepPrompt:
        prompt = self.protocol.route(question, history)
        if self.config.candidates == 1:
            return prompt
        several = (
            f"\nWhere several retrievers are likely to know, name up to {self.config.candidates} of them inside <ret> and "
            "</ret>, the likeliest first, with commas between them."
        )
        return dataclasses.replace(prompt, system=prompt.system + several)

    async def _search(self, actions: Sequence[Action], example: Example, attempt: Attempt) -> tuple[Document, ...]:
        """The documents that the retrievers find, retriever by retriever."""
        attempt.searches += len(actions)
        calls = await asyncio.gather(
            *(self.services.search(a.tool, self._query(a, example), self.config.k) for a in actions)
        )
        for call in calls:
            if call.error is not None:
                raise AttemptFailed("search failed", f"{call.tool}: {call.error}")
        max_chars = self.config.max_document
        return tuple(document_of(call.tool, passage, max_chars) for call in calls for passage in call.passages)

    def _query(self, action: Action, example: Example) -> Query:
        return with_picture(action.query, example.images) if action.tool in self.config.sees else action.query

    async def _reply(self, kind: Kind, prompt: StepPrompt, example: Example, number: int, attempt: Attempt) -> Action:
        return (await self._replies(kind, prompt, example, number, attempt))[0]

    async def _replies(
        self, kind: Kind, prompt: StepPrompt, example: Example, number: int, attempt: Attempt
    ) -> list[Action]:
        """The actions in the model's reply. If it can't be read, the model is told why and asked again."""
        request = prompt
        for retry in range(self.config.retries + 1):
            actions = self._read(
                kind, await self._ask(kind, request, example, number + retry * self.config.attempts, attempt)
            )
            if actions[0].kind != "invalid":
                return actions
            request = self.protocol.again(prompt, actions[0].error)
        raise AttemptFailed("unreadable route" if kind == "route" else "unreadable answer", actions[0].error)

    async def _ask(self, kind: Kind, prompt: StepPrompt, example: Example, sample: int, attempt: Attempt) -> str:
        conversation = (
            Message(role="system", content=prompt.system),
            *shots(self.protocol, kind, self.config.shots),
            Message(role="user", content=prompt.user.rstrip("\n"), images=example.images),
        )
        return await model_reply(
            self.services,
            conversation,
            attempt,
            max_tokens=self.config.max_tokens,
            temperature=self.config.temperature,
            sample=sample,
        )

    def _read(self, kind: Kind, text: str) -> list[Action]:
        """The actions in a reply, without a reasoning model's thoughts, which may hold drafts with tags."""
        text = without_thinking(text)
        if kind == "route":
            return parse_routes(self.protocol, text, self.config.candidates)
        return [self.protocol.parse_answer(text)]

    def _right(self, answer: str, example: Example) -> bool:
        """The condition of equation 17."""
        metric = final_accuracy if self.config.metric == ACCURACY else ANSWER_METRICS[self.config.metric]
        return metric(answer, accepted_answers(example, answer), self.config.normalizer) >= 1.0


def parse_routes(protocol: StepProtocol, text: str, most: int) -> list[Action]:
    """The searches of a route, which may name several retrievers, separated by commas; or one invalid action."""
    names = (between(text, "<ret>", "</ret>") or "").split(",")
    if most == 1 or len(names) == 1:
        return [protocol.parse_route(text)]
    query = between(text, "<sub-question>", "</sub-question>") or ""
    parsed = [protocol.parse_route(f"<sub-question>{query}</sub-question><ret>{name}</ret>") for name in names]
    if invalid := [action for action in parsed if action.kind == "invalid"]:
        return invalid[:1]
    actions = list({action.tool: action for action in parsed}.values())
    if len(actions) > most:
        return [Action(kind="invalid", query=query, error=f"there are more than {most} retrievers")]
    if len(actions) > 1 and any(action.tool == NO_TOOL for action in actions):
        return [Action(kind="invalid", query=query, error="none stands alone")]
    return actions


def prompt_fields(prompt: StepPrompt, example: Example) -> dict[str, str]:
    """A prompt as a trajectory's step keeps it: `system`, and `problem` with one mark `<image>` (as released) per picture."""
    return {"system": prompt.system, "problem": prompt.user + "<image>" * len(example.images)}
