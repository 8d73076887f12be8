"""HotpotQA's json (hotpot_dev_distractor_v1.json and its like), and the same fields in FlashRAG's and the hub's shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from routerl_jax.core.rows import RowLocation
from routerl_jax.core.types import Example, Passage
from routerl_jax.data.formats.format import (
    ANSWER_KEYS,
    FORMATS,
    QuestionFormat,
    Row,
    distinct,
    example_id,
    gold_fields,
    passage,
    question_of,
    strings,
    unpacked,
    with_metadata,
)


class HotpotQA(QuestionFormat):
    """`{_id, question, answer, supporting_facts: [[title, number], ..], context: [[title, [sentence, ..]], ..], type, level}`.

    `supporting_facts` and `context` may also be dicts of lists (`{title, sent_id}`, `{title, sentences}`), as on the hub and
    under FlashRAG's `metadata`. A row without an answer (the test set) is left out.
    """

    def matches(self, row: Row) -> bool:
        fields = with_metadata(row)
        of_test_set = "_id" in fields and not any(key in fields for key in ANSWER_KEYS)
        return "context" in fields and "evidences" not in fields and ("supporting_facts" in fields or of_test_set)

    def example(self, row: Row, location: RowLocation) -> Example | None:
        fields = with_metadata(row)
        question = question_of(fields, location)
        answers = distinct(*(strings(fields.get(key), location, key) for key in ANSWER_KEYS))
        if not answers:
            return None
        used_keys = (*ANSWER_KEYS, "id", "_id", "question", "context", "metadata", "supporting_facts")
        metadata = {key: value for key, value in fields.items() if key not in used_keys}
        facts = facts_of(fields.get("supporting_facts"), location)
        if facts is not None:
            metadata["supporting_facts"] = facts
        if facts is not None and "context" in fields:
            titles = {title for title, _ in facts}
            gold = [item for item in self.passages(row, location) if item.title in titles]
            metadata |= gold_fields(gold)
        return Example(id=example_id(fields, location), question=question, answers=answers, metadata=metadata)

    def passages(self, row: Row, location: RowLocation) -> list[Passage]:
        return [
            passage(title, joined(sentences))
            for title, sentences in _context(with_metadata(row).get("context"), location)
        ]


def joined(sentences: list[str]) -> str:
    """Sentences joined to a text. HotpotQA's sentences begin with a blank, 2WikiMultihopQA's don't."""
    text = ""
    for sentence in sentences:
        text += sentence if not text or sentence[:1].isspace() or text[-1:].isspace() else f" {sentence}"
    return text.strip()


def _context(value: Any, location: RowLocation) -> list[tuple[str, list[str]]]:
    """(title, sentences) of each paragraph."""
    value = from_json(value, "context", location)
    if value is None:
        return []
    if isinstance(value, Mapping):
        key = next((key for key in ("sentences", "content") if key in value), "sentences")
        value = _pairs(value, ("title", key), "context", location)
    if not isinstance(value, list) or not all(_is_pair(item) and _is_strings(item[1]) for item in value):
        raise location.error("key 'context' must be a list of [title, [sentence, ..]]")
    return [(title, sentences) for title, sentences in value]


def facts_of(value: Any, location: RowLocation) -> list[list[Any]] | None:
    """[title, sentence number] of each supporting sentence; None if the row doesn't have them."""
    value = from_json(value, "supporting_facts", location)
    if value is None:
        return None
    if isinstance(value, Mapping):
        value = _pairs(value, ("title", "sent_id"), "supporting_facts", location)
    if not isinstance(value, list) or not all(_is_pair(item) and type(item[1]) is int for item in value):
        raise location.error("key 'supporting_facts' must be a list of [title, number of the sentence]")
    return [list(item) for item in value]


def from_json(value: Any, key: str, location: RowLocation) -> Any:
    """The list or object in a string (`format.unpacked`). A value that is no string is returned unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return unpacked(value)
    except ValueError as error:
        raise location.error(f"key {key!r} is a string that is not JSON, nor a list of Python ({error})") from error


def _pairs(value: Mapping[str, Any], keys: tuple[str, str], key: str, location: RowLocation) -> list[list[Any]]:
    columns = [value.get(name) for name in keys]
    if not all(isinstance(column, list) for column in columns) or len(columns[0] or []) != len(columns[1] or []):
        raise location.error(f"key {key!r} must hold two lists of one length, {keys[0]!r} and {keys[1]!r}")
    return [list(pair) for pair in zip(columns[0] or [], columns[1] or [])]


def _is_pair(item: Any) -> bool:
    return isinstance(item, list | tuple) and len(item) == 2 and isinstance(item[0], str)


def _is_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


FORMATS.register("hotpotqa")(HotpotQA())
