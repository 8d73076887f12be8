"""A small corpus with its triples, and a chat model that says what a test tells it to."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from routerl_jax.core.types import Message, Passage
from routerl_jax.services.base import Completion

PASSAGES = [
    Passage(id="p0", title="Ada Byron", text="Ada Byron was born in London. Her teacher was Mary Somerville."),
    Passage(id="p1", title="Mary Somerville", text="Mary Somerville was born in Jedburgh and discovered nothing."),
    Passage(id="p2", title="Jedburgh", text="Jedburgh is a town in Scotland on the Jed Water."),
    Passage(id="p3", title="London", text="London lies on the Thames."),
    Passage(id="p4", title="Weather", text="it rains."),
]
TRIPLES = {
    "p0": [["Ada Byron", "was born in", "London"], ["Ada Byron", "was taught by", "Mary Somerville"]],
    "p1": [["Mary Somerville", "was born in", "Jedburgh"]],
    "p2": [["Jedburgh", "is in", "Scotland"], ["Jedburgh", "lies on", "Jed Water"]],
    "p3": [["London", "lies on", "Thames"]],
    "p4": [],
}


def write_triples(path: pathlib.Path, triples: Mapping[str, Any] = TRIPLES) -> str:
    path.write_text("".join(json.dumps({"passage_id": key, "triples": value}) + "\n" for key, value in triples.items()))
    return str(path)


class Scripted:
    """Answers by a function of the conversation; remembers what it was asked."""

    name = "scripted"

    def __init__(self, answer: Callable[[Sequence[Message]], str | Completion]) -> None:
        self._answer = answer
        self.asked: list[str] = []
        self.settings: dict[str, Any] = {}
        self.temperatures: list[float] = []

    def complete(
        self,
        conversations: Sequence[Sequence[Message]],
        *,
        max_tokens: int = 1024,
        temperature: float = 0.0,
        schema: Mapping[str, Any] | None = None,
        sample: int = 0,
    ) -> list[Completion]:
        self.asked += [messages[-1].content for messages in conversations]
        self.temperatures += [temperature] * len(conversations)
        answers = [self._answer(messages) for messages in conversations]
        return [answer if isinstance(answer, Completion) else Completion(text=answer) for answer in answers]


def knowing(messages: Sequence[Message]) -> str:
    """The answer of a model that knows the small corpus, to either of the two calls."""
    text = messages[-1].content
    title = text.partition("\n")[0]
    passage = next(passage for passage in PASSAGES if passage.title == title)
    triples = TRIPLES[passage.id]
    if "Names:" not in text:
        return json.dumps({"entities": sorted({part for s, _, o in triples for part in (s, o)})})
    return json.dumps({"triples": triples})
