"""Bamboogle as its authors give it: a table with the columns Question and Answer."""

from __future__ import annotations

from routerl_jax.core.rows import RowLocation
from routerl_jax.core.types import Example
from routerl_jax.data.formats.format import FORMATS, QuestionFormat, Row, distinct, example_id, question_of, strings


class Bamboogle(QuestionFormat):
    """`{Question, Answer}`, of a .csv file or as JSON."""

    def matches(self, row: Row) -> bool:
        return "Question" in row and "Answer" in row

    def example(self, row: Row, location: RowLocation) -> Example | None:
        question = question_of(row, location, "Question")
        answers = distinct(strings(row.get("Answer"), location, "Answer"))
        if not answers:
            raise location.error("key 'Answer' is missing or empty")
        metadata = {key: value for key, value in row.items() if key and key not in ("id", "Question", "Answer")}
        return Example(id=example_id(row, location), question=question.strip(), answers=answers, metadata=metadata)


FORMATS.register("bamboogle")(Bamboogle())
