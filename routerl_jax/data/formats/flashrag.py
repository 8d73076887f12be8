"""Plain rows: FlashRAG's `{id, question, golden_answers, metadata}`, and other rows with a question and its answers.

NQ-open (`{question, answer: [..]}`) and this project's own files have such rows.
"""

from __future__ import annotations

import pathlib
from typing import Any

from routerl_jax.core.rows import RowLocation
from routerl_jax.core.types import Example
from routerl_jax.data.formats.format import (
    FORMATS,
    URL_KEYS,
    QuestionFormat,
    Row,
    answer_key,
    distinct,
    example_id,
    image_urls,
    images_of,
    question_of,
    search_kind,
    strings,
    with_metadata,
)
from routerl_jax.data.formats.hotpotqa import facts_of
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
        key = answer_key(row)
        if key is None and row.get("supporting"):
            return None
        if key is None:
            raise location.error("no answers; give them under 'golden_answers'")
        aliases = row.get("answer_aliases")
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
            metadata=_checked_gold(search_kind(with_metadata(other_fields)), location) | urls,
        )


# Keys of gold passages in other formats, with what a row needs beside them to be of that format.
_OF_OTHER_FORMATS = {
    "evidence_pages": "'doc_id' (mmlongbench_doc) or 'deck_name' (slidevqa)",
    "reference_page": "'meta_info' with 'file_name' around it, and 'query' (vidoseek)",
    "hard_positive_idx": "'original_table_id' (open_wikitable)",
    "answer-node": "'table_id' and 'question_id' (hybridqa)",
}
_LISTS = ("supporting_passages", "supporting_facts", "decomposition", "evidence_triples")


def _checked_gold(metadata: dict[str, Any], location: RowLocation) -> dict[str, Any]:
    """The metadata, with the names of gold passages as lists. Raises ValueError for what no score would understand."""
    for key, needed in _OF_OTHER_FORMATS.items():
        if metadata.get(key):
            raise location.error(
                f"key {key!r} names gold passages, but is not read without {needed}; add that, or give the ids of the "
                "passages under 'supporting'"
            )
    for key in ("supporting", "supporting_titles"):
        if metadata.get(key):
            metadata[key] = strings(metadata[key], location, key, listed=True)
    if isinstance(facts := metadata.get("supporting_facts"), dict | str):  # as on the hub
        metadata["supporting_facts"] = facts_of(facts, location)
    for key in _LISTS:
        if metadata.get(key) and not isinstance(metadata[key], list):
            raise location.error(f"key {key!r} must be a list, found {str(metadata[key])[:80]!r}")
    return metadata


def _known_by_id(row: Row, location: RowLocation) -> tuple[pathlib.Path, ...]:
    path = picture_called(str(row["image_id"]), location) if row.get("image_id") else None
    return () if path is None else (path,)


FORMATS.register("flashrag")(FlashRag())
