"""Open-WikiTable (Kweon et al. 2023, arXiv 2305.07288): questions over all tables, each with its SQL."""

from __future__ import annotations

from routerl_jax.core.rows import RowLocation
from routerl_jax.core.types import Example
from routerl_jax.data.formats.format import FORMATS, QuestionFormat, Row, distinct, example_id, question_of, strings

_READ = ("question_id", "id", "question", "answer", "hard_positive_idx", "positive_idx", "negative_idx", "index")


class OpenWikiTable(QuestionFormat):
    """`{question_id, original_table_id, question, sql, answer: [..], hard_positive_idx: [..], positive_idx, negative_idx,
    dataset}` of train.json, valid.json and test.json, rows or pandas' columns.

    Several items of `answer` are joined with commas to one answer. `metadata`: `supporting` (ids of the pieces of
    splitted_tables.json that hold the whole answer, from `hard_positive_idx`), and `original_table_id`, `sql` and `dataset`,
    unchanged.
    """

    def matches(self, row: Row) -> bool:
        return "hard_positive_idx" in row and "original_table_id" in row

    def example(self, row: Row, location: RowLocation) -> Example | None:
        answer = ", ".join(distinct(strings(row.get("answer"), location, "answer")))
        if not answer:
            raise location.error("key 'answer' is missing or empty; give the answer")
        return Example(
            id=example_id(row, location, ("question_id", "id")),
            question=question_of(row, location).strip(),
            answers=(answer,),
            metadata={key: value for key, value in row.items() if key not in _READ}
            | {"supporting": list(distinct(strings(row.get("hard_positive_idx"), location, "hard_positive_idx")))},
        )


FORMATS.register("open_wikitable")(OpenWikiTable())
