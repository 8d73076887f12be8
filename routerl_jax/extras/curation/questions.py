"""The questions of a job: reading them, writing them as rows, and drawing samples by kind."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from routerl_jax.core.config import naming
from routerl_jax.core.files import write_atomic
from routerl_jax.core.types import Example
from routerl_jax.data.pictures import picture_name
from routerl_jax.data.readers import in_turns, open_dataset, short_names
from routerl_jax.data.trajectories import golden_step
from routerl_jax.models.images import encoded_image, image_digest, is_data

IMAGES = "images"  # directory beside a file of questions, with their pictures
Counts = Mapping[str, int | None]  # number of questions of a kind; None: all


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """A question and the data set that it counts for."""

    dataset: str
    example: Example


def all_questions(data: str, seed: int) -> list[Question]:
    """All questions. Data sets take turns; the questions of each are shuffled by the seed.

    Args:
      data: config.data, as `open_dataset` takes it.

    Raises:
      ValueError: the data has golden steps.
    """
    with naming("config.data"):
        source = open_dataset(data)
    names = short_names([part.strip() for part in data.split(",")])
    by_dataset: dict[str, list[Question]] = {}
    for example in (source[i] for i in range(len(source))):
        if golden_step(example) is not None:
            raise ValueError(f"config.data={data!r}: these are trajectories already; name questions")
        dataset = str(example.metadata.get("dataset") or example.metadata.get("data_source") or names[0])
        example = dataclasses.replace(example, metadata={**example.metadata, "dataset": dataset})
        by_dataset.setdefault(dataset, []).append(Question(dataset=dataset, example=example))
    shuffled = []
    for number, items in enumerate(by_dataset.values()):
        order = np.random.default_rng([seed, number]).permutation(len(items))
        shuffled.append([items[i] for i in order])
    return [shuffled[number][item] for number, item in in_turns([len(items) for items in shuffled]).tolist()]


def within(questions: Sequence[Question], most: int) -> list[Question]:
    """The first `most` questions of each data set; -1: all."""
    counts: collections.Counter[str] = collections.Counter()
    selected = []
    for question in questions:
        counts[question.dataset] += 1
        if most == -1 or counts[question.dataset] <= most:
            selected.append(question)
    return selected


def counts_of(parts: Sequence[str], key: str) -> dict[str, int | None]:
    """`["medium:350", "hard:all"]` as `{"medium": 350, "hard": None}`.

    Args:
      key: name of the setting, for messages.
    """
    counts: dict[str, int | None] = {}
    for part in parts:
        kind, _, count = part.strip().rpartition(":")
        if not kind or not (count == "all" or count.isdecimal()):
            raise ValueError(f"{key}: {part!r} is not [DATASET/]KIND:COUNT, such as medium:350 or hard:all")
        counts[kind] = None if count == "all" else int(count)
    return counts


def choose(
    rows: Sequence[dict[str, Any]],
    amounts: Counts,
    seed: int,
    used_ids: set[str],
    is_a: Callable[[Mapping[str, Any], str], bool],
) -> tuple[list[dict[str, Any]], list[str]]:
    """Draws rows of some kinds. Returns them in the order of `rows`, and a message for each kind that had too few.

    Args:
      amounts: counts by `KIND` or `DATASET/KIND`. A row that several of them name is drawn once.
      used_ids: ids of rows that must not be drawn.
      is_a: whether a row with this metadata is of a kind.
    """
    rng = np.random.default_rng(seed)
    chosen: set[str] = set()
    missing = []
    for kind, count in amounts.items():
        dataset, _, label = kind.rpartition("/")
        excluded = used_ids | chosen
        candidates = [
            row["id"]
            for row in rows
            if is_a(row["metadata"], label)
            and row["id"] not in excluded
            and (not dataset or dataset_of(row["metadata"]) == dataset)
        ]
        if count is not None and count > len(candidates):
            missing.append(f"{count} {kind} were asked for, {len(candidates)} are there")
        drawn = candidates if count is None else [candidates[i] for i in rng.permutation(len(candidates))[:count]]
        chosen.update(drawn)
    return [row for row in rows if row["id"] in chosen], missing


def dataset_of(metadata: Mapping[str, Any]) -> str:
    """The data set that a question's metadata names; "" if none."""
    return next((str(metadata[key]) for key in ("dataset", "data_source", "source") if metadata.get(key)), "")


def question_row(example: Example, metadata: Mapping[str, Any], directory: pathlib.Path) -> dict[str, Any]:
    """A question in FlashRAG's form.

    Args:
      metadata: new metadata.
      directory: directory of the file that the row is for. Pictures that are only in memory become files in its `images/`.
    """
    pictures = [
        save_picture(image, directory / IMAGES) if in_memory(image) else picture_name(image) for image in example.images
    ]
    return {
        **({"images": pictures} if pictures else {}),
        "id": example.id,
        "question": example.question,
        "golden_answers": list(example.answers),
        "metadata": {**example.metadata, **metadata},
    }


def in_memory(image: Any) -> bool:
    """True if a picture is not a file of its own."""
    return not isinstance(image, str | pathlib.Path) or is_data(image)


def save_picture(image: Any, directory: pathlib.Path) -> str:
    """Saves a picture in a directory, under its own name if it has one that is free. Returns its name there."""
    content, extension = encoded_image(image)
    digest = hashlib.sha256(content).hexdigest()[:16]
    path = directory / f"{digest}.{extension}"
    if not in_memory(image):
        path = directory / pathlib.Path(image).name
        path = path.with_suffix(".png") if extension == "png" else path  # the picture may have been converted
    if path.is_file() and path.read_bytes() != content:
        path = directory / f"{path.stem}-{digest}{path.suffix}"
    if not path.is_file():
        write_atomic(path, content, shared=True)
    return path.name


def digest_of(examples: Iterable[Example], extra: Callable[[Example], Sequence[Any]] = lambda example: ()) -> str:
    """The number of questions, and a hash of their ids, texts, answers and pictures.

    Args:
      extra: further parts of a question that go into the hash, JSON-serialisable.
    """
    rows = [
        [*(e.id, e.question, e.answers), [image_digest(image) for image in e.images], list(extra(e))] for e in examples
    ]
    return f"{len(rows)} questions, {digest(rows)}"


def digest(value: Any) -> str:
    """A short hash of anything that is JSON-serialisable."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]
