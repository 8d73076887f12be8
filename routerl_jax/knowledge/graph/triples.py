r"""Triples of passages: given ones, those of simple rules, and those of a language model; and the normal form of phrases.

Files of triples have rows (JSON Lines or a JSON list, plain or gzip), each for the passage with its id:

    {"passage_id": "p7", "entities": ["Paris", ..], "triples": [["Paris", "is the capital of", "France"], ..]}

or they are the JSON object that HippoRAG writes (`openie_results_ner_*.json`), whose rows have the passage's text instead:

    {"docs": [{"idx": .., "passage": "Title\ntext", "extracted_entities": [..], "extracted_triples": [[..], ..]}, ..]}

Rules join the names and dates in a passage's sentences with its title and with each other; the predicate is the text between
two names. A language model first lists a passage's named entities, then triples between them (open information extraction).
Each successful extraction is cached at once, so that a run after a kill only asks for the rest. If an answer can't be used,
the model is asked once more. Then the passage counts as a failure with a reason, and the next run asks for it again.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from routerl_jax.core.files import parse_json
from routerl_jax.core.rows import RowLocation, checked_path, open_bytes, read_rows
from routerl_jax.core.types import Message, Passage
from routerl_jax.knowledge.corpus import passage_text
from routerl_jax.services.base import ChatModel, Completion, without_thinking
from routerl_jax.services.cache import Cache, cache_key

Triple = tuple[str, str, str]

_LONGEST = 500  # most characters of a subject, predicate or object
_NOT_ASCII_WORD = re.compile("[^A-Za-z0-9 ]")
_NOT_WORD = re.compile(r"[^\w ]|_")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Extraction:
    """The extraction of a passage.

    Attributes:
      entities: the named entities as they are written. They are for inspection only; the graph is made of triples.
      triples: (subject, predicate, object) as they are written, each once.
      dropped: number of items that were no triples.
      error: why the extraction failed, if it did.
    """

    entities: tuple[str, ...] = ()
    triples: tuple[Triple, ...] = ()
    dropped: int = 0
    error: str | None = None


def normalised(phrase: str) -> str:
    """The normal form of a phrase, which names its node, as in HippoRAG: lower case, with spaces for all but letters and
    digits.

    HippoRAG keeps only ASCII, which would make all phrases of other scripts equal. Here these keep their letters.
    """
    lower = phrase.lower()
    cleaned = _NOT_ASCII_WORD.sub(" ", lower).strip()
    return cleaned or _NOT_WORD.sub(" ", lower).strip()


def checked_triples(items: Iterable[Any]) -> tuple[tuple[Triple, ...], int]:
    """The valid triples among the items of a model or a file, each once, and the number of invalid items.

    A triple is a list of three strings (or numbers) whose first and last have letters or digits, or an object with such values
    under subject, predicate (or relation), object.
    """
    triples = [_triple(item) for item in items]
    valid = [triple for triple in triples if triple is not None]
    return tuple(dict.fromkeys(valid)), len(triples) - len(valid)


def checked_entities(items: Iterable[Any]) -> tuple[str, ...]:
    """The non-empty strings (or numbers) among the items, each once."""
    phrases = (_phrase(item) for item in items)
    return tuple(dict.fromkeys(phrase for phrase in phrases if phrase and normalised(phrase)))


class PrecomputedTriples:
    """Triples that were extracted before, looked up by a passage's id or, for HippoRAG's files, by its text.

    Raises:
      ValueError: the file can't be read, a row lacks id or triples, or a passage has two rows; names file and row.
    """

    def __init__(self, path: str | pathlib.Path) -> None:
        self.path = checked_path(path)
        self._by_id: dict[str, Extraction] = {}
        self._by_text: dict[str, Extraction] = {}
        docs = _hipporag(self.path)
        if docs is None:
            for location, row in read_rows(self.path):
                self._add(self._by_id, row, ("passage_id", "entities", "triples"), location)
        else:
            for number, row in enumerate(docs, 1):
                location = RowLocation(self.path, "item", number)
                if not isinstance(row, dict):
                    raise location.error(f"expected an object, found {type(row).__name__}")
                self._add(self._by_text, row, ("passage", "extracted_entities", "extracted_triples"), location)
        if not self:
            raise ValueError(
                f"{self.path} holds no rows. Expected {{passage_id, triples}} or HippoRAG's {{docs: [..]}}"
            )

    @staticmethod
    def _add(
        extractions: dict[str, Extraction], row: Mapping[str, Any], keys: tuple[str, str, str], location: RowLocation
    ) -> None:
        """Adds the extraction of a row, under its id or text. `keys`: of the id or text, the entities and the triples."""
        key, entities, triples = keys
        if row.get(key) is None or isinstance(row[key], bool | list | dict):
            raise location.error(f"key {key!r} is missing or no string (keys: {', '.join(row) or 'none'})")
        for name in (entities, triples):
            if not isinstance(row.get(name, [] if name == entities else None), list):
                raise location.error(f"key {name!r} must hold a list")
        checked, dropped = checked_triples(row[triples])
        if (passage := str(row[key])) in extractions:
            raise location.error(f"a second row for the passage {passage[:60]!r}. Join them")
        named = checked_entities(row.get(entities, []))
        extractions[passage] = Extraction(entities=named, triples=checked, dropped=dropped)

    def __len__(self) -> int:
        return len(self._by_id) + len(self._by_text)

    def of(self, passage: Passage) -> Extraction | None:
        """The given extraction of a passage; None if there is none."""
        if passage.id in self._by_id:
            return self._by_id[passage.id]
        return self._by_text.get(passage_text(passage)) or self._by_text.get(passage.text)


def to_row(passage_id: str, extraction: Extraction) -> dict[str, Any]:
    """The row of a file of triples."""
    return {"passage_id": passage_id, "entities": extraction.entities, "triples": extraction.triples}


def _triple(item: Any) -> Triple | None:
    if isinstance(item, Mapping):
        lower = {str(key).lower(): value for key, value in item.items()}
        item = [lower.get("subject"), lower.get("predicate", lower.get("relation")), lower.get("object")]
    if not isinstance(item, list | tuple) or len(item) != 3:
        return None
    subject, predicate, object_ = (_phrase(part) for part in item)
    if subject is None or predicate is None or object_ is None or not normalised(subject) or not normalised(object_):
        return None
    return subject, predicate, object_


def _phrase(value: Any) -> str | None:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    phrase = " ".join(str(value).encode("utf-8", "replace").decode().split())  # half a surrogate pair can't be stored
    return phrase if len(phrase) <= _LONGEST else None


def _hipporag(path: pathlib.Path) -> list[Any] | None:
    if not path.name.removesuffix(".gz").endswith(".json"):
        return None
    try:
        with open_bytes(path) as file:
            content = parse_json(file.read())
    except ValueError as error:
        raise ValueError(
            f"{path}: not JSON, or damaged ({error}); copy it again, or let its program write it anew"
        ) from error
    if not isinstance(content, dict):
        return None  # a list of rows
    if not isinstance(content.get("docs"), list):
        raise ValueError(f"{path}: an object without a list under 'docs'. Expected HippoRAG's {{docs: [..]}}, or rows")
    return content["docs"]


_MONTH = "January|February|March|April|May|June|July|August|September|October|November|December"
_DATE = rf"\d{{1,2}} (?:{_MONTH})(?: \d{{4}})?|(?:{_MONTH}) \d{{1,2}}(?:, ?\d{{4}})?|(?:{_MONTH}) \d{{4}}"
_NUMBER = r"\d[\d,.]*\d(?:st|nd|rd|th|s|%)?|\d+(?:st|nd|rd|th|s|%)?"
_WORD = r"[^\W\d_a-zß-öø-ÿ][\w'’&-]*(?:\.(?=\w\.|[ ]?[A-Z]))?"  # begins with a capital
_JOINT = r"(?:of|the|de|di|da|von|van|der|den|la|le|du|del|al|el|bin|ibn|&)"
_NAME = rf"{_WORD}(?:[ ]{_WORD}|(?:[ ]{_JOINT}){{1,2}}[ ]{_WORD}|[ ]\d{{1,4}}(?=\W))*"
_SPAN = re.compile(rf"(?P<date>\b(?:{_DATE})\b)|(?P<name>\b{_NAME})|(?P<number>\b{_NUMBER}\b)")
_SENTENCE = re.compile(r"(?<=[.!?])(?<![ .][A-Z]\.)(?<!\b(?:Mr|Dr|St|Jr|Sr|vs|No)\.)(?<!\bMrs\.)\s+(?=[\"'(A-Z\d])")
_BRACKETS = re.compile(r"\s*\([^)]*\)\s*$")
_SPACES = re.compile(r"\s+")
# Words that begin a sentence or refer to something, but are no names.
_EMPTY = frozenset(
    """
    a an the this that these those he she it they we you i his her its their our my your him them in on at by for
    from with after before during since until when while where which who whose what as although though because but
    and or nor so yet if however then there here also both each some many most other several all no not one two
    three four five six seven eight nine ten first second third early later following according despite along
    together under over between among through to of is was are were be been being has had have do does did may might
    can could will would once initially currently today now such like unlike upon within without about
    """.split()  # noqa: SIM905 - as a list it would fill a page
)
_LONGEST_PREDICATE = 8  # words


def names(sentence: str) -> list[tuple[int, int, str]]:
    """(start, end, text) of the names, dates and numbers of a sentence, in order."""
    spans = []
    for match in _SPAN.finditer(sentence):
        start, end = match.span()
        if match["name"]:
            words = match["name"].split(" ")
            while words and words[0].lower() in _EMPTY:
                start += len(words.pop(0)) + 1
            if not words:
                continue
            end = start + len(" ".join(words))
        text = re.sub(r"['’]s$", "", sentence[start:end].strip(" .,'’&-"))
        if normalised(text):
            spans.append((start, end, text))
    return spans


def rule_extraction(passage: Passage) -> Extraction:
    """Finds names (runs of capitalised words), dates and numbers by their form. Never fails.

    Each one is joined with the passage's title and with the name before it in the sentence.
    """
    title = _SPACES.sub(" ", passage.title).strip()
    subject = _BRACKETS.sub("", title) or title
    triples: list[Triple] = []
    if subject != title:
        triples.append((title, "is", subject))
    entities = dict.fromkeys([subject] if subject else [])
    for sentence in _SENTENCE.split(_SPACES.sub(" ", passage.text)):
        spans = names(sentence)
        entities |= dict.fromkeys(text for _, _, text in spans)
        after, last = 0, ""
        for start, end, name in spans:
            words = [word for word in re.findall(r"[\w'’-]+", sentence[after:start]) if word.strip("'’-")]
            between = " ".join(words[-_LONGEST_PREDICATE:])
            if subject and not _same(name, subject):
                triples.append((subject, between or "has", name))
            if last and not last[0].isdigit() and not _same(last, subject) and not _same(last, name):
                triples.append((last, between or "and", name))
            after, last = end, name
    return Extraction(entities=tuple(entities), triples=checked_triples(triples)[0])


def _same(name: str, other: str) -> bool:
    return normalised(name) == normalised(other)


_FENCE = re.compile(r"```[a-zA-Z]*\s*(.*?)(?:```|\Z)", re.DOTALL)
_INNERMOST = re.compile(r"\[[^\[\]{}]*\]|\{[^\[\]{}]*\}")
_TRAILING_COMMA = re.compile(r",(\s*[\]}])")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*+("?)')  # also one that nothing closes: no other begins within it
_LONGEST_ANSWER = 200_000  # most characters that are parsed


def json_value(text: str, *keys: str) -> Any:
    """The JSON value in a text, even with prose, a code fence or reasoning around it; None if there is none.

    Trailing commas are allowed. A value that was cut off is not completed.

    Args:
      keys: an object with one of these keys is preferred to other values, which prose may contain ("as [1] says").
    """
    first, answer = None, _answer(text).strip()
    for part in (answer, *(match[1].strip() for match in _FENCE.finditer(answer))):
        for attempt in (part, _TRAILING_COMMA.sub(r"\1", part)):
            for value in _values(attempt):
                if not keys or (isinstance(value, dict) and any(key in value for key in keys)):
                    return value
                first = value if first is None else first
    return first


def whole_items(text: str) -> list[Any]:
    """The innermost complete lists and objects of a text, in JSON or Python syntax.

    This is the usable part of an answer that breaks off, has stray brackets, or mixes quotes.
    """
    values = (_literal(_TRAILING_COMMA.sub(r"\1", match[0])) for match in _INNERMOST.finditer(_answer(text)))
    return [value for value in values if value is not None]


def whole_strings(text: str, key: str) -> list[str]:
    """The complete strings of the list under `key` in a text that breaks off."""
    _, key_found, rest = _answer(text).partition(f'"{key}"')
    if not key_found:
        return []
    rest = rest.partition("[")[2].partition("]")[0]
    strings = (_literal(match[0]) for match in _STRING.finditer(rest) if match[1])
    return [value for value in strings if isinstance(value, str)]


def _answer(text: str) -> str:
    return without_thinking(text[:_LONGEST_ANSWER])


def _values(text: str) -> Iterator[Any]:
    """The lists and objects in the text, one after the other, up to the first incomplete one."""
    decoder = json.JSONDecoder()
    position, tries = 0, 0
    while (
        tries < 64
        and (start := min((p for p in (text.find("{", position), text.find("[", position)) if p >= 0), default=-1)) >= 0
    ):
        try:
            value, position = decoder.raw_decode(text, start)
            tries += 1
            yield value
        except (ValueError, RecursionError):
            # a value inside a broken one is not the intended value, unless the broken one is only prose
            if re.match(r'[{\[]\s*["{\[]', text[start:]):
                return
            position, tries = start + 1, tries + 1


def _literal(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        return None


PROMPTS = 1  # version of the prompts below; part of the cache's key

_ENTITY_KEYS = ("entities", "named_entities")
_LONGEST_PASSAGE = 20_000  # characters of a passage that are read
_BATCH = 64  # passages between two writes to the cache
_SECOND_TEMPERATURE = 0.5  # temperature of the second attempt; greedy decoding would repeat the first answer


class ModelExtractor:
    """Extracts triples with a chat model, and caches its answers.

    Args:
      cache: cache of extractions; the key is a digest of all that an extraction depends on. None: no cache.
      entities_first: two calls per passage as in HippoRAG (entities, then triples between them); False: triples at once.
      max_tokens: most tokens of an answer. The complete part of a cut answer is used.
    """

    def __init__(
        self,
        model: ChatModel,
        cache: Cache | None = None,
        *,
        entities_first: bool = True,
        max_tokens: int = 1024,
    ) -> None:
        self.model, self.cache, self.entities_first = model, cache, entities_first
        self.max_tokens = max_tokens

    def extract(self, passages: Sequence[Passage]) -> list[Extraction]:
        """One extraction per passage, in order. Failures have `error` set and are not cached."""
        texts = [passage_text(passage)[:_LONGEST_PASSAGE] for passage in passages]
        keys = [self._key(text) for text in texts]
        distinct = dict(zip(keys, texts))
        cached = self.cache.get_many(list(distinct)) if self.cache is not None else {}
        extractions = {key: _stored(json.loads(value)) for key, value in cached.items()}
        missing = [key for key in distinct if key not in extractions]
        for start in range(0, len(missing), _BATCH):
            chunk = missing[start : start + _BATCH]
            fresh = dict(zip(chunk, self._ask([distinct[key] for key in chunk])))
            if self.cache is not None:
                rows = {key: dataclasses.asdict(value) for key, value in fresh.items() if value.error is None}
                self.cache.set_many({key: json.dumps(row).encode() for key, row in rows.items()})
            extractions |= fresh
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
            results[i] = _answered_extraction(answer, entities[i])
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


def _answered_extraction(answer: Completion, entities: tuple[str, ...] | None) -> Extraction:
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


def _stored(fields: Mapping[str, Any]) -> Extraction:
    """An extraction from the cache."""
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
