"""LiveVQA's benchmark.json (fumingyang2004/LIVEVQA; arXiv 2504.05288): two multiple-choice questions about each picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from routerl_jax.core.rows import RowLocation
from routerl_jax.core.types import Example
from routerl_jax.data.formats.format import (
    FORMATS,
    QuestionFormat,
    Row,
    distinct,
    example_id,
    image_urls,
    images_of,
    question_of,
    strings,
)

_LEVELS = ("level1", "level2")
_FOLDERS = ("images", "News_imgs", "Paper_images", "Video_images")
_READ = ("question", "question_type", "options", "Ground_Truth", "Ground_Truth_List", "img_path", "img_url")


class LiveVQA(QuestionFormat):
    """`{id, img_path, level1_qa: {question, question_type, options, Ground_Truth: "B", Ground_Truth_List: [..], img_path,
    img_url}, level2_qa: {..}, source, time}`. Level 1 asks what the picture shows; level 2 needs a search.

    The ids are `ID/level1` and `ID/level2`. Accepted answers are `Ground_Truth_List`. The policy sees no options. Metadata:
    `options`, the letter of the right one (`correct_option`), `level`, and `type` (`question_type`). Pictures are beside the
    file, in `images`, or in the folders of the repository (`News_imgs`, `Paper_images`, `Video_images`).
    """

    def matches(self, row: Row) -> bool:
        return any(f"{level}_qa" in row for level in _LEVELS)

    def parts(self, row: Row, location: RowLocation) -> Sequence[Row]:
        parts = [{**row, "level": level} for level in _LEVELS if row.get(f"{level}_qa")]
        if not parts:
            raise location.error("no question: keys 'level1_qa' and 'level2_qa' are empty")
        return parts

    def example(self, row: Row, location: RowLocation) -> Example | None:
        level = row["level"]
        key = f"{level}_qa"
        fields = row[key]
        if not isinstance(fields, Mapping):
            raise location.error(f"key {key!r} must be an object, found {str(fields)[:80]!r}")
        question = question_of(fields, location)
        answers = distinct(strings(fields.get("Ground_Truth_List"), location, f"{key}.Ground_Truth_List"))
        if not answers:
            raise location.error(f"key '{key}.Ground_Truth_List' is missing or empty")
        named = {"img_path": fields.get("img_path") or row.get("img_path")}
        other_fields = {
            key: value
            for key, value in row.items()
            if key not in ("id", "img_path", *(f"{level}_qa" for level in _LEVELS))
        }
        other_fields |= {key: value for key, value in fields.items() if key not in _READ}
        metadata = {
            "type": fields.get("question_type"),
            "options": fields.get("options"),
            "correct_option": fields.get("Ground_Truth"),
        }
        urls = image_urls({"image_urls": fields.get("img_url") or None, "image": named["img_path"]}, location)
        return Example(
            id=f"{example_id(row, location)}/{level}",
            question=question.strip(),
            answers=answers,
            images=images_of(named, location, "img_path", _FOLDERS),
            metadata=other_fields | {key: value for key, value in metadata.items() if value} | urls,
        )


FORMATS.register("livevqa")(LiveVQA())
