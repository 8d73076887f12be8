"""Rows that verl trains on (parquet): Search-R1's nq_hotpotqa_train, RouteRAG's RL set, and sets of the same form; with the
columns of FVQA and of VRAG-RL."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from routerl_jax.core.rows import RowLocation
from routerl_jax.core.types import Example, Passage
from routerl_jax.data.formats.format import (
    URL_KEYS,
    QuestionFormat,
    Row,
    distinct,
    image_urls,
    images_of,
    search_kind,
    strings,
    unpacked,
    with_metadata,
)
from routerl_jax.data.formats.pages import INFO_KEYS, info_fields, without
from routerl_jax.data.formats.text import HotpotQA, Musique, TwoWiki

T = TypeVar("T")
PICTURE = "<image>"  # the mark of a picture in the prompts of training files
_MARK = "Question:"
_READ = ("prompt", "reward_model", "extra_info", "question", "id", "golden_answers", "image", "images", *URL_KEYS)
_WITH_PASSAGES = {"musique": Musique(), "2wikimultihopqa": TwoWiki(), "hotpotqa": HotpotQA()}


class Verl(QuestionFormat):
    """`{data_source, prompt: [{role, content}], reward_model: {ground_truth: {target: [..]}}, extra_info: {split, index}}`.

    The question is `question`, or `extra_info.question`, or the text after the last "Question:" of the last user message
    (Search-R1's and RouteRAG's prompts end like this). The instructions belong to another agent and are dropped. The id is
    `data_source/split/index` (or `data_source/id`), because Search-R1 numbers each data set of a file from 0. `images` are
    pictures (format.images_of); URLs go to `metadata["image_urls"]`. Other columns, and the values under `metadata`, are
    metadata. If they are the columns of a known data set (`context` and `supporting_facts`, ..), its format reads them.
    """

    def matches(self, row: Row) -> bool:
        return "reward_model" in row

    def example(self, row: Row, location: RowLocation) -> Example | None:
        info = _mapping(row.get("extra_info"))
        source = str(row.get("data_source") or "")
        example = Example(
            id=_id(row, info, source, location),
            question=_question(row, info, location),
            answers=_answers(row, location),
            images=images_of(row, location),
        )
        columns = _columns(row)
        plain = {"id": example.id, "question": example.question, "golden_answers": list(example.answers)}
        as_they_are = dataclasses.replace(example, metadata=columns)
        original = _of_data_set(columns | plain, lambda form, fields: form.example(fields, location), as_they_are)
        if original is None:  # the row has no answer, according to the data set
            return None
        metadata = dict(original.metadata)
        metadata |= {key: _parsed(value) for key, value in info.items() if value is not None and key != "question"}
        return dataclasses.replace(example, metadata=metadata | image_urls(row, location))

    def passages(self, row: Row, location: RowLocation) -> list[Passage]:
        fields = _columns(row) | {"golden_answers": []}
        return _of_data_set(fields, lambda form, fields: form.passages(fields, location), [])


def _columns(row: Row) -> dict[str, Any]:
    """The columns of a row that verl doesn't read, joined with the values under FlashRAG's `metadata`."""
    return {key: _parsed(value) for key, value in with_metadata(row).items() if key not in _READ and value is not None}


def _of_data_set(fields: Mapping[str, Any], read: Callable[[QuestionFormat, Mapping[str, Any]], T], otherwise: T) -> T:
    """The result of `read` for the format whose gold passages the columns hold. `otherwise` if there is no such format, or
    if the columns only have the same names. Raises ValueError if `data_source` names that data set and the columns can't be
    read."""
    for name, form in _WITH_PASSAGES.items():
        if form.matches(fields):
            try:
                return read(form, fields)
            except ValueError:
                if name in str(fields.get("data_source")).lower():
                    raise
                return otherwise
    return otherwise


def _question(row: Row, info: Mapping[str, Any], location: RowLocation) -> str:
    for value in (row.get("question"), info.get("question")):
        if isinstance(value, str) and (text := value.replace(PICTURE, "").strip()):
            return text
    prompt = row.get("prompt")
    messages = [message for message in prompt if isinstance(message, Mapping)] if isinstance(prompt, list) else []
    users = [message.get("content") for message in messages if message.get("role") == "user"]
    if not users or not isinstance(users[-1], str):
        raise location.error(
            "no question: neither 'question' nor 'extra_info.question', and 'prompt' has no user message"
        )
    return question_in_prompt(users[-1], location, "prompt")


def question_in_prompt(prompt: str, location: RowLocation, key: str) -> str:
    """The text after the last "Question:", or else the whole prompt if it is short. Marks of pictures are left out.

    Raises:
      ValueError: there is no question, or the end of the instructions is not marked; names the key.
    """
    text = prompt.replace(PICTURE, "")
    _, mark, question = text.rpartition(_MARK)
    if not mark and len(text.split()) > 100:
        raise location.error(
            f"the prompt has no {_MARK!r} that says where its instructions end; add a column 'question' with the question alone"
        )
    question = question if mark else text
    if not question.strip():
        raise location.error(f"the question in {key!r} is empty")
    return question.strip()


def _answers(row: Row, location: RowLocation) -> tuple[str, ...]:
    truth = _parsed(_mapping(row.get("reward_model")).get("ground_truth"), "{")
    target = truth.get("target") if isinstance(truth, Mapping) else truth
    if target is None:
        raise location.error("no answers: 'reward_model.ground_truth.target' is missing")
    answers = distinct(strings(target, location, "reward_model.ground_truth.target"))
    if not answers:
        raise location.error("'reward_model.ground_truth.target' holds no answer")
    return answers


def _id(row: Row, info: Mapping[str, Any], source: str, location: RowLocation) -> str:
    parts = [source] if source else []
    if row.get("id") is not None:
        return "/".join([*parts, str(row["id"])])
    if info.get("index") is not None:
        split = [str(info["split"])] if info.get("split") else []
        return "/".join([*parts, *split, str(info["index"])])
    return "/".join([*parts, str(location.number)])


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _parsed(value: Any, begins: str = "[{") -> Any:
    """The list or object in a string that begins so: RouteRAG, and others for one schema of all rows, keep them as JSON."""
    if isinstance(value, str) and value.strip().lstrip('"')[:1] in tuple(begins):
        with contextlib.suppress(ValueError):
            return unpacked(value)
    return value


class Fvqa(Verl):
    """FVQA, MMSearch-R1's training and test set (lmms-lab/FVQA; arXiv 2506.20670): `{prompt: [{content: question, role: user}],
    images: [{bytes, path}], reward_model: {ground_truth, candidate_answers: "[..]", style}, data_source, image_urls, data_id,
    category}`. mini_data.pq of MMSearch-R1's repository has no `data_id` and no `category`. `image_urls` is null there and in
    the released sets, as far as public readers show them.

    The accepted answers are `ground_truth` and then the aliases, which are JSON inside of a string. The id is `data_id`, else
    verl's. `category` becomes `metadata["kind"]` where it is search_free or search_required.
    """

    def matches(self, row: Row) -> bool:
        reward = row.get("reward_model")
        return isinstance(reward, Mapping) and "candidate_answers" in reward

    def example(self, row: Row, location: RowLocation) -> Example | None:
        example = super().example(row, location)
        if example is None:
            return None
        named, key = row.get("data_id"), "reward_model.candidate_answers"
        return dataclasses.replace(
            example,
            id=example.id if named is None else str(named),
            answers=distinct(
                example.answers, strings(row["reward_model"]["candidate_answers"], location, key, listed=True)
            ),
            metadata=search_kind({key: value for key, value in example.metadata.items() if key != "data_id"}),
        )


class VragRows(Verl):
    """The rows that VRAG-RL's converter makes of ViDoSeek's: verl's rows with `extra_info: {file_name, reference_page,
    content_type, reason_type}`. `content_type` holds the source types, joined by `####`; "Nan" means none."""

    def matches(self, row: Row) -> bool:
        info = row.get("extra_info")
        return "reward_model" in row and isinstance(info, Mapping) and "reference_page" in info

    def example(self, row: Row, location: RowLocation) -> Example | None:
        info = {key: value for key, value in row["extra_info"].items() if value != "Nan"}
        content, reason = (info.pop(f"{name}_type", None) for name in ("content", "reason"))
        example = super().example({**row, "extra_info": info}, location)
        if example is None:
            return None
        fields: dict[str, Any] = {key: value for key, value in info.items() if key in INFO_KEYS}
        if isinstance(content, str) and not content.endswith("Span"):  # otherwise it is the form of the answer
            fields["source_type"] = content.split("####")
        kind = "doc_type" if example.metadata.get("data_source") == "mmlongdoc" else "query_type"
        metadata = without(example.metadata, (*INFO_KEYS, "answer", "ability"))
        return dataclasses.replace(
            example, metadata=metadata | info_fields({**fields, kind: reason}, location, "extra_info")
        )
