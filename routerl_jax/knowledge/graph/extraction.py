"""Open information extraction by a language model: first a passage's named entities, then triples between them.

Each successful extraction is cached at once, so that a run after a kill only asks for the rest. If an answer can't be used, the
model is asked once more. Then the passage counts as a failure with a reason, and the next run asks for it again.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from routerl_jax.core.progress import Bar
from routerl_jax.core.types import Message, Passage
from routerl_jax.knowledge.graph.parsing import json_value, whole_items, whole_strings
from routerl_jax.knowledge.graph.triples import (
    Extraction,
    checked_entities,
    checked_triples,
    passage_text,
)
from routerl_jax.services.base import ChatModel, Completion
from routerl_jax.services.cache import Cache, cache_key

PROMPTS = 1  # version of the prompts below; part of the cache's key

_ENTITY_KEYS = ("entities", "named_entities")
_BATCH = 64  # passages between two writes to the cache
_SECOND_TEMPERATURE = 0.5  # temperature of the second attempt; greedy decoding would repeat the first answer


class ModelExtractor:
    """Extracts triples with a chat model, and caches its answers.

    Args:
      cache: cache of extractions; the key is a digest of all that an extraction depends on. None: no cache.
      entities_first: two calls per passage as in HippoRAG (entities, then triples between them); False: triples at once.
      max_tokens: most tokens of an answer. The complete part of a cut answer is used.
      max_characters: most characters of a passage; the rest is not read.
    """

    def __init__(
        self,
        model: ChatModel,
        cache: Cache | None = None,
        *,
        entities_first: bool = True,
        max_tokens: int = 1024,
        max_characters: int = 20_000,
    ) -> None:
        self.model, self.cache, self.entities_first = model, cache, entities_first
        self.max_tokens, self.max_characters = max_tokens, max_characters

    def extract(self, passages: Sequence[Passage], *, progress: bool = False) -> list[Extraction]:
        """One extraction per passage, in order. Failures have `error` set and are not cached."""
        texts = [passage_text(passage)[: self.max_characters] for passage in passages]
        keys = [self._key(text) for text in texts]
        distinct = dict(zip(keys, texts))
        cached = self.cache.get_many(list(distinct)) if self.cache is not None else {}
        extractions = {key: _read(value) for key, value in cached.items()}
        missing = [key for key in distinct if key not in extractions]
        with Bar(
            total=len(distinct), initial=len(extractions), desc="extracting", unit="passage", disable=not progress
        ) as bar:
            for start in range(0, len(missing), _BATCH):
                chunk = missing[start : start + _BATCH]
                fresh = dict(zip(chunk, self._ask([distinct[key] for key in chunk])))
                if self.cache is not None:
                    self.cache.set_many({key: _write(value) for key, value in fresh.items() if value.error is None})
                extractions |= fresh
                bar.update(len(chunk))
        return [extractions[key] for key in keys]

    def _key(self, text: str) -> str:
        settings = dict(self.model.settings)
        return cache_key("triples", PROMPTS, self.model.name, settings, self.entities_first, self.max_tokens, text)

    def _ask(self, texts: Sequence[str]) -> list[Extraction]:
        extractions = self._attempt(texts, 0.0)
        failed = [i for i, extraction in enumerate(extractions) if extraction.error]
        if failed:
            for i, extraction in zip(failed, self._attempt([texts[i] for i in failed], _SECOND_TEMPERATURE)):
                extractions[i] = extraction
        return extractions

    def _attempt(self, texts: Sequence[str], temperature: float) -> list[Extraction]:
        results: list[Extraction] = [Extraction() for _ in texts]
        entities: list[tuple[str, ...] | None] = [None for _ in texts]
        texts_left = list(range(len(texts)))
        if self.entities_first:
            for i, answer in enumerate(
                self._complete([_entity_prompt(text) for text in texts], temperature, _ENTITIES)
            ):
                names = None if answer.error else parse_entities(answer.text)
                if names is None:
                    results[i] = Extraction(error=answer.error or f"no list of entities in {_beginning(answer.text)}")
                entities[i] = names
            texts_left = [i for i in texts_left if entities[i] is not None]
        prompts = [_triple_prompt(texts[i], entities[i]) for i in texts_left]
        for i, answer in zip(texts_left, self._complete(prompts, temperature, _TRIPLES)):
            results[i] = _extraction(answer, entities[i])
        return results

    def _complete(
        self, prompts: list[list[Message]], temperature: float, schema: Mapping[str, Any]
    ) -> list[Completion]:
        if not prompts:
            return []
        return self.model.complete(prompts, max_tokens=self.max_tokens, temperature=temperature, schema=schema)


def parse_entities(text: str) -> tuple[str, ...] | None:
    """The entities in a model's answer, `{"entities": [..]}` or a list; None if it has no such list."""
    value = json_value(text, *_ENTITY_KEYS)
    if isinstance(value, dict):
        value = next((value[key] for key in _ENTITY_KEYS if key in value), None)
    if isinstance(value, list):
        return checked_entities(value)
    return checked_entities(whole_strings(text, "entities")) or None


def parse_triples(text: str) -> tuple[tuple[tuple[str, str, str], ...], int] | None:
    """The triples in a model's answer, `{"triples": [..]}` or a list, and the number of invalid items; None without a list.

    If the answer is no complete JSON, or has its triples one after the other, all complete triples are used.
    """
    value = json_value(text, "triples")
    if isinstance(value, dict) and "triples" in value:
        value = value["triples"]
    if isinstance(value, list) and not (value and all(isinstance(part, str) for part in value)):
        return checked_triples(value)
    triples, _ = checked_triples(whole_items(text))
    return (triples, 0) if triples else None


def _extraction(answer: Completion, entities: tuple[str, ...] | None) -> Extraction:
    if answer.error:
        return Extraction(error=answer.error)
    parsed = parse_triples(answer.text)
    if parsed is None:
        return Extraction(error=f"no list of triples in {_beginning(answer.text)}")
    triples, dropped = parsed
    named = entities if entities is not None else tuple(dict.fromkeys(part for s, _, o in triples for part in (s, o)))
    return Extraction(entities=named, triples=triples, dropped=dropped)


def _beginning(text: str) -> str:
    return repr(text[:80]) if text.strip() else "an empty answer"


def _write(extraction: Extraction) -> bytes:
    return json.dumps(dataclasses.asdict(extraction)).encode()


def _read(value: bytes) -> Extraction:
    fields = json.loads(value)
    triples = tuple((s, p, o) for s, p, o in fields["triples"])
    return Extraction(entities=tuple(fields["entities"]), triples=triples, dropped=fields["dropped"])


_STRINGS = {"type": "array", "items": {"type": "string"}}
_ENTITIES = {
    "type": "object",
    "properties": {"entities": _STRINGS},
    "required": ["entities"],
    "additionalProperties": False,
}
_TRIPLES = {
    "type": "object",
    "properties": {"triples": {"type": "array", "items": {**_STRINGS, "minItems": 3, "maxItems": 3}}},
    "required": ["triples"],
    "additionalProperties": False,
}
_SHOWN = (
    "Lake Vostok Observatory\nThe observatory above Lake Vostok was opened in March 1996 by the glaciologist Ana Petrova, who "
    "led it until 2004. It belongs to the Arctic and Antarctic Research Institute in Saint Petersburg."
)
_SHOWN_ENTITIES = [
    "Lake Vostok Observatory",
    "Lake Vostok",
    "March 1996",
    "Ana Petrova",
    "2004",
    "Arctic and Antarctic Research Institute",
    "Saint Petersburg",
]
_SHOWN_TRIPLES = [
    ["Lake Vostok Observatory", "is above", "Lake Vostok"],
    ["Lake Vostok Observatory", "was opened in", "March 1996"],
    ["Ana Petrova", "opened", "Lake Vostok Observatory"],
    ["Ana Petrova", "is a", "glaciologist"],
    ["Ana Petrova", "led Lake Vostok Observatory until", "2004"],
    ["Lake Vostok Observatory", "belongs to", "Arctic and Antarctic Research Institute"],
    ["Arctic and Antarctic Research Institute", "is in", "Saint Petersburg"],
]
_ENTITY_TASK = (
    "List everything that the passage names: people, places, organisations, works, events, products, dates and quantities. "
    'Copy the names as they are written. Reply with JSON alone: {"entities": ["name", ...]}'
)
_TRIPLE_TASK = (
    "Write the passage as a list of triples: [subject, predicate, object]. Each triple states one fact that can be understood "
    "without the passage: put names in the place of pronouns, and keep subjects and objects short. Use every fact of the "
    "passage and nothing else."
)
_WITH_NAMES = " Let subject or object, or both, be names from the list wherever that is possible."
_TRIPLE_FORM = ' Reply with JSON alone: {"triples": [["subject", "predicate", "object"], ...]}'


def _entity_prompt(text: str) -> list[Message]:
    return [
        Message(role="system", content=_ENTITY_TASK),
        Message(role="user", content=_SHOWN),
        Message(role="assistant", content=json.dumps({"entities": _SHOWN_ENTITIES})),
        Message(role="user", content=text),
    ]


def _triple_prompt(text: str, entities: Sequence[str] | None) -> list[Message]:
    def request(text: str, names: Sequence[str] | None) -> str:
        return text if names is None else f"{text}\n\nNames: {json.dumps(list(names), ensure_ascii=False)}"

    task = _TRIPLE_TASK + (_WITH_NAMES if entities is not None else "") + _TRIPLE_FORM
    example = request(_SHOWN, None if entities is None else _SHOWN_ENTITIES)
    return [
        Message(role="system", content=task),
        Message(role="user", content=example),
        Message(role="assistant", content=json.dumps({"triples": _SHOWN_TRIPLES})),
        Message(role="user", content=request(text, entities)),
    ]
