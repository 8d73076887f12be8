"""Dyn-VQA's rows (Alibaba-NLP/OmniSearch; arXiv 2411.02937): questions whose answers change, about pictures on the web."""

from __future__ import annotations

import dataclasses

from routerl_jax.core.rows import RowLocation
from routerl_jax.core.types import Example
from routerl_jax.data.formats.flashrag import FlashRag
from routerl_jax.data.formats.format import ANSWER_KEYS, FORMATS, Row, answer_key, strings
from routerl_jax.data.pictures import picture_called

_QUERIES = ("golden_query", "gloden_query")  # as files before 202502 spell it


class DynVQA(FlashRag):
    """Plain rows (`flashrag`) `{image_url, question, question_id, answer: [..], golden_query}`, as in DynVQA_en.202502.jsonl.

    Answers are strings, numbers, null and, in some files, lists of these. A row whose answers are all null is left out. Rows
    have only the URL of their picture (`metadata["image_urls"]`). To use the picture, put its path under `image`, or put it at
    `images/QUESTION_ID.jpg` (.png, ..) beside the file.
    """

    def matches(self, row: Row) -> bool:
        return "image_url" in row and any(key in row for key in _QUERIES)

    def example(self, row: Row, location: RowLocation) -> Example | None:
        key = answer_key(row)
        answers = [] if key is None else strings(row[key], location, key)
        if not any(answer.strip() for answer in answers):
            return None
        query = next((row[key] for key in _QUERIES if row.get(key)), None)
        unread = (*ANSWER_KEYS, *_QUERIES, "question_id")
        other_fields = {key: value for key, value in row.items() if key not in unread}
        golden = {"golden_query": query} if query else {}
        example = super().example(
            {"id": row.get("question_id"), **other_fields, "golden_answers": answers, **golden}, location
        )
        if example is None or example.images:
            return example
        picture = picture_called(example.id, location)
        return example if picture is None else dataclasses.replace(example, images=(picture,))


FORMATS.register("dynvqa")(DynVQA())
