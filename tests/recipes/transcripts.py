"""R1-Searcher's rollouts that were kept as one text (the paper's released ones), read back."""

from __future__ import annotations

import re

from routerl_jax.core.types import Call, Episode, Example, Passage, Turn
from routerl_jax.recipes.r1_searcher import BEGIN_DOCUMENTS, END_DOCUMENTS, R1SearcherGrammar

_SHOWN = re.compile(rf"(\n\n{re.escape(BEGIN_DOCUMENTS)}\n.*?{re.escape(END_DOCUMENTS)}\n\n)", re.DOTALL)


def split_transcript(text: str) -> list[tuple[str, bool]]:
    """A rollout as segments, and whether the policy wrote them.

    Only blocks of documents in the very form in which they are injected count as such.
    """
    return [(segment, i % 2 == 0) for i, segment in enumerate(_SHOWN.split(text)) if segment]


def read_transcript(example: Example, text: str, grammar: R1SearcherGrammar) -> Episode:
    """A rollout as an episode without tokens: to score, to show, to demonstrate."""
    turns: list[Turn] = []
    for segment, own in split_transcript(text):
        if own or not turns:
            reason = "stop" if segment.endswith(grammar.stops) else "eos"
            turn = Turn(text=segment, stop_reason=reason, tokens=0, action=grammar.parse(segment))
            turn.well_formed = grammar.well_formed(segment)
            turns.append(turn)
            continue
        last = turns[-1]
        last.observation += segment
        if last.action is not None and last.action.kind == "search":
            call = Call(tool=last.action.tool, query=last.action.query, passages=read_documents(segment))
            last.calls.append(call)
    final = turns[-1].action if turns else None
    return Episode(
        example=example,
        sample=0,
        answer=final.answer if final is not None and final.kind == "answer" else None,
        turns=turns,
        sequences=[],
    )


def read_documents(shown: str) -> tuple[Passage, ...]:
    """The passages of a block of documents, ids "1", "2", ...

    Read are `Title: .. Text: ..`, as `R1SearcherGrammar.observation` writes them, also in the quotes of a table of separated
    values, and KILT's title and text with three spaces between, as released rollouts have them.
    """
    body = shown.strip().removeprefix(BEGIN_DOCUMENTS).removesuffix(END_DOCUMENTS)
    passages: list[Passage] = []
    found = re.search(r"^\(1\)", body, re.MULTILINE)
    while found is not None:
        number = len(passages) + 1
        following = re.compile(rf"^\({number + 1}\)", re.MULTILINE).search(body, found.end())
        passages.append(_read_document(str(number), body[found.end() : following.start() if following else len(body)]))
        found = following
    return tuple(passages)


def _read_document(name: str, entry: str) -> Passage:
    entry = entry.strip()
    if entry.startswith('"Title: '):
        entry = entry.removeprefix('"').removesuffix('"').replace('""', '"')
    if entry.startswith("Title: "):
        title, _, text = entry.removeprefix("Title: ").partition(" Text: ")
    else:
        title, _, text = entry.partition("   ")
    return Passage(id=name, title=title.strip(), text=text.strip())
