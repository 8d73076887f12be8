"""Recorded rounds: what a policy wrote and what its tools gave back, from wherever a trace comes.

Rows of rounds (`read_rounds`), as JSON lines:

    {"id": "fvqa_train_37", "question": "..", "golden_answers": ["Azores"], "images": ["images/37.jpg"], "rounds": [
      {"text": "<reason>..</reason><search><img></search>", "tool": "image_search", "observation": "1. ..", "error": null},
      {"text": "<reason>..</reason><answer>Azores</answer>"}]}

`text` is what was written, to the letter. `tool` is the trace's own name of the tool that was called, "" (the default) where
none was. `observation` is what the tool found, before a recipe frames it, "" (the default) where it found nothing. `passages`
are the ids of what it showed, [] (the default) where that is not told. `error` says why a call failed, null (the default) where
none did. The other keys of a row are those of a file of questions in any format (data.formats), which the keys decide: those of
`flashrag`, as above, or `doc_id` and `evidence_pages`, .. Pictures are beside the file.

Conversations of supervised training files (`read_messages`). Replies of tools, also pictures, are messages of the user:

    {"messages": [{"role": "user", "content": "..Question: Which mill is blue?"}, {"role": "assistant", "content":
      "<think>..</think><search>blue mill</search>"}, {"role": "user", "content": "<image>"}, {"role": "assistant", ..}],
     "images": ["pages/mills_3.jpg"]}

This is LLaMA-Factory's schema. VRAG-RL released its examples in it (arXiv 2505.22019). Each `<image>` in a user's message
stands for the next of `images`: paths (beside the file, or in `images` beside it) or `data:` URIs. A row may have
`frame_pixels`: the [least, most] pixels of pictures, as the author of the boxes saw them. With [] boxes are not rescaled.
"""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from absl import logging

from routerl_jax.core.files import write_json_lines
from routerl_jax.core.rows import RowLocation, read_rows
from routerl_jax.core.types import Example, Observation, Shown
from routerl_jax.data.formats.format import Row, answer_key, distinct, example_id, images_of, strings, unpacked_row
from routerl_jax.data.formats.known import format_of
from routerl_jax.data.formats.verl import PICTURE, question_in_prompt
from routerl_jax.data.pictures import MissingPictureError, picture_name

_KEYS = ("text", "tool", "observation", "passages", "error")  # of a round
_ROLES = ("system", "user", "assistant")  # of messages


@dataclasses.dataclass(frozen=True, kw_only=True)
class Round:
    """A text of the policy and its result: the tool that was called ("": none), what the tool found, why it failed.

    Attributes:
      passages: ids of the passages that the observation shows, in order.
      images: the observation's pictures, in the forms of `Example.images`, one for each mark `<image>`. Rows of rounds
        have none.
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


def read_messages(path: str | pathlib.Path, *, pictures: bool = False) -> Iterator[tuple[RowLocation, RecordedRounds]]:
    """The rows of a file (.jsonl or .json, may be compressed), located: a question and the rounds of an attempt at it.

    The question is `question`, or the text after the last "Question:" of the first user message, or that whole message if it is
    short. Instructions around it, and a system message, belong to another agent and are left out. The accepted answers are
    those of the row, if it has any.

    Args:
      pictures: leave out rows without a readable picture, and log how many.

    Raises:
      ValueError: while reading: names file, row and key.
    """
    left_out = count = 0
    for location, row in read_rows(path):
        try:
            recorded = _recorded(row, location)
        except MissingPictureError:
            if not pictures:
                raise
            recorded = None
        if recorded is None or (pictures and not row.get("images")):
            left_out += 1
            continue
        count += 1
        yield location, recorded
    if left_out:
        logging.warning("%s: %d of %d rows have no picture and are left out", path, left_out, left_out + count)


def message_row(recorded: RecordedRounds, name: Callable[[Any], str], system: str = "") -> dict[str, Any]:
    """A row that `read_messages` reads as the same question and rounds. A row has no field for tools and errors. The text
    after the last round is left out.

    Args:
      name: gives the name of a picture in the row.
      system: a system message before the others, for readers without a prompt of their own.

    Raises:
      ValueError: a picture has no name.
    """
    example = recorded.example
    question = PICTURE * len(example.images) + f"Question: {example.question.replace(PICTURE, '')}"
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": question})
    images = list(example.images)
    for number, item in enumerate(recorded.rounds, 1):
        messages.append({"role": "assistant", "content": item.text})
        if number < len(recorded.rounds):
            messages.append({"role": "user", "content": item.observation})
            images += item.images
    names = [name(image) for image in images]
    if not all(names):
        raise ValueError(f"question {example.id!r}: picture {names.index('') + 1} can't be written to a file")
    row = {
        "id": example.id,
        "question": example.question,
        "golden_answers": list(example.answers),
        "messages": messages,
        "images": names,
    }
    return row if recorded.frame_pixels is None else {**row, "frame_pixels": list(recorded.frame_pixels)}


def _recorded(row: Row, location: RowLocation) -> RecordedRounds:
    first, *replies = contents = _contents(row, location)
    images = images_of({"images": row.get("images") or []}, location, "images")
    marks = [content.count(PICTURE) for content in contents[::2]]
    if sum(marks) != len(images):
        raise location.error(
            f"key 'messages': users' messages have {sum(marks)} marks {PICTURE}, and 'images' {len(images)} pictures; give one "
            "for each mark"
        )
    ends = [sum(marks[:i]) for i in range(len(marks) + 1)]
    of_message = [images[start:end] for start, end in itertools.pairwise(ends)]
    question = row.get("question")
    answered = answer_key(row)
    answers = strings(row[answered], location, answered) if answered else []
    example = Example(
        id=example_id(row, location),
        question=question
        if isinstance(question, str) and question
        else question_in_prompt(first, location, "messages"),
        answers=distinct(answers),
        images=of_message[0],
    )
    observations = [*replies[1::2], ""]
    rounds = [
        Round(text=text, observation=observation, images=pictures)
        for text, observation, pictures in zip(replies[::2], observations, [*of_message[1:], ()], strict=True)
    ]
    return RecordedRounds(example=example, rounds=tuple(rounds), frame_pixels=_frame_pixels(row, location))


def _frame_pixels(row: Row, location: RowLocation) -> tuple[int, ...] | None:
    match row.get("frame_pixels"):
        case None:
            return None
        case []:
            return ()
        case [int(least), int(most)] if 0 < least <= most:
            return least, most
        case other:
            expected = "expected [least, most] numbers of pixels, or [] for boxes that stay as they are"
            raise location.error(f"key 'frame_pixels': {expected}; found {str(other)[:80]!r}")


def _contents(row: Row, location: RowLocation) -> list[str]:
    """The messages of user and assistant, in turns. The first is a user's, the last the assistant's."""
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        raise location.error("key 'messages' must be a list of {role, content}, and not empty")
    pairs: list[tuple[str, str]] = []
    for number, message in enumerate(messages, 1):
        role, content = (message.get("role"), message.get("content")) if isinstance(message, Mapping) else (None, None)
        if role not in _ROLES or not isinstance(content, str):
            raise location.error(
                f"key 'messages', message {number}: expected {{role, content}} with one of {', '.join(_ROLES)} and a text, "
                f"found {str(message)[:80]!r}"
            )
        pairs.append((role, content))
    before = int(pairs[0][0] == "system")
    pairs = pairs[before:]
    for i, (role, content) in enumerate(pairs):
        where = f"key 'messages', message {1 + before + i}"
        expected = _ROLES[1 + i % 2]
        if role != expected:
            raise location.error(f"{where}: expected the {expected}'s, found the {role}'s")
        if role == "assistant" and (PICTURE in content or not content.strip()):
            fault = f"holds {PICTURE}, and a policy writes text" if content.strip() else "is empty"
            raise location.error(f"{where}: the assistant's {fault}")
    if not pairs or pairs[-1][0] != "assistant":
        raise location.error(
            "key 'messages': the last one must be the assistant's, from whom is learnt; leave out what follows"
        )
    return [content for _, content in pairs]
