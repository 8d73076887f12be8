"""The questions of a job, questions as rows of a file, and the drawing of some of them by kind."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from routerl_jax.core.files import write_whole
from routerl_jax.core.types import Example
from routerl_jax.data.pictures import picture_name
from routerl_jax.data.readers import in_turns, open_dataset, short_names
from routerl_jax.data.trajectories import golden_step
from routerl_jax.models.images import encoded_image, image_digest, is_data

IMAGES = "images"  # beside a file of questions: their pictures
Counts = Mapping[str, int | None]  # how many of a kind, None: all


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """A question and the data set that it counts for."""

    dataset: str
    example: Example


def all_questions(data: str, seed: int) -> list[Question]:
    """All questions: one of each data set in turn, those of a data set shuffled by the seed.

    Args:
      data: what config.data names, as `open_dataset` takes it.

    Raises:
      ValueError: there are golden steps among them.
    """
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
    """Those among the first `most` of their data set; 0: all."""
    seen: collections.Counter[str] = collections.Counter()
    kept = []
    for question in questions:
        seen[question.dataset] += 1
        if not most or seen[question.dataset] <= most:
            kept.append(question)
    return kept


def counts_of(parts: Sequence[str], key: str) -> dict[str, int | None]:
    """`["medium:350", "hard:all"]` as `{"medium": 350, "hard": None}`.

    Args:
      key: where they stand, for messages.
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
    wanted: Counts,
    seed: int,
    taken: set[str],
    is_a: Callable[[Mapping[str, Any], str], bool],
) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows of the wanted kinds, drawn without those taken, in the order of `rows`; and what there was too little of.

    Args:
      wanted: by `KIND` or `DATASET/KIND`; a row that several name is drawn once.
      is_a: whether what is known of a row (its metadata) is of a kind.
    """
    rng = np.random.default_rng(seed)
    chosen: set[str] = set()
    missing = []
    for kind, count in wanted.items():
        dataset, _, label = kind.rpartition("/")
        gone = taken | chosen
        of_kind = [
            row["id"]
            for row in rows
            if is_a(row["metadata"], label)
            and row["id"] not in gone
            and (not dataset or dataset_of(row["metadata"]) == dataset)
        ]
        if count is not None and count > len(of_kind):
            missing.append(f"{count} {kind} were asked for, {len(of_kind)} are there")
        drawn = of_kind if count is None else [of_kind[i] for i in rng.permutation(len(of_kind))[:count]]
        chosen.update(drawn)
    return [row for row in rows if row["id"] in chosen], missing


def dataset_of(metadata: Mapping[str, Any]) -> str:
    """The data set that a question says it is of; "" if none."""
    return next((str(metadata[key]) for key in ("dataset", "data_source", "source") if metadata.get(key)), "")


def question_row(example: Example, found: Mapping[str, Any], directory: pathlib.Path) -> dict[str, Any]:
    """A question as FlashRAG writes it, with what was found out in its metadata.

    Args:
      directory: of the file that the row is for. Pictures that are in memory alone become files in `images/` there.
    """
    pictures = [
        save_picture(image, directory / IMAGES) if in_memory(image) else picture_name(image) for image in example.images
    ]
    return {
        **({"images": pictures} if pictures else {}),
        "id": example.id,
        "question": example.question,
        "golden_answers": list(example.answers),
        "metadata": {**example.metadata, **found},
    }


def in_memory(image: Any) -> bool:
    """Whether a picture is no file of its own."""
    return not isinstance(image, str | pathlib.Path) or is_data(image)


def save_picture(image: Any, directory: pathlib.Path) -> str:
    """Puts a picture into a directory, under its own name where it has one and that is free; the name there."""
    content, form = encoded_image(image)
    digest = hashlib.sha256(content).hexdigest()[:16]
    path = directory / f"{digest}.{form}"
    if not in_memory(image):
        path = directory / pathlib.Path(image).name
        path = path.with_suffix(".png") if form == "png" else path  # it may have been converted
    if path.is_file() and path.read_bytes() != content:
        path = directory / f"{path.stem}-{digest}{path.suffix}"
    if not path.is_file():
        write_whole(path, content, shared=True)
    return path.name


def digest_of(examples: Iterable[Example], more: Callable[[Example], Sequence[Any]] = lambda example: ()) -> str:
    """Of what is asked, shown and right: their number and a hash.

    Args:
      more: what else of a question counts, JSON-serialisable.
    """
    rows = [
        [*(e.id, e.question, e.answers), [image_digest(image) for image in e.images], list(more(e))] for e in examples
    ]
    return f"{len(rows)} questions, {hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]}"
