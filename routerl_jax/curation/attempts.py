"""One attempt at a question by a language model, in R1-Router's chats (arXiv 2505.22095, appendix A.2, equations 14 to 17)."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from routerl_jax.agents.grammar import NO_TOOL, between
from routerl_jax.core.types import Action, Example, Message, Query
from routerl_jax.curation.golden_config import ACCURACY, AttemptConfig
from routerl_jax.curation.services import Services
from routerl_jax.curation.shots import Kind, shots
from routerl_jax.data.trajectories import NONE, AnswerStep, Document, FinalStep, RouteStep, Step, document_of
from routerl_jax.knowledge.query import with_picture
from routerl_jax.llms.schemas import without_thinking
from routerl_jax.recipes.r1_router.rewards import final_accuracy
from routerl_jax.recipes.r1_router.steps import History, Said, StepProtocol
from routerl_jax.rewards.metrics import ANSWER_METRICS
from routerl_jax.rewards.ranges import accepted_answers

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
FAILED: tuple[Outcome, ...] = (
    "model failed",
    "search failed",
    "judge failed",
)  # says nothing of the question: it is tried again


@dataclasses.dataclass(kw_only=True)
class Attempt:
    """What became of an attempt, and what it took.

    Attributes:
      detail: what could not be read or reached, in one line.
      answer: the model's final answer; "" where it did not come to that.
      steps: with the dataset's answers in the last one, where the model's own is right.
      replies: what the model wrote, chat by chat.
      prompt_tokens, tokens: read and written, as far as the model's server says.
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
        """All but the steps, and the number of replies, JSON-serialisable."""
        kept = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "steps"}
        return {"calls": len(self.replies), **kept}

    @property
    def subquestions(self) -> int:
        """Number of sub-questions that were answered."""
        return sum(isinstance(step, AnswerStep) for step in self.steps)


class GivenUp(Exception):
    """The attempt can't go on."""

    def __init__(self, outcome: Outcome, detail: str) -> None:
        super().__init__(detail)
        self.outcome: Outcome = outcome


async def written(
    services: Services,
    conversation: Sequence[Message],
    made: Attempt,
    *,
    max_tokens: int,
    temperature: float,
    sample: int,
) -> str:
    """What the model writes, booked in its attempt. Raises GivenUp where the model failed."""
    reply = await services.ask(conversation, max_tokens=max_tokens, temperature=temperature, sample=sample)
    made.prompt_tokens += reply.prompt_tokens
    made.tokens += reply.tokens
    made.replies.append(reply.text)
    if reply.error is not None:
        raise GivenUp("model failed", reply.error)
    return reply.text


@dataclasses.dataclass(frozen=True, kw_only=True)
class Teacher:
    """Who makes attempts. The chats are those of training, after worked ones that only the teacher is shown.

    Attributes:
      protocol: what is said, and how replies are read.
    """

    protocol: StepProtocol
    config: AttemptConfig
    services: Services

    async def attempt(self, example: Example, number: int) -> Attempt:
        """Works on a question from beginning to end; never raises for what the model and the knowledge bases do.

        Args:
          number: of the attempt, from 0; the model's samples of different attempts differ.
        """
        made = Attempt()
        try:
            history = await self._gather(example, number, made)
            said = self.protocol.final(example.question, history)
            made.answer = (await self._reply("final", said, example, number, made)).answer
        except GivenUp as reason:
            made.outcome, made.detail = reason.outcome, str(reason)
            return made
        if not self._right(made.answer, example):
            made.outcome = "wrong answer"
        accepted = accepted_answers(example, made.answer)  # the model's own number, too, where a range of them is
        made.steps.append(FinalStep(answers=accepted, **shown(said, example)))
        return made

    async def _gather(self, example: Example, number: int, made: Attempt) -> list[tuple[str, str]]:
        """Adds routes and answers until the model wants no more or may ask no more; sub-questions with their answers."""
        history: list[tuple[str, str]] = []
        while len(history) < self.config.max_searches:
            said = self._route(example.question, history)
            actions = await self._replies("route", said, example, number, made)
            query = NONE if actions[0].tool == NO_TOOL else actions[0].query
            labels = tuple(self.protocol.label(action.tool) for action in actions)
            made.steps.append(RouteStep(query=query, retrievers=labels, **shown(said, example)))
            if query == NONE:
                break
            documents = await self._search(actions, example, made)
            said = self.protocol.answer(query, documents)
            answer = (await self._reply("answer", said, example, number, made)).answer
            made.steps.append(AnswerStep(answer=answer, documents=documents, **shown(said, example)))
            history.append((query, answer))
        if len(history) < self.config.min_searches:
            raise GivenUp("too few searches", f"{len(history)} of at least {self.config.min_searches}")
        return history

    def _route(self, question: str, history: History) -> Said:
        said = self.protocol.route(question, history)
        if self.config.candidates == 1:
            return said
        more = (
            f"\nWhere several retrievers are likely to know, name up to {self.config.candidates} of them inside <ret> and "
            "</ret>, the likeliest first, with commas between them."
        )
        return dataclasses.replace(said, system=said.system + more)

    async def _search(self, actions: Sequence[Action], example: Example, made: Attempt) -> tuple[Document, ...]:
        """What the retrievers find, one after the other."""
        made.searches += len(actions)
        calls = await asyncio.gather(
            *(self.services.search(a.tool, self._query(a, example), self.config.k) for a in actions)
        )
        for call in calls:
            if call.error is not None:
                raise GivenUp("search failed", f"{call.tool}: {call.error}")
        most = self.config.max_document
        return tuple(document_of(call.tool, passage, most) for call in calls for passage in call.passages)

    def _query(self, action: Action, example: Example) -> Query:
        return with_picture(action.query, example.images) if action.tool in self.config.sees else action.query

    async def _reply(self, kind: Kind, said: Said, example: Example, number: int, made: Attempt) -> Action:
        return (await self._replies(kind, said, example, number, made))[0]

    async def _replies(self, kind: Kind, said: Said, example: Example, number: int, made: Attempt) -> list[Action]:
        """What the model's reply says; it is asked again, and told why, where that can't be read."""
        asked = said
        for retry in range(self.config.retries + 1):
            actions = self._read(
                kind, await self._ask(kind, asked, example, number + retry * self.config.attempts, made)
            )
            if actions[0].kind != "invalid":
                return actions
            asked = self.protocol.again(said, actions[0].error)
        raise GivenUp("unreadable route" if kind == "route" else "unreadable answer", actions[0].error)

    async def _ask(self, kind: Kind, said: Said, example: Example, sample: int, made: Attempt) -> str:
        conversation = (
            Message(role="system", content=said.system),
            *shots(self.protocol, kind, self.config.shots),
            Message(role="user", content=said.user.rstrip("\n"), images=example.images),
        )
        return await written(
            self.services,
            conversation,
            made,
            max_tokens=self.config.max_tokens,
            temperature=self.config.temperature,
            sample=sample,
        )

    def _read(self, kind: Kind, text: str) -> list[Action]:
        """What follows a reasoning model's thoughts, which may hold drafts with tags."""
        text = without_thinking(text)
        if kind == "route":
            return parse_routes(self.protocol, text, self.config.candidates)
        return [self.protocol.parse_answer(text)]

    def _right(self, answer: str, example: Example) -> bool:
        """Equation 17's condition."""
        metric = final_accuracy if self.config.metric == ACCURACY else ANSWER_METRICS[self.config.metric]
        return metric(answer, accepted_answers(example, answer), self.config.normalizer) >= 1.0


def parse_routes(protocol: StepProtocol, text: str, most: int) -> list[Action]:
    """The searches of a route that may name several retrievers with commas between them; or one action that is invalid."""
    names = (between(text, "<ret>", "</ret>") or "").split(",")
    if most == 1 or len(names) == 1:
        return [protocol.parse_route(text)]
    query = between(text, "<sub-question>", "</sub-question>") or ""
    read = [protocol.parse_route(f"<sub-question>{query}</sub-question><ret>{name}</ret>") for name in names]
    if invalid := [action for action in read if action.kind == "invalid"]:
        return invalid[:1]
    actions = list({action.tool: action for action in read}.values())
    if len(actions) > most:
        return [Action(kind="invalid", query=query, error=f"there are more than {most} retrievers")]
    if len(actions) > 1 and any(action.tool == NO_TOOL for action in actions):
        return [Action(kind="invalid", query=query, error="none stands alone")]
    return actions


def shown(said: Said, example: Example) -> dict[str, str]:
    """What was said as a trajectory's step keeps it: `system` and, with the released mark of a picture, `problem`."""
    return {"system": said.system, "problem": said.user + "<image>" * len(example.images)}
