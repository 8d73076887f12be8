"""R1-Searcher's training and evaluation rows (stage_1.jsonl, stage_2.jsonl, hotpotqa_500.jsonl)."""

from __future__ import annotations

from routerl_jax.core.rows import RowLocation
from routerl_jax.core.types import Example
from routerl_jax.data.formats.format import FORMATS, QuestionFormat, Row, distinct, example_id, question_of, strings

_MARKS = ("pred_anses", "gen_text_store")  # earlier attempts, and a field for the next one


class R1Searcher(QuestionFormat):
    """`{idx, question, answer, pred_anses}`: ten earlier predictions with each question of stage 1, kept in `metadata`."""

    def matches(self, row: Row) -> bool:
        return "idx" in row and any(mark in row for mark in _MARKS)

    def example(self, row: Row, location: RowLocation) -> Example | None:
        question = question_of(row, location)
        answers = distinct(strings(row.get("answer"), location, "answer"))
        if not answers:
            raise location.error("key 'answer' is missing or empty")
        used_keys = ("idx", "question", "answer", "gen_text_store")
        metadata = {key: value for key, value in row.items() if key not in used_keys}
        return Example(id=example_id(row, location, ("idx",)), question=question, answers=answers, metadata=metadata)


FORMATS.register("r1_searcher")(R1Searcher())
