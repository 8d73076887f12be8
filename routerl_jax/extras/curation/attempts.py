"""Attempts at golden trajectories: by a language model in R1-Router's chats (arXiv 2505.22095, appendix A.2, equations 14 to
17), or from the gold paths of data sets.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Literal

from routerl_jax.agents.grammar import NO_TOOL, between
from routerl_jax.core.config import Count, NonNegative, Size, checked
from routerl_jax.core.types import Action, Call, Example, Message, Passage, Query
from routerl_jax.data.gold_paths import GoldHop, gold_path
from routerl_jax.data.trajectories import NONE, AnswerStep, Document, FinalStep, RouteStep, document_of
from routerl_jax.extras.curation.job import Attempt, AttemptFailed, Services, model_reply
from routerl_jax.knowledge.base import with_picture
from routerl_jax.recipes.r1_router.rewards import final_accuracy
from routerl_jax.recipes.r1_router.steps import History, StepPrompt, StepProtocol
from routerl_jax.rewards.metrics import ANSWER_METRICS, NORMALIZERS, accepted_answers
from routerl_jax.services.base import without_thinking

# --- attempts of a language model ---


ACCURACY = "accuracy"  # recipes.r1_router.rewards.final_accuracy, the paper's


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class AttemptConfig:
    """How the language model works on a question, and when its answer is right. Other values make another job."""

    max_searches: Size = 3  # most sub-questions (n of equation 2)
    min_searches: Count = 0  # fewest sub-questions; attempts with fewer are rejected
    k: Size = 5  # passages per search
    candidates: Size = 1  # most retrievers that a sub-question may name; all are searched, and all count as gold
    attempts: Size = 4  # per question: until one is right (keep="first"), or always so many (keep="shortest")
    # which right attempt is kept: the first, or the one with the fewest sub-questions
    keep: Literal["first", "shortest"] = "first"
    shots: Count = 4  # most worked examples before each chat (extras.curation.attempts); the paper has 8
    retries: Count = 2  # further requests if a reply can't be read
    temperature: NonNegative = 1.0  # temperature of the sampling of replies
    max_tokens: Size = 2048  # most tokens of a reply
    max_document: Count = 2000  # most characters of a document that are shown and written; 0: all
    sees: tuple[str, ...] = ("text_image",)  # knowledge bases that also get the question's picture
    metric: str = ACCURACY  # or one of rewards.metrics.ANSWER_METRICS; an answer is right if it is 1
    normalizer: str = "vqa"  # rewards.metrics.NORMALIZERS

    def __post_init__(self) -> None:
        if not 0 <= self.min_searches <= self.max_searches:
            raise ValueError(
                f"config.attempt.min_searches={self.min_searches} must be in [0, max_searches={self.max_searches}]"
            )
        if self.attempts > 1 and self.temperature == 0:
            raise ValueError(
                f"config.attempt.temperature=0.0: all {self.attempts} attempts would be the same; set attempts=1, or a "
                "temperature"
            )
        if self.metric not in (ACCURACY, *ANSWER_METRICS):
            metrics = ", ".join((ACCURACY, *ANSWER_METRICS))
            raise ValueError(f"config.attempt.metric={self.metric!r}: known are {metrics}")
        NORMALIZERS.get(self.normalizer)  # raises ValueError that lists them


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
        # If a range of numbers is accepted, these include the model's own number.
        accepted = accepted_answers(example, attempt.answer)
        metric = final_accuracy if self.config.metric == ACCURACY else ANSWER_METRICS[self.config.metric]
        if metric(attempt.answer, accepted, self.config.normalizer) < 1.0:  # the condition of equation 17
            attempt.outcome = "wrong answer"
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

        def query(action: Action) -> Query:
            return with_picture(action.query, example.images) if action.tool in self.config.sees else action.query

        calls = await asyncio.gather(
            *(self.services.search(action.tool, query(action), self.config.k) for action in actions)
        )
        for call in calls:
            if call.error is not None:
                raise AttemptFailed("search failed", f"{call.tool}: {call.error}")
        max_chars = self.config.max_document
        return tuple(document_of(call.tool, passage, max_chars) for call in calls for passage in call.passages)

    async def _reply(self, kind: Kind, prompt: StepPrompt, example: Example, number: int, attempt: Attempt) -> Action:
        return (await self._replies(kind, prompt, example, number, attempt))[0]

    async def _replies(
        self, kind: Kind, prompt: StepPrompt, example: Example, number: int, attempt: Attempt
    ) -> list[Action]:
        """The actions in the model's reply. If it can't be read, the model is told why and asked again."""
        request = prompt
        for retry in range(self.config.retries + 1):
            reply = await self._ask(kind, request, example, number + retry * self.config.attempts, attempt)
            text = without_thinking(reply)  # a reasoning model's thoughts may hold drafts with tags
            if kind == "route":
                actions = parse_routes(self.protocol, text, self.config.candidates)
            else:
                actions = [self.protocol.answers.parse(text)]
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


def parse_routes(protocol: StepProtocol, text: str, most: int) -> list[Action]:
    """The searches of a route, which may name several retrievers, separated by commas; or one invalid action."""
    names = (between(text, "<ret>", "</ret>") or "").split(",")
    if most == 1 or len(names) == 1:
        return [protocol.routes.parse(text)]
    query = between(text, "<sub-question>", "</sub-question>") or ""
    parsed = [protocol.routes.parse(f"<sub-question>{query}</sub-question><ret>{name}</ret>") for name in names]
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


# --- worked examples before the real chat: the paper has eight per kind of question (appendix A.4), these are ours ---


Kind = Literal["route", "answer", "final"]

_CHURCH = "In which year was the architect of the Sagrada Família born?"
_WHO = ("Who designed the Sagrada Família?", "Antoni Gaudí designed the Sagrada Família.")
_WHEN = ("When was Antoni Gaudí born?", "Antoni Gaudí was born on 25 June 1852.")
_GAMES = "Which country won the most gold medals at the 2006 Winter Olympics?"
_MEDALS = (
    "How many gold medals did each country win at the 2006 Winter Olympics?",
    "Germany won 11, the United States and Austria 9 each.",
)
_MOUNTAIN = "How high is the mountain in this picture?"

# Question, sub-questions answered so far, thought, sub-question, knowledge base.
_ROUTES = (
    (_CHURCH, (), "I need the architect before I can ask for a year of birth.", _WHO[0], "text"),
    (_GAMES, (_MEDALS,), "Germany has the most, so nothing is missing.", NO_TOOL, NO_TOOL),
    (_MOUNTAIN, (), "Which mountain it is can only be seen.", "Which mountain is in the picture?", "text_image"),
    (_GAMES, (), "Medals are counted in tables.", _MEDALS[0], "table"),
    (_CHURCH, (_WHO,), "It was Gaudí. His year of birth is missing.", _WHEN[0], "text"),
    (_CHURCH, (_WHO, _WHEN), "The year is known.", NO_TOOL, NO_TOOL),
)
# Sub-question, knowledge base, documents found, thought, answer.
_ANSWERS = (
    (
        _WHO[0],
        "text",
        (
            "Sagrada Família: a basilica in Barcelona after the design of Antoni Gaudí.",
            "Barcelona: a city on the coast of Spain.",
        ),
        "The first finding names the architect.",
        _WHO[1],
    ),
    (
        _MEDALS[0],
        "table",
        ("2006 Winter Olympics medal table: Germany, gold 11; United States, gold 9; Austria, gold 9",),
        "The table lists them.",
        _MEDALS[1],
    ),
)
# Question, answered sub-questions, thought, answer.
_FINALS = (
    (_CHURCH, (_WHO, _WHEN), "The architect was Gaudí, born in 1852.", "1852"),
    (_GAMES, (_MEDALS,), "11 is more than 9.", "Germany"),
)


def shots(protocol: StepProtocol, kind: Kind, most: int) -> list[Message]:
    """Up to `most` worked chats of a kind, as messages. Chats about knowledge bases that the protocol lacks are left out."""
    tools = (*protocol.tools, NO_TOOL)
    if kind == "route":
        routes = [route for route in _ROUTES if route[4] in tools][:most]
        return _messages(
            [
                (protocol.route(q, history), protocol.routes.write_search(t, sub, kb))
                for q, history, t, sub, kb in routes
            ]
        )
    if kind == "answer":
        label = protocol.label
        return _messages(
            [
                (
                    protocol.answer(sub, [Document(retriever=label(kb), text=text) for text in documents]),
                    protocol.answers.write_answer(thought, answer),
                )
                for sub, kb, documents, thought, answer in _ANSWERS[:most]
                if kb in tools
            ]
        )
    return _messages(
        [
            (protocol.final(q, history), protocol.answers.write_answer(thought, answer))
            for q, history, thought, answer in _FINALS[:most]
        ]
    )


def _messages(worked: Sequence[tuple[StepPrompt, str]]) -> list[Message]:
    return [
        message
        for prompt, reply in worked
        for message in (
            Message(role="user", content=prompt.user.rstrip("\n")),
            Message(role="assistant", content=reply),
        )
    ]


# --- attempts without a language model ---


_SHORTEST = 3  # fewest characters of an answer that is looked for in a passage: shorter ones occur everywhere


@dataclasses.dataclass(frozen=True, kw_only=True)
class Annotations:
    """Replaces `attempts.Teacher` for questions whose data sets say how they are answered.

    The sub-questions are those of the gold path (data.gold_paths), the answers are its values, and the documents are what the
    knowledge base returns. Some data sets give no path, or only the passage of a path of one hop. Then, if `default_kbs` has
    the data set, the question itself is searched for, and the documents must state an accepted answer. Nothing is guessed: if a
    search misses its passage, the attempt is rejected.

    Attributes:
      protocol: writes the prompts.
      default_kbs: by data set, the knowledge base that answers its questions if the gold path names none.
    """

    protocol: StepProtocol
    config: AttemptConfig
    services: Services
    default_kbs: Mapping[str, str]

    async def attempt(self, example: Example, number: int) -> Attempt:
        """The gold path of a question as an attempt. `number` makes no difference."""
        attempt = Attempt()
        try:
            history = await self._gather(example, attempt)
        except AttemptFailed as reason:
            attempt.outcome, attempt.detail = reason.outcome, str(reason)
            return attempt
        attempt.answer = example.answers[0]
        prompt = self.protocol.final(example.question, history)
        attempt.steps.append(FinalStep(answers=example.answers, **prompt_fields(prompt, example)))
        return attempt

    async def _gather(self, example: Example, attempt: Attempt) -> list[tuple[str, str]]:
        history: list[tuple[str, str]] = []
        path = self._path(example)
        if not self.config.min_searches <= len(path) <= self.config.max_searches:
            raise AttemptFailed("no gold path", f"its path has {len(path)} sub-questions")
        for hop in path:
            prompt = self.protocol.route(example.question, history)
            label = self.protocol.label(hop.kb)
            attempt.steps.append(RouteStep(query=hop.query, retrievers=(label,), **prompt_fields(prompt, example)))
            passages = await self._search(hop, example, attempt)
            documents = tuple(document_of(hop.kb, passage, self.config.max_document) for passage in passages)
            values = (hop.value,) if hop.value else example.answers
            value = hop.value or _stated(values, documents)
            located = hop.value or hop.passage_id or hop.title
            if not value or (located and not hop.found_in(passages)):
                raise AttemptFailed("gold passage not found", f"{hop.kb}: {hop.query}")
            if _stated(values, passages) and not _stated(values, documents):
                raise AttemptFailed(
                    "gold passage not found", f"{hop.kb}: {hop.query}: it is cut before the answer (max_document)"
                )
            prompt = self.protocol.answer(hop.query, documents)
            attempt.steps.append(AnswerStep(answer=value, documents=documents, **prompt_fields(prompt, example)))
            history.append((hop.query, value))
        if len(history) < self.config.max_searches:
            prompt = self.protocol.route(example.question, history)
            attempt.steps.append(RouteStep(query=NONE, retrievers=(NONE,), **prompt_fields(prompt, example)))
        return history

    def _path(self, example: Example) -> list[GoldHop]:
        """The hops of a question, each with its knowledge base and sub-question."""
        default = self.default_kbs.get(str(example.metadata.get("dataset", "")), "")
        path = gold_path(example)
        if default and (path is None or (len(path) == 1 and not path[0].query)):  # at most the passage is known
            return [dataclasses.replace(*(path or [GoldHop()]), query=example.question, kb=default)]
        hops = [dataclasses.replace(hop, kb=hop.kb or default) for hop in path or ()]
        if path is None or any(not hop.query or hop.kb not in self.protocol.tools for hop in hops):
            raise AttemptFailed("no gold path", "its data set does not say what to ask, or of which knowledge base")
        return hops

    async def _search(self, hop: GoldHop, example: Example, attempt: Attempt) -> tuple[Passage, ...]:
        attempt.searches += 1
        query = with_picture(hop.query, example.images) if hop.kb in self.config.sees else hop.query
        call: Call = await self.services.search(hop.kb, query, self.config.k)
        if call.error is not None:
            raise AttemptFailed("search failed", f"{call.tool}: {call.error}")
        return call.passages


def _stated(answers: Sequence[str], passages: Sequence[Passage | Document]) -> str:
    """The first accepted answer that a passage states in whole words; "" if there is none. Yes and no are never looked for."""
    for answer in answers:
        if answer.strip().lower() in ("yes", "no"):
            continue
        pattern = re.compile(rf"(?<!\w){re.escape(answer.strip())}(?!\w)", re.IGNORECASE)
        if len(answer.strip()) >= _SHORTEST and any(pattern.search(passage.text) for passage in passages):
            return answer.strip()
    return ""
