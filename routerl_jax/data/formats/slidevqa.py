"""SlideVQA (nttmdlab-nlp/SlideVQA; arXiv 2301.04883): questions about decks of twenty slides."""

from __future__ import annotations

import re

from routerl_jax.core.rows import RowLocation
from routerl_jax.core.types import Example
from routerl_jax.data.formats.format import (
    ANSWER_KEYS,
    FORMATS,
    QuestionFormat,
    Row,
    answer_key,
    example_id,
    question_of,
)
from routerl_jax.data.formats.paged import document_answers, page_fields, query_type, without

_READ = ("qa_id", "id", "question", *ANSWER_KEYS, "deck_name", "evidence_pages", "image_urls")
_SLIDE = re.compile(r"page_\d+")  # columns on the hub


class SlideVQA(QuestionFormat):
    """`{qa_id, deck_name, deck_url, image_urls, question, answer, arithmetic_expression, evidence_pages: [3], reasoning_type,
    answer_type}`. Rows on the hub also hold their slides (`page_1`, ..). These are the corpus, so they are left out here.

    `metadata`: `document` (the deck), `pages`, `supporting` (formats.paged), `type` (from `reasoning_type`), `page_urls` (the
    slides' `image_urls`), and the other keys of the row.
    """

    def matches(self, row: Row) -> bool:
        return "deck_name" in row and "evidence_pages" in row

    def example(self, row: Row, location: RowLocation) -> Example | None:
        other_fields = {key: value for key, value in without(row, _READ).items() if not _SLIDE.fullmatch(key)}
        key = answer_key(row) or "answer"
        urls = {"page_urls": row["image_urls"]} if row.get("image_urls") else {}
        pages = page_fields(row.get("deck_name"), row.get("evidence_pages"), location, "deck_name", "evidence_pages")
        return Example(
            id=example_id(row, location, ("qa_id", "id")),
            question=question_of(row, location).strip(),
            answers=document_answers(row.get(key), location, key),
            metadata=other_fields | query_type(row.get("reasoning_type")) | urls | pages,
        )


FORMATS.register("slidevqa")(SlideVQA())
