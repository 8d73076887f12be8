"""Worked examples of questions whose gold passages are known: the searches that find them, made in a run's knowledge bases.

No teacher writes them. A data set says which passages hold a question's answer (HotpotQA, 2WikiMultihopQA, MuSiQue); what is to
be searched for follows from that, and what comes back is what the run's own retriever returns. They show a protocol and how to
read; which knowledge base is asked is drawn, as in Atlas's demonstrations.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from routerl_jax.agents.agent import SearchTool
from routerl_jax.agents.calls import calls_of_all
from routerl_jax.agents.request import Request
from routerl_jax.core.types import Call, Demonstration, DemonstrationStep, Example, Passage
from routerl_jax.data.gold_paths import gold_passages, sub_questions, without_aside
from routerl_jax.remote.background import run_to_end

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z\"'(])")
_BATCH = 256  # searches at a time
_LONGEST = 40  # words of evidence that a thought quotes


@dataclasses.dataclass
class _Draft:
    """A worked example in the making."""

    example: Example
    missing: dict[str, str]  # gold passages that no search has found: title by id
    known: str  # all that the policy has read
    steps: list[DemonstrationStep] = dataclasses.field(default_factory=list)
    thought: str = ""  # what the last search taught
    lost: bool = False  # a search did not find what it was for


def worked_examples(
    examples: Iterable[Example],
    tools: Mapping[str, SearchTool],
    *,
    k: int,
    max_searches: int,
    seed: int,
    timeout: float = 60.0,
) -> list[Demonstration]:
    """Those of the examples whose gold passages are all found in so many searches, in their order.

    With several processes every one must call this, on the same examples: they share the searches, and what was found.

    A query says only what can be known by then: a sub-question (where the data set gives them with the passage that answers
    each), else the title of a gold passage if the question or a passage read before names it, else the question as it is.

    Args:
      examples: with gold passages in their metadata (`data.gold_paths.gold_passages`); others are left out.
      k: passages per search.
      max_searches: at most, per question; the agent's, so that where a rollout would force the answer, it is marked so.
      seed: of the choice of knowledge bases.
      timeout: seconds for a batch of searches, of which there are `_BATCH` in one.

    Raises:
      RuntimeError: a search failed. Without what it was to find, a run that resumes would learn from other examples.
    """
    drafts = [
        _Draft(example=example, missing=gold, known=example.question)
        for example in examples
        if (gold := gold_passages(example.metadata)) and example.answers
    ]
    rng = np.random.default_rng([3, seed])
    for _ in range(max_searches):
        open_ones = [draft for draft in drafts if draft.missing and not draft.lost]
        asked = [(str(rng.choice(list(tools))), *_next_query(draft)) for draft in open_ones]
        calls: list[Call] = []
        for start in range(0, len(asked), _BATCH):
            requests = [Request(tool, query, k) for tool, query, _ in asked[start : start + _BATCH]]
            calls += run_to_end(calls_of_all(tools, requests, timeout))
        if failed := [call for call in calls if call.error is not None]:
            raise RuntimeError(
                f"{len(failed)} of {len(calls)} searches for demonstrations failed, the first one, of {failed[0].tool} for "
                f"{failed[0].query!r}, with: {failed[0].error}. Mend the knowledge base, or raise config.rollout.tool_timeout"
            )
        for draft, (_, _, purpose), call in zip(open_ones, asked, calls, strict=True):
            _note(draft, purpose, call)
    return [
        Demonstration(
            example=draft.example,
            steps=tuple(draft.steps),
            thought=draft.thought,
            answer=draft.example.answers[0],
            forced=len(draft.steps) == max_searches,
        )
        for draft in drafts
        if not draft.missing
    ]


def _next_query(draft: _Draft) -> tuple[str, str]:
    """What to search for, and why, in words."""
    for hop in sub_questions(draft.example.metadata):
        if hop.passage_id in draft.missing:
            return hop.query, f"I need to know: {hop.query}"
    named = {
        found.start(): name
        for title in draft.missing.values()
        if (name := without_aside(title)) and (found := _mention(name).search(draft.known))
    }
    if named:
        name = named[min(named)]
        return name, f"I need to read about {name}."
    return draft.example.question, "I look the question up."


def _mention(name: str) -> re.Pattern[str]:
    """A name as whole words, in any case."""
    return re.compile(rf"(?<!\w){re.escape(name)}(?!\w)", re.IGNORECASE)


def _note(draft: _Draft, purpose: str, call: Call) -> None:
    """Writes down a search, what it found, and what that says."""
    found = [passage for passage in call.passages if passage.id in draft.missing]
    thought = f"{draft.thought} {purpose}".strip()
    draft.steps.append(DemonstrationStep(thought=thought, query=call.query, tool=call.tool, passages=call.passages))
    draft.lost = not found
    for passage in found:
        del draft.missing[passage.id]
    draft.known += "".join(f"\n{passage.title}\n{passage.text}" for passage in call.passages)
    draft.thought = " ".join(_evidence(passage, [*draft.example.answers, *draft.missing.values()]) for passage in found)


def _evidence(passage: Passage, wanted: Sequence[str]) -> str:
    """The sentence of a passage that has the first of these names that it has, or else its first sentence."""
    sentences = _SENTENCE_END.split(" ".join(passage.text.split()))
    names = [_mention(name) for text in wanted if (name := without_aside(text))]
    chosen = next((s for name in names for s in sentences if name.search(s)), sentences[0])
    words = chosen.split(" ")
    return chosen if len(words) <= _LONGEST else " ".join(words[:_LONGEST]) + " .."
