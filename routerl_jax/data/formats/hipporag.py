"""HippoRAG's json lists: `paragraphs` or `contexts` with each question, golden answers under the data set's own key."""

from __future__ import annotations

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
)

EVERY_ANSWER_KEY = (*ANSWER_KEYS, "gold_ans", "reference")


class HippoRag(QuestionFormat):
    """`{id?, question, answer, paragraphs: [{title, text, is_supporting?, idx?}]}`; in nq_rear.json the answers are called
    `reference` and the paragraphs `contexts`. A paragraph that does not say `is_supporting` is a gold one, as in HippoRAG."""

    def matches(self, row: Row) -> bool:
        lists = [row.get(key) for key in ("paragraphs", "contexts")]
        return any(isinstance(items, list) and items and isinstance(items[0], dict) for items in lists)

    def example(self, row: Row, location: RowLocation) -> Example | None:
        question = question_of(row, location)
        answers = distinct(*(strings(row.get(key), location, key) for key in (*EVERY_ANSWER_KEY, "answer_aliases")))
        if not answers:
            raise location.error("no answers; give them under 'answer'")
        used_keys = (*EVERY_ANSWER_KEY, "answer_aliases", "id", "_id", "question", "paragraphs", "contexts")
        metadata: dict[str, Any] = {key: value for key, value in row.items() if key not in used_keys}
        by_number = paragraphs(row, location)
        if by_number:
            metadata |= gold_fields([item for item, gold in by_number.values() if gold is not False])
        return Example(id=example_id(row, location), question=question, answers=answers, metadata=metadata)

    def passages(self, row: Row, location: RowLocation) -> list[Passage]:
        return [item for item, _ in paragraphs(row, location).values()]


def paragraphs(row: Row, location: RowLocation) -> dict[int, tuple[Passage, bool | None]]:
    """Paragraphs by number (`idx`, or the index in the list), each with whether it is gold (None: unknown)."""
    key = "paragraphs" if row.get("paragraphs") is not None else "contexts"
    value = row.get(key)
    if value is None:
        return {}
    if not isinstance(value, list):
        raise location.error(f"key {key!r} must be a list of {{title, text, is_supporting}}")
    by_number: dict[int, tuple[Passage, bool | None]] = {}
    for number, item in enumerate(value):
        if not isinstance(item, dict):
            raise location.error(f"key {key!r}, item {number + 1}: expected {{title, text, is_supporting}}")
        text = next((item[name] for name in ("paragraph_text", "text") if isinstance(item.get(name), str)), None)
        title = item.get("title") or ""
        if text is None or not isinstance(title, str):
            raise location.error(f"key {key!r}, item {number + 1}: 'title' and 'text' must be strings")
        gold = item.get("is_supporting")
        name = number if item.get("idx") is None else item["idx"]
        if name in by_number:
            raise location.error(f"key {key!r}, item {number + 1}: idx {name!r} is that of another item too")
        by_number[name] = (passage(title, text), None if gold is None else bool(gold))
    return by_number


FORMATS.register("hipporag")(HippoRag())
