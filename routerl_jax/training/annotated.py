"""Demonstrations from questions, with real searches in the run's knowledge bases. No teacher model writes them.

`worked_questions` makes as many as a run needs, in one of two manners.

`worked_examples` need gold passages. The data set says which passages hold a question's answer (HotpotQA, 2WikiMultihopQA,
MuSiQue, and rows of your own with `supporting` or a `path`). The queries follow from that, and the run's own retriever answers
them. The knowledge base of each search is drawn at random, as in Atlas's demonstrations, but questions whose passages it does
not find are left out: they teach where to look, too.

`drawn_examples` teach the protocol and how to read, and nothing of where to look. Most of their searches find nothing, so
`reading_examples` teach reading with searches that do, of which nothing is learnt.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from routerl_jax.agents.agent import Agent, Pieces, SearchTool
from routerl_jax.agents.calls import calls_of_all
from routerl_jax.agents.conversation import Request
from routerl_jax.core.background import run_coroutine
from routerl_jax.core.progress import Bar
from routerl_jax.core.text import folded, states
from routerl_jax.core.types import Call, Demonstration, DemonstrationStep, Example, Passage
from routerl_jax.data.gold_paths import GoldHop, gold_passages, gold_path, known_path, sub_questions, without_aside
from routerl_jax.parallel import multihost
from routerl_jax.rewards.metrics import NORMALIZERS
from routerl_jax.rewards.retrieval import telling
from routerl_jax.training.config import TrainConfig
from routerl_jax.training.knowledge import open_knowledge
from routerl_jax.training.setup import open_examples

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z\"'(])")
_PORTION = 1024  # questions that are searched for before it is seen whether they are enough
_BATCH = 256  # searches at a time
_LONGEST = 40  # words of evidence that a thought quotes


def worked_questions(
    config: TrainConfig, agent: Agent, needed: int, workdir: pathlib.Path | None
) -> tuple[list[tuple[Example, Pieces]], str]:
    """Demonstrations made from training questions by searches in the run's knowledge bases, and a text with their number.

    Annotated: of those whose gold passages are found, at least as many as are needed, drawn at random, or all if there are
    fewer. Drawn: at least as many as are needed, of all questions equally often. They are searched for in portions.

    Raises:
      ValueError: no question has gold passages, or no drawn search shows an answer.
    """
    drawn, name = config.warm_start.demonstrations == "drawn", config.data.train
    source = open_examples(name, config.data.train_range, "config.data.train")
    rng = np.random.default_rng([4, config.seed])
    rounds = math.ceil(needed / len(source)) if drawn else 1
    order = np.concatenate([rng.permutation(len(source)) for _ in range(rounds)])
    tools = open_knowledge(config, workdir, progress=multihost.is_main())
    most, limits = config.agent.max_searches, {"k": config.agent.k, "timeout": config.rollout.tool_timeout}
    looked, searches, found, worked = 0, 0, 0, list[tuple[Example, Pieces]]()
    annotated = False
    with Bar(total=needed, desc="working out", unit="example", disable=not multihost.is_main()) as bar:
        for start in range(0, len(order), _PORTION):
            examples = [source[int(i)] for i in np.sort(order[start : start + _PORTION])]
            options: dict[str, Any] = limits | {"seed": config.seed + start}
            before = len(worked)
            looked += len(examples)
            if drawn:
                options["normalizer"] = config.evaluation.normalizer
                unread = []
                for one in drawn_examples(examples, tools, max_searches=most, **options):
                    pieces = agent.pieces(one.demonstration)
                    written = [i for i, (_, learnt) in enumerate(pieces) if learnt]
                    end = None if one.found else written[len(one.demonstration.steps) - 1] + 1
                    worked.append((one.demonstration.example, pieces[:end]))
                    if not one.found:
                        unread.append(one.demonstration.example)
                searches += len(worked) - before
                for reading in reading_examples(unread, tools, **options):
                    pieces = agent.pieces(reading)
                    answer = max(i for i, (_, learnt) in enumerate(pieces) if learnt)
                    worked.append((reading.example, [(text, i == answer) for i, (text, _) in enumerate(pieces)]))
                found += len(worked) - before - len(unread)
            else:
                annotated = annotated or any(map(named_passages, examples))
                for one in worked_examples(examples, tools, max_searches=most, **options):
                    worked.append((one.example, agent.pieces(one)))
            bar.update(len(worked) - before)
            if len(worked) >= needed:
                break
    if drawn and not found:
        raise ValueError(
            f"config.warm_start.demonstrations='drawn': no search for the {looked} questions drawn from config.data.train="
            f"{name!r} shows an answer, so nothing would teach reading; launch.check_data --knowledge says why"
        )
    if drawn:
        return (
            worked,
            f"{len(worked)} demonstrations, {searches} with searches to learn and {found} with an answer to read",
        )
    if not annotated:
        raise ValueError(
            f"config.warm_start.demonstrations='annotated': no question of config.data.train={name!r} has gold passages "
            "('supporting' or 'path', docs/data.md); give questions that do, or other demonstrations"
        )
    return (
        worked,
        f"of {looked} questions of config.data.train {len(worked)} have gold passages that config.knowledge finds",
    )


@dataclasses.dataclass
class _Draft:
    """An unfinished worked example."""

    example: Example
    missing: dict[str, str]  # gold passages that no search has found: title by id
    context: str  # all text that the policy has read
    steps: list[DemonstrationStep] = dataclasses.field(default_factory=list)
    thought: str = ""  # evidence of the last search
    lost: bool = False  # a search missed its gold passage


def worked_examples(
    examples: Iterable[Example],
    tools: Mapping[str, SearchTool],
    *,
    k: int,
    max_searches: int,
    seed: int,
    timeout: float = 60.0,
) -> list[Demonstration]:
    """Demonstrations for the examples whose gold passages are all found within `max_searches` searches, in order.

    With several processes this is a collective call on the same examples: the processes share the searches and their results.

    A query uses only the question and passages that were read before. It is a sub-question, if the data set has sub-questions
    with their passages; else the title of a gold passage, if the question or a passage read before names it; else the question
    itself.

    Args:
      examples: questions with gold passages in their metadata (`named_passages`); others are left out.
      k: passages per search.
      max_searches: most searches per question. Pass the agent's own limit: an answer that a rollout would force is then marked
        as forced.
      seed: seed for the choice of knowledge bases.
      timeout: seconds for a batch of `_BATCH` searches.

    Raises:
      RuntimeError: a search failed. Its example is not just left out, or a resumed run would train on other examples.
    """
    drafts = [
        _Draft(example=example, missing=gold, context=example.question)
        for example in examples
        if (gold := named_passages(example)) and example.answers
    ]
    rng = np.random.default_rng([3, seed])
    for _ in range(max_searches):
        open_ones = [draft for draft in drafts if draft.missing and not draft.lost]
        queries = [(str(rng.choice(list(tools))), *_next_query(draft)) for draft in open_ones]
        calls = _search([Request(tool, query, k) for tool, query, _ in queries], tools, timeout)
        for draft, (_, _, purpose), call in zip(open_ones, queries, calls, strict=True):
            gold = [passage for passage in call.passages if passage.id in draft.missing]
            thought = f"{draft.thought} {purpose}".strip()
            draft.steps.append(
                DemonstrationStep(thought=thought, query=call.query, tool=call.tool, passages=call.passages)
            )
            draft.lost = not gold
            for passage in gold:
                del draft.missing[passage.id]
            draft.context += "".join(f"\n{passage.title}\n{passage.text}" for passage in call.passages)
            wanted = [*draft.example.answers, *draft.missing.values()]
            draft.thought = " ".join(_evidence(passage, wanted) for passage in gold)
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


class DrawnExample(NamedTuple):
    """Searches that were drawn. If they did not find an answer, all that can be learnt is how searches are written."""

    demonstration: Demonstration
    found: bool


def drawn_examples(
    examples: Iterable[Example],
    tools: Mapping[str, SearchTool],
    *,
    k: int,
    max_searches: int,
    seed: int,
    normalizer: str,
    timeout: float = 60.0,
) -> list[DrawnExample]:
    """A demonstration for every example with an answer. The number of its searches, from 1 to `max_searches`, is drawn, and for
    each of them the knowledge base and the query: the question, or the title of a gold passage that the question or a passage
    read before names, or the query before. None of these depends on what the searches find.

    The answer of a demonstration is the first accepted one that a passage of its searches states. Yes, no and the like, which
    many passages hold by chance, are not looked for.

    With several processes this is a collective call on the same examples: the processes share the searches and their results.

    Args:
      max_searches: at least 1.
      normalizer: of answers and passages (rewards.metrics).

    Raises:
      RuntimeError: a search failed.
    """
    normalize = NORMALIZERS.get(normalizer)
    drafts = [
        _Draft(example=example, missing=named_passages(example), context=example.question)
        for example in examples
        if example.answers
    ]
    rng = np.random.default_rng([5, seed])
    counts = rng.integers(1, max_searches + 1, size=len(drafts))
    for number in range(max_searches):
        going = [draft for draft, count in zip(drafts, counts) if number < count]
        requests = []
        for draft in going:
            before = [step.query for step in draft.steps[-1:]]
            queries = dict.fromkeys([draft.example.question, *_named(draft).values(), *before])
            requests.append(Request(str(rng.choice(list(tools))), str(rng.choice(list(queries))), k))
        for draft, call in zip(going, _search(requests, tools, timeout), strict=True):
            draft.steps.append(DemonstrationStep(thought="", query=call.query, tool=call.tool, passages=call.passages))
            draft.context += "".join(f"\n{passage.title}\n{passage.text}" for passage in call.passages)

    drawn = []
    for draft, count in zip(drafts, counts):
        answer = _stated(draft.example, [passage for step in draft.steps for passage in step.passages], normalize)
        demonstration = Demonstration(
            example=draft.example,
            steps=tuple(draft.steps),
            thought="",
            answer=answer,
            forced=bool(count == max_searches),
        )
        drawn.append(DrawnExample(demonstration, bool(answer)))
    return drawn


def reading_examples(
    examples: Sequence[Example],
    tools: Mapping[str, SearchTool],
    *,
    k: int,
    seed: int,
    normalizer: str,
    timeout: float = 60.0,
) -> list[Demonstration]:
    """A demonstration with one search for every example of which a search shows an answer. Only the answer, which is begun for
    the policy, is to be learnt: the search was not drawn.

    The question and the titles of its gold passages are looked for in every knowledge base. Of the searches that show an
    answer, one is drawn. With several processes this is a collective call, as `drawn_examples` is.

    Raises:
      RuntimeError: a search failed.
    """
    normalize = NORMALIZERS.get(normalizer)
    asked = [
        (number, Request(tool, query, k))
        for number, example in enumerate(examples)
        for query in dict.fromkeys(
            [example.question, *map(without_aside, filter(None, named_passages(example).values()))]
        )
        for tool in tools
    ]
    showing: dict[int, list[Demonstration]] = {}  # by number: a question may be there several times
    for (number, _), call in zip(asked, _search([request for _, request in asked], tools, timeout), strict=True):
        if answer := _stated(examples[number], call.passages, normalize):
            step = DemonstrationStep(thought="", query=call.query, tool=call.tool, passages=call.passages)
            one = Demonstration(example=examples[number], steps=(step,), thought="", answer=answer, forced=True)
            showing.setdefault(number, []).append(one)
    rng = np.random.default_rng([6, seed])
    return [found[rng.integers(len(found))] for found in showing.values()]


def _stated(example: Example, passages: Iterable[Passage], normalize: Callable[[str], str]) -> str:
    """The first accepted answer that a passage states; "": none."""
    read = [normalize(folded(f"{passage.title}\n{passage.text}")) for passage in passages]
    answers = filter(telling, example.answers)
    return next((answer for answer in answers if any(states(text, normalize(folded(answer))) for text in read)), "")


def named_passages(example: Example) -> dict[str, str]:
    """Titles of the passages that a question's answer needs, by id: its gold passages, or else those of its `path`."""
    return gold_passages(example.metadata) or {hop.passage_id: hop.title for hop in _hops_of_path(example)}


def _hops_of_path(example: Example) -> tuple[GoldHop, ...]:
    return (gold_path(example) or ()) if known_path(example.metadata) else ()


def _next_query(draft: _Draft) -> tuple[str, str]:
    """The next query, and its purpose in words."""
    for hop in sub_questions(draft.example.metadata) or _hops_of_path(draft.example):
        if hop.query and hop.passage_id in draft.missing:
            return hop.query, f"I need to know: {hop.query}"
    if named := _named(draft):
        name = named[min(named)]
        return name, f"I need to read about {name}."
    return draft.example.question, "I look the question up."


def _named(draft: _Draft) -> dict[int, str]:
    """Titles of missing gold passages that the question or a passage read before names, by the place of the first mention."""
    return {
        mention.start(): name
        for title in draft.missing.values()
        if (name := without_aside(title)) and (mention := _mention(name).search(draft.context))
    }


def _search(requests: Sequence[Request], tools: Mapping[str, SearchTool], timeout: float) -> list[Call]:
    """The calls, in order. Raises RuntimeError if one failed."""
    calls: list[Call] = []
    for start in range(0, len(requests), _BATCH):
        calls += run_coroutine(calls_of_all(tools, requests[start : start + _BATCH], timeout))
    if failed := [call for call in calls if call.error is not None]:
        raise RuntimeError(
            f"{len(failed)} of {len(calls)} searches for demonstrations failed, the first one, of {failed[0].tool} for "
            f"{failed[0].query!r}, with: {failed[0].error}. Mend the knowledge base, or raise config.rollout.tool_timeout"
        )
    return calls


def _mention(name: str) -> re.Pattern[str]:
    """A name as whole words, in any case."""
    return re.compile(rf"(?<!\w){re.escape(name)}(?!\w)", re.IGNORECASE)


def _evidence(passage: Passage, wanted: Sequence[str]) -> str:
    """The sentence of a passage that contains the first of these names to occur in it; its first sentence if none occurs."""
    sentences = _SENTENCE_END.split(" ".join(passage.text.split()))
    names = [_mention(name) for text in wanted if (name := without_aside(text))]
    chosen = next((s for name in names for s in sentences if name.search(s)), sentences[0])
    words = chosen.split(" ")
    return chosen if len(words) <= _LONGEST else " ".join(words[:_LONGEST]) + " .."
