"""Attempts without a language model: the gold paths of a data set, whose passages are looked up in the knowledge bases."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

from routerl_jax.core.types import Call, Example, Passage
from routerl_jax.data.gold_paths import GoldHop, gold_path
from routerl_jax.data.trajectories import NONE, AnswerStep, Document, FinalStep, RouteStep, document_of
from routerl_jax.extras.curation.attempts import Attempt, AttemptFailed, prompt_fields
from routerl_jax.extras.curation.golden_config import AttemptConfig
from routerl_jax.extras.curation.services import Services
from routerl_jax.knowledge.base import with_picture
from routerl_jax.recipes.r1_router.steps import StepProtocol

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
