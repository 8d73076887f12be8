"""MMLongBench-Doc (mayubo2333/MMLongBench-Doc; arXiv 2407.01523): questions about long documents, some without an answer."""

from __future__ import annotations

from routerl_jax.core.rows import RowLocation
from routerl_jax.core.types import Example
from routerl_jax.data.formats.format import (
    ANSWER_KEYS,
    FORMATS,
    QuestionFormat,
    Row,
    answer_key,
    distinct,
    example_id,
    question_of,
    strings,
)
from routerl_jax.data.formats.paged import document_answers, page_fields, query_type, source_types, without

UNANSWERABLE = "Not answerable"  # the accepted answer of a question that the document doesn't answer
_FORMATS = ("Str", "Int", "Float", "List", "None")
_READ = ("id", "question", *ANSWER_KEYS, "doc_id", "evidence_pages", "evidence_sources", "supporting", "type")


class MMLongBenchDoc(QuestionFormat):
    """`{doc_id, doc_type, question, answer, evidence_pages: "[3, 5]", evidence_sources: "['Chart']", answer_format}`. The lists
    may also be JSON lists, and a row may have its own `id`, `golden_answers` and `supporting`.

    `metadata`: `document`, `pages`, `supporting` (formats.paged; the row's own values have precedence), `source_type` (a list,
    in the words of `paged.SOURCE_TYPES`), `answerable`, `answer_format`, `doc_type`. An answer that is a list is joined to one
    text, in order.
    """

    def matches(self, row: Row) -> bool:
        return "doc_id" in row and "evidence_pages" in row

    def example(self, row: Row, location: RowLocation) -> Example | None:
        key = answer_key(row) or "answer"
        kind = row.get("type")
        form = row.get("answer_format") or (kind if kind in _FORMATS else None)
        answers = document_answers(row.get(key), location, key, whole=form == "List" or isinstance(row.get(key), str))
        pages = page_fields(row.get("doc_id"), row.get("evidence_pages"), location, "doc_id", "evidence_pages")
        if named := distinct(strings(row.get("supporting"), location, "supporting", listed=True)):
            pages["supporting"] = list(named)
        kind_fields = query_type(kind) if kind not in _FORMATS else {}
        sources = row.get("evidence_sources") or (kind if isinstance(kind, list) else None)
        return Example(
            id=example_id(row, location),
            question=question_of(row, location).strip(),
            answers=answers,
            metadata={
                **without(row, _READ),
                **({"answer_format": form} if form else {}),
                **kind_fields,
                **source_types(sources, location, "evidence_sources"),
                **pages,
                "answerable": UNANSWERABLE not in answers,
            },
        )


FORMATS.register("mmlongbench_doc")(MMLongBenchDoc())
