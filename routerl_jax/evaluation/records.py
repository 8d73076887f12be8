"""Records of episodes as JSON lines: turns, calls, passages and rewards."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from routerl_jax.core.files import write_atomic, write_json_lines
from routerl_jax.core.rows import RowLocation, read_rows
from routerl_jax.core.types import Action, Branch, Call, Episode, Example, Failure, Passage, Shown, Turn, Usage, Verdict
from routerl_jax.data.pictures import picture_name
from routerl_jax.evaluation.metrics import group_fields
from routerl_jax.models.images import encoded_image, image_digest, is_data
from routerl_jax.rewards.metrics import accepted_answers

_PICTURES = "pictures"
_OPTIONAL: dict[str, Any] = {"verdict": Verdict, "usage": Usage, "failure": Failure}  # fields that may be None


class PictureFiles:
    """The pictures of records, as files in `pictures/` of a directory, named by their content. Each is written once."""

    def __init__(self, directory: pathlib.Path) -> None:
        self._directory = directory
        self._names: dict[str, str] = {}

    def name(self, image: Any) -> str:
        """The name of a picture in a record of this directory: its own path, or the path of its file relative to the directory.
        "" if there is no picture, or it can't be read."""
        if isinstance(image, str | os.PathLike) and not is_data(image):
            return picture_name(image)
        try:
            digest = image_digest(image)
            if digest not in self._names:
                content, form = encoded_image(image)
                self._names[digest] = f"{_PICTURES}/{hashlib.sha256(content).hexdigest()[:24]}.{form}"
                path = self._directory / self._names[digest]
                if not path.is_file():
                    write_atomic(path, content, shared=True)
        except ValueError:
            return ""
        return self._names[digest]


def write_records(
    path: pathlib.Path,
    episodes: Sequence[Episode],
    fields_of_each: Sequence[Mapping[str, Any]] | None = None,
    **extra: Any,
) -> None:
    """Writes episodes as JSON lines, and their pictures beside the file.

    Args:
      fields_of_each: further fields of every episode's record, in the episodes' order.
      extra: further fields of all records.
    """
    files = PictureFiles(path.parent)
    own = [{}] * len(episodes) if fields_of_each is None else fields_of_each
    pairs = zip(episodes, own, strict=True)
    write_json_lines(path, (episode_record(episode, files, **fields, **extra) for episode, fields in pairs))


def episode_record(episode: Episode, pictures: PictureFiles | None = None, **extra: Any) -> dict[str, Any]:
    """The record of an episode: all but its token sequences. Of its metadata it has `metrics.GROUPS` and `answerable`; the
    judge's verdict, an endpoint's usage and its failure are included if there are any.

    Args:
      pictures: writes the pictures. Without it, pictures are named by their path or `data:` URI, or "" if they are in memory.
    """
    name = picture_name if pictures is None else pictures.name
    return {
        "id": episode.example.id,
        "sample": episode.sample,
        "question": episode.example.question,
        "images": [name(image) for image in episode.example.images],
        "golden_answers": list(accepted_answers(episode.example, episode.answer)),
        "metadata": group_fields(episode.example.metadata)
        | {key: episode.example.metadata[key] for key in ("answerable",) if key in episode.example.metadata},
        "prediction": episode.answer,
        "prompt": episode.prompt,
        "turns": [turn_record(turn, name) for turn in episode.turns],
        "rewards": episode.rewards,
        "truncated": episode.truncated,
        "branches": [dataclasses.asdict(branch) for branch in episode.branches],
        **{name: dataclasses.asdict(value) for name in _OPTIONAL if (value := getattr(episode, name)) is not None},
        **extra,
    }


def turn_record(turn: Turn, name: Callable[[Any], str]) -> dict[str, Any]:
    """All fields of a turn, with pictures by name (`PictureFiles.name`)."""
    shown = [
        dataclasses.replace(item, image=name(item.image) if item.digest or item.error else "") for item in turn.shown
    ]
    calls = []
    for call in turn.calls:
        # A picture that is a file keeps the path of its knowledge base; one in memory gets a file.
        passages = (
            dataclasses.replace(passage, image=name(passage.image)) if is_data(passage.image) else passage
            for passage in call.passages
        )
        calls.append(dataclasses.replace(call, passages=tuple(passages)))
    return dataclasses.asdict(dataclasses.replace(turn, shown=shown, calls=calls))


def episode_of(record: Mapping[str, Any], location: RowLocation) -> Episode:
    """The episode of a record, without token sequences. Raises ValueError that names the row if it is no record."""
    directory = location.path.parent
    try:
        example = Example(
            id=str(record["id"]),
            question=record["question"],
            answers=tuple(record["golden_answers"]),
            images=tuple(picture_path(directory, image) for image in record["images"]),
            metadata=record.get("metadata", {}),
        )
        return Episode(
            example=example,
            sample=record["sample"],
            answer=record["prediction"],
            turns=[_turn(turn, directory) for turn in record["turns"]],
            sequences=[],
            prompt=record["prompt"],
            truncated=record["truncated"],
            rewards=dict(record["rewards"]),
            branches=tuple(Branch(**branch) for branch in record.get("branches", ())),
            **{name: kind(**record[name]) for name, kind in _OPTIONAL.items() if record.get(name)},
        )
    except (KeyError, TypeError) as error:
        fault = f"key {error} is missing" if isinstance(error, KeyError) else str(error)
        raise location.error(f"no episode as a run or launch.evaluate writes them: {fault}") from error


def _turn(fields: Mapping[str, Any], directory: pathlib.Path) -> Turn:
    def with_picture(item: Mapping[str, Any]) -> dict[str, Any]:
        return {**_tuples(item), "image": picture_path(directory, item.get("image", ""))}

    action = None if fields["action"] is None else Action(**_tuples(fields["action"]))
    calls = [
        Call(**{**_tuples(call), "passages": tuple(Passage(**with_picture(passage)) for passage in call["passages"])})
        for call in fields["calls"]
    ]
    shown = [Shown(**with_picture(item)) for item in fields.get("shown", ())]
    return Turn(**{**fields, "action": action, "calls": calls, "shown": shown})


def _tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}


def picture_path(directory: pathlib.Path, image: str) -> str:
    """The path or URI of a picture that a record in this directory names. Relative paths start at the directory."""
    return str(directory / image) if image.startswith(f"{_PICTURES}/") else image


def read_records(path: pathlib.Path) -> Iterator[dict[str, Any]]:
    """The records of a file, one per line. Raises ValueError like `core.rows.read_rows`."""
    return (record for _, record in read_rows(path, lines=True))
