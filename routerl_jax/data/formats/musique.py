"""MuSiQue's jsonl (musique_ans_v1.0_train.jsonl and its like), and HippoRAG's json lists of the same rows."""

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
    question_of,
    strings,
)
from routerl_jax.data.formats.hipporag import EVERY_ANSWER_KEY, paragraphs
from routerl_jax.data.formats.hotpotqa import from_json


class Musique(QuestionFormat):
    """`{id, question, answer, answer_aliases, answerable, paragraphs: [{idx, title, paragraph_text, is_supporting}],
    question_decomposition: [{id, question, answer, paragraph_support_idx}]}`.

    Rows with `answerable` false (of MuSiQue-Full, where each repeats an answerable question without its evidence) and rows
    without an answer (the test set) are left out.
    """

    def matches(self, row: Row) -> bool:
        items = row.get("paragraphs")
        is_own_form = isinstance(items, list) and items and isinstance(items[0], dict) and "paragraph_text" in items[0]
        of_test_set = bool(is_own_form) and not any(key in row for key in EVERY_ANSWER_KEY)
        return "question_decomposition" in row or of_test_set

    def example(self, row: Row, location: RowLocation) -> Example | None:
        question = question_of(row, location)
        answers = distinct(*(strings(row.get(key), location, key) for key in ANSWER_KEYS))
        if row.get("answerable") is False or not answers:
            return None
        answers = distinct(answers, strings(row.get("answer_aliases"), location, "answer_aliases"))
        used_keys = (
            *ANSWER_KEYS,
            "answer_aliases",
            "id",
            "_id",
            "question",
            "paragraphs",
            "question_decomposition",
            "answerable",
        )
        metadata: dict[str, Any] = {key: value for key, value in row.items() if key not in used_keys}
        name = example_id(row, location)
        if "__" in name:  # 2hop, 3hop1, 4hop3, ...
            metadata.setdefault("type", name.split("__")[0])
        by_number = paragraphs(row, location)
        if by_number:
            metadata |= gold_fields([item for item, gold in by_number.values() if gold is not False])
        if "question_decomposition" in row:
            metadata["decomposition"] = _decomposition(row["question_decomposition"], by_number, location)
        return Example(id=name, question=question, answers=answers, metadata=metadata)

    def passages(self, row: Row, location: RowLocation) -> list[Passage]:
        return [item for item, _ in paragraphs(row, location).values()]


def _decomposition(
    steps: Any, paragraphs: dict[int, tuple[Passage, bool | None]], location: RowLocation
) -> list[dict[str, Any]]:
    """Sub-questions with their answers, each with the id of the paragraph that holds the answer."""
    steps = from_json(steps, "question_decomposition", location)
    if not isinstance(steps, list) or not all(isinstance(step, dict) for step in steps):
        raise location.error("key 'question_decomposition' must be a list of {question, answer, paragraph_support_idx}")
    result = []
    for step in steps:
        number = step.get("paragraph_support_idx")
        if number is not None and paragraphs and number not in paragraphs:
            raise location.error(f"key 'question_decomposition': there is no paragraph with idx {number!r}")
        support = paragraphs[number][0].id if number is not None and paragraphs else None
        result.append({"question": step.get("question"), "answer": step.get("answer"), "support": support})
    return result


FORMATS.register("musique")(Musique())
