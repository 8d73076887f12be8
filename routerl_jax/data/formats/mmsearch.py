"""MMSearch's end-to-end rows (CaraJ7/MMSearch; arXiv 2409.12959), and other rows with the same keys."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

from routerl_jax.core.rows import RowLocation
from routerl_jax.core.types import Example
from routerl_jax.data.formats.format import (
    FORMATS,
    URL_KEYS,
    QuestionFormat,
    Row,
    distinct,
    example_id,
    image_urls,
    images_of,
    question_of,
    strings,
)

_FOLDERS = ("images", "image")
_USED = (
    "sample_id",
    "query",
    "query_image",
    "image_search_result",
    "gt_answer",
    "alternative_gt_answers",
    "gt_requery",
)


class MMSearch(QuestionFormat):
    """`{sample_id, query, query_image, image_search_result, area, subfield, timestamp, gt_requery, gt_answer,
    alternative_gt_answers}`.

    `query_image` is null if a question needs no picture. `image_search_result` is a screenshot, and is dropped. `gt_requery`
    becomes `metadata["golden_query"]`. The keys are taken from lmms-eval's and other public readers; the files were not
    available.

    LiveVQA's research preview (ONE-Lab/LiveVQA-Research-Preview, qa.json) has rows `{sample_id, query, query_image,
    gt_answer}`, according to a public reader. They name the picture by its path on another machine; a file with its name is
    searched for in `image` and `images`.
    """

    def matches(self, row: Row) -> bool:
        return "query" in row and "gt_answer" in row

    def example(self, row: Row, location: RowLocation) -> Example | None:
        question = question_of(row, location, "query")
        answers = strings(row["gt_answer"], location, "gt_answer")
        aliases = strings(row.get("alternative_gt_answers"), location, "alternative_gt_answers", listed=True)
        if not distinct(answers):
            raise location.error("key 'gt_answer' is missing or empty")
        picture = row.get("query_image")
        if isinstance(picture, str) and pathlib.PurePosixPath(picture).is_absolute():
            picture = pathlib.PurePosixPath(picture).name
        metadata: dict[str, Any] = {
            key: value
            for key, value in row.items()
            if key not in (*_USED, *URL_KEYS) and not (isinstance(value, Mapping) and "bytes" in value)
        }
        if row.get("gt_requery"):
            metadata["golden_query"] = row["gt_requery"]
        return Example(
            id=example_id(row, location, ("sample_id", "id")),
            question=question.strip(),
            answers=distinct(answers, aliases),
            images=images_of({"query_image": picture}, location, "query_image", _FOLDERS),
            metadata=metadata | image_urls({**row, "image": picture}, location),
        )


FORMATS.register("mmsearch")(MMSearch())
