"""Plain rows: FlashRAG's `{id, question, golden_answers, metadata}`, and other rows with a question and its answers.

NQ-open (`{question, answer: [..]}`) and this project's own files have such rows.
"""

from __future__ import annotations

import pathlib

from routerl_jax.core.rows import RowLocation
from routerl_jax.core.types import Example
from routerl_jax.data.formats.format import (
    ANSWER_KEYS,
    FORMATS,
    URL_KEYS,
    QuestionFormat,
    Row,
    distinct,
    example_id,
    image_urls,
    images_of,
    question_of,
    search_kind,
    strings,
    with_metadata,
)
from routerl_jax.data.pictures import picture_called


class FlashRag(QuestionFormat):
    """Plain rows. Keys: `question`; `golden_answers` (or `answers`, `answer`; a string or a list); optionally `id` (or `_id`),
    `answer_aliases`, and `image` or `images`.

    Pictures are paths (beside the file, or in `images` beside it), `data:` URIs or URLs. URLs go to `metadata["image_urls"]`,
    like those under `image_urls` or `image_url`. If a row has an `image_id` and no picture, its picture is
    `images/IMAGE_ID.jpg` (.png, ..) beside the file, if there is one (InfoSeek, WebQA).

    A row without answers is left out if it has `supporting` (gold passages to retrieve); otherwise it is an error. All other
    keys go to `metadata` unchanged, and so do the values under `metadata`. An exception is `format.search_kind`.
    """

    def matches(self, row: Row) -> bool:
        return True

    def example(self, row: Row, location: RowLocation) -> Example | None:
        question = question_of(row, location)
        key = next((key for key in ANSWER_KEYS if row.get(key)), None)
        if key is None and row.get("supporting"):
            return None
        if key is None:
            raise location.error("no answers; give them under 'golden_answers'")
        aliases = row.get("answer_aliases") or []
        if isinstance(aliases, str):
            raise location.error("key 'answer_aliases' must be a list of strings")
        answers = distinct(strings(row[key], location, key))
        if not answers:
            raise location.error(f"key {key!r} holds no answer but blanks")
        images = images_of(row, location) or _known_by_id(row, location)
        urls = image_urls(row, location)
        used_keys = (
            "id",
            "_id",
            "question",
            "answer_aliases",
            key,
            *URL_KEYS,
            *(("image", "images") if images else ()),
        )
        other_fields = {name: value for name, value in row.items() if name not in used_keys}
        return Example(
            id=example_id(row, location),
            question=question,
            answers=distinct(answers, strings(aliases, location, "answer_aliases")),
            images=images,
            metadata=search_kind(with_metadata(other_fields)) | urls,
        )


def _known_by_id(row: Row, location: RowLocation) -> tuple[pathlib.Path, ...]:
    path = picture_called(str(row["image_id"]), location) if row.get("image_id") else None
    return () if path is None else (path,)


FORMATS.register("flashrag")(FlashRag())
