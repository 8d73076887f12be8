"""Questions about pictures: MMSearch, LiveVQA, InfoSeek, SimpleVQA and Dyn-VQA."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from routerl_jax.core.rows import RowLocation
from routerl_jax.core.types import Example
from routerl_jax.data.formats.format import (
    ANSWER_KEYS,
    URL_KEYS,
    QuestionFormat,
    Row,
    answer_key,
    distinct,
    example_id,
    image_urls,
    images_of,
    question_of,
    strings,
)
from routerl_jax.data.formats.text import FlashRag
from routerl_jax.data.pictures import picture_called

_LEVELS = ("level1", "level2")  # of LiveVQA
_QUERIES = ("golden_query", "gloden_query")  # as files of Dyn-VQA before 202502 spell it


class MMSearch(QuestionFormat):
    """MMSearch's end-to-end rows (CaraJ7/MMSearch; arXiv 2409.12959): `{sample_id, query, query_image, image_search_result,
    area, subfield, timestamp, gt_requery, gt_answer, alternative_gt_answers}`, and other rows with the same keys.

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
        used_keys = ("sample_id", "query", "query_image", "image_search_result", "gt_answer", "alternative_gt_answers")
        metadata: dict[str, Any] = {
            key: value
            for key, value in row.items()
            if key not in (*used_keys, "gt_requery", *URL_KEYS)
            and not (isinstance(value, Mapping) and "bytes" in value)
        }
        if row.get("gt_requery"):
            metadata["golden_query"] = row["gt_requery"]
        return Example(
            id=example_id(row, location, ("sample_id", "id")),
            question=question.strip(),
            answers=distinct(answers, aliases),
            images=images_of({"query_image": picture}, location, "query_image", ("images", "image")),
            metadata=metadata | image_urls({**row, "image": picture}, location),
        )


class LiveVQA(QuestionFormat):
    """LiveVQA's benchmark.json (fumingyang2004/LIVEVQA; arXiv 2504.05288), two multiple-choice questions about each picture:
    `{id, img_path, level1_qa: {question, question_type, options, Ground_Truth: "B", Ground_Truth_List: [..], img_path,
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
        used_keys = ("question", "question_type", "options", "Ground_Truth", "Ground_Truth_List", "img_path", "img_url")
        other_fields |= {key: value for key, value in fields.items() if key not in used_keys}
        metadata = {
            "type": fields.get("question_type"),
            "options": fields.get("options"),
            "correct_option": fields.get("Ground_Truth"),
        }
        folders = ("images", "News_imgs", "Paper_images", "Video_images")
        urls = image_urls({"image_urls": fields.get("img_url") or None, "image": named["img_path"]}, location)
        return Example(
            id=f"{example_id(row, location)}/{level}",
            question=question.strip(),
            answers=answers,
            images=images_of(named, location, "img_path", folders),
            metadata=other_fields | {key: value for key, value in metadata.items() if value} | urls,
        )


class InfoSeek(FlashRag):
    """InfoSeek: plain rows (`flashrag`), `{data_id, image_id, question, answer, answer_eval}`. R1-Router evaluates on a
    thousand.

    `answer_eval` has the answers that the data set's scorer accepts: a list of strings (accepted answers) or of `{wikidata,
    range: [low, high]}`. The ranges go to `metadata["answer_ranges"]` (rewards.metrics). Pictures are those of OVEN:
    `images/IMAGE_ID.jpg` beside the file, or paths under `image`.
    """

    def matches(self, row: Row) -> bool:
        return "answer_eval" in row

    def example(self, row: Row, location: RowLocation) -> Example | None:
        accepted = row.get("answer_eval") or []
        accepted = accepted if isinstance(accepted, list) else [accepted]
        other_fields = {key: value for key, value in row.items() if key != "answer_eval"}
        example = super().example({"id": row.get("data_id"), **other_fields}, location)
        if example is None:
            return None
        ranges = [_range(item, location) for item in accepted if isinstance(item, Mapping)]
        texts = strings([item for item in accepted if not isinstance(item, Mapping)], location, "answer_eval")
        metadata = {**example.metadata, "answer_ranges": ranges} if ranges else example.metadata
        return dataclasses.replace(example, answers=distinct(example.answers, texts), metadata=metadata)


def _range(item: Mapping, location: RowLocation) -> list[float]:
    ends = item.get("range")
    if (
        isinstance(ends, list)
        and len(ends) == 2
        and all(isinstance(end, int | float) for end in ends)
        and ends[0] <= ends[1]
    ):
        return [float(end) for end in ends]
    raise location.error(f"key 'answer_eval' must hold strings or {{range: [low, high]}}, found {str(item)[:80]}")


class SimpleVQA(FlashRag):
    """SimpleVQA (m-a-p/SimpleVQA; arXiv 2502.13059), Chinese and English: plain rows (`flashrag`) `{data_id, image,
    image_description, language, question, answer, original_category, source, atomic_question, atomic_fact, vqa_category}`.

    `image` is base64 without the head of a `data:` URI. Bytes of a column, and paths (which have a dot), are read too. The keys
    and the base64 are taken from public readers; the file was not available. All other keys are metadata.
    """

    def matches(self, row: Row) -> bool:
        own_keys = ("atomic_question", "atomic_fact", "vqa_category", "original_category")
        return "data_id" in row and any(key in row for key in own_keys)

    def example(self, row: Row, location: RowLocation) -> Example | None:
        picture = row.get("image")
        other_fields = {key: value for key, value in row.items() if key not in ("data_id", "image")}
        if not isinstance(picture, str) or "." in picture or picture.startswith("data:"):
            return super().example({"id": row["data_id"], **other_fields, "image": picture}, location)
        from routerl_jax.models.images import image_bytes  # imports jax, which is slow

        uri = f"data:;base64,{''.join(picture.split())}" if picture else None
        example = super().example({"id": row["data_id"], **other_fields, "image": uri}, location)
        return example and dataclasses.replace(example, images=tuple(map(image_bytes, example.images)))


class DynVQA(FlashRag):
    """Dyn-VQA (Alibaba-NLP/OmniSearch; arXiv 2411.02937), questions whose answers change, about pictures on the web: plain rows
    (`flashrag`) `{image_url, question, question_id, answer: [..], golden_query}`, as in DynVQA_en.202502.jsonl.

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
