"""Recorded rounds: what a policy wrote and what its tools gave back, from wherever a trace comes, as JSON lines.

    {"id": "fvqa_train_37", "question": "..", "golden_answers": ["Azores"], "images": ["images/37.jpg"], "rounds": [
      {"text": "<reason>..</reason><search><img></search>", "tool": "image_search", "observation": "1. ..", "error": null},
      {"text": "<reason>..</reason><answer>Azores</answer>"}]}

`text` is what was written, to the letter. `tool` is the trace's own name of the tool that was called, "" (the default) where
none was. `observation` is what the tool found, before a recipe frames it, "" (the default) where it found nothing. `passages`
are the ids of what it showed, [] (the default) where that is not told. `error` says why a call failed, null (the default) where
none did. The other keys of a row are those of a file of questions in any format (data.formats), which the keys decide: those of
`flashrag`, as above, or `doc_id` and `evidence_pages`, .. Pictures are beside the file.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

from routerl_jax.core.files import write_json_lines
from routerl_jax.core.rows import RowLocation, read_rows
from routerl_jax.core.types import Example, Observation, Shown
from routerl_jax.data.formats.format import images_of, unpacked_row
from routerl_jax.data.formats.known import format_of
from routerl_jax.data.formats.verl import PICTURE
from routerl_jax.data.pictures import picture_name

_KEYS = ("text", "tool", "observation", "passages", "error")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Round:
    """A text of the policy and its result: the tool that was called ("": none), what the tool found, why it failed.

    Attributes:
      passages: ids of the passages that the observation shows, in order.
      images: the observation's pictures, in the forms of `Example.images`, one for each mark `<image>`. The rows that this
        module reads have none.
    """

    text: str
    tool: str = ""
    observation: str = ""
    error: str | None = None
    passages: tuple[str, ...] = ()
    images: tuple[Any, ...] = ()

    @property
    def pieces(self) -> Observation:
        """The observation with its pictures at their marks."""
        if not self.images:
            return self.observation
        first, *others = self.observation.split(PICTURE)
        parts: list[str | Shown] = [first]
        for image, text in zip(self.images, others, strict=True):
            parts += [Shown(image=image), text]
        return [part for part in parts if part != ""]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordedRounds:
    """A question and the rounds of one attempt at it, in order.

    Attributes:
      frame_pixels: least and most pixels of a picture, as the author of the boxes saw it. Empty if the boxes are a policy's
        own; they are not rescaled. None if it is unknown.
    """

    example: Example
    rounds: tuple[Round, ...]
    frame_pixels: tuple[int, ...] | None = None


def read_rounds(path: str | pathlib.Path) -> Iterator[tuple[RowLocation, RecordedRounds]]:
    """The rows of a file (.jsonl, .json; may be compressed), with their locations.

    Raises:
      ValueError: while reading: names file, row and key.
    """
    for location, row in read_rows(path):
        question_row = {key: value for key, value in row.items() if key != "rounds" and (key != "images" or value)}
        question_row = unpacked_row(question_row)
        example = format_of(question_row).example(question_row, location)
        if example is None:
            raise location.error("no answers; give them under 'golden_answers'")
        if not example.images:  # of a format whose own files hold no pictures
            example = dataclasses.replace(example, images=images_of(question_row, location))
        items = row.get("rounds")
        if not isinstance(items, list) or not items:
            raise location.error("key 'rounds' must be a list of {text, tool, observation, error}, and not empty")
        rounds = tuple(_round(item, number, location) for number, item in enumerate(items, 1))
        yield location, RecordedRounds(example=example, rounds=rounds)


def write_rounds(path: str | pathlib.Path, recorded: Iterable[RecordedRounds]) -> None:
    """Writes a file for `read_rounds`, atomically. Pictures are named by their absolute paths.

    Raises:
      ValueError: a picture has no file, or an observation shows a picture.
    """
    write_json_lines(pathlib.Path(path), map(_row, recorded))


def _round(item: Any, number: int, location: RowLocation) -> Round:
    if not isinstance(item, dict):
        raise location.error(f"key 'rounds', round {number}: expected an object, found {type(item).__name__}")
    if unknown := [key for key in item if key not in _KEYS]:
        raise location.error(f"key 'rounds', round {number}: no key {unknown[0]!r}; there are: {', '.join(_KEYS)}")
    texts = {key: item.get(key) or "" for key in ("tool", "observation")}
    for key, value in {"text": item.get("text"), **texts}.items():
        if not isinstance(value, str):
            raise location.error(f"key 'rounds', round {number}: {key!r} must be a string")
    passages = item.get("passages") or []
    if not isinstance(passages, list) or not all(isinstance(id, str) and id for id in passages):
        raise location.error(
            f"key 'rounds', round {number}: 'passages' must be a list of ids, found {str(passages)[:80]!r}"
        )
    error = item.get("error")
    if error is not None and (not isinstance(error, str) or not error):
        raise location.error(f"key 'rounds', round {number}: 'error' must say why the call failed, or be null")
    tool, observation = texts["tool"], texts["observation"]
    return Round(text=item["text"], tool=tool, observation=observation, error=error, passages=tuple(passages))


def _row(recorded: RecordedRounds) -> dict[str, Any]:
    example = recorded.example
    if any(item.images for item in recorded.rounds):
        raise ValueError(f"question {example.id!r}: a round's observation shows a picture, which rows of rounds can't")
    names = [picture_name(image) for image in example.images]
    if not all(names):
        raise ValueError(
            f"question {example.id!r}: picture {names.index('') + 1} is in memory alone; write it to a file first"
        )
    return {
        "id": example.id,
        "question": example.question,
        "golden_answers": list(example.answers),
        "images": names,
        "rounds": [
            {key: getattr(item, key) for key in _KEYS if key != "passages" or item.passages} for item in recorded.rounds
        ],
        "metadata": dict(example.metadata),
    }
