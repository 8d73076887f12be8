"""One episode: its record, its group, its forks, and other episodes of the same question."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Int

from routerl_jax.evaluation.records import picture_path
from routerl_jax.evaluation.trajectory import looks
from routerl_jax.extras.viewer.index import _BITS, FAILURES, Index, read_record
from routerl_jax.models.images import encoded_image

_RELATED = 200  # most related episodes of a kind


def key_of(index: Index, row: int) -> str:
    """The name of a record in the page's address: its run, file and line."""
    location = index.location_of(row)
    run = index.runs[location.run]
    return f"{run.name}|{location.path.relative_to(run.path)}|{location.line}"


def row_of(index: Index, key: str) -> int:
    """The row that a key names. Raises ValueError if there is none."""
    name, _, rest = key.partition("|")
    file, _, line = rest.rpartition("|")
    run = next((run for run in index.runs if run.name == name), None)
    row = index.row(run.path / file, int(line)) if run is not None and line.isdecimal() else None
    if row is None:
        raise ValueError(f"there is no episode {key!r} (any more); its file may have been written anew")
    return row


def brief(index: Index, rows: np.ndarray, row: int) -> dict[str, Any]:
    """A row of a list of episodes."""
    entry = rows[row]
    question, text = index.questions.all[entry["question"]]
    kbs = [name for number, name in enumerate(index.kbs.all) if int(entry["kbs"]) >> min(number, _BITS) & 1]
    return {
        "key": key_of(index, row),
        "run": index.runs[entry["run"]].name,
        "source": index.sources.all[entry["source"]],
        "step": int(entry["step"]),
        "sample": int(entry["sample"]),
        "id": question,
        "question": text,
        "answer": index.answers[row],
        "reward": _number(entry["reward"]),
        "advantage": _number(entry["advantage"]),
        "correct": int(entry["correct"]),
        "trained": int(entry["trained"]),
        "turns": int(entry["turns"]),
        "searches": int(entry["searches"]),
        "tokens": int(entry["tokens"]),
        "forked": bool(entry["forked"]),
        "kbs": kbs,
        "failures": [name for bit, name in enumerate(FAILURES) if int(entry["failures"]) >> bit & 1],
        "datasets": sorted(index.dataset_sets.all[entry["datasets"]]),
    }


def details(index: Index, row: int) -> dict[str, Any]:
    """The record of a row and its related episodes. Pictures in the record are replaced by numbers (`picture`).

    `siblings` are the other attempts at the question in the same step or evaluation, `forks` all branches of the same attempt,
    `elsewhere` the same question at other steps, in evaluations and in other runs.

    Raises:
      ValueError: the record has changed meanwhile, or is gone.
    """
    rows = index.snapshot()
    location = index.location_of(row)
    record = read_record(location)
    own = rows[row]
    same = np.flatnonzero(rows["alive"] & (rows["question"] == own["question"]))
    same_file = rows["file"][same] == own["file"]
    attempt = same_file & (rows["sample"][same] == own["sample"])
    elsewhere = same[~same_file]
    elsewhere = elsewhere[np.lexsort((rows["sample"][elsewhere], rows["step"][elsewhere], rows["run"][elsewhere]))]
    return {
        "key": key_of(index, row),
        "brief": brief(index, rows, row),
        "file": f"{location.path}, line {location.line + 1}",
        **page_data(record)[0],
        "siblings": _briefs(index, rows, same[same_file & ~attempt]),
        "forks": _briefs(index, rows, same[attempt]) if attempt.sum() > 1 else [],
        "elsewhere": _briefs(index, rows, elsewhere),
        "elsewhere_count": len(elsewhere),
    }


def picture(index: Index, row: int, number: int) -> tuple[bytes, str]:
    """A picture of a record, by its number in `details`: the file's bytes and its format ("png", "jpeg", ..).

    Only files that the record names are read, and only if they are pictures.

    Raises:
      ValueError: there is no such picture, or it can't be read (any more).
    """
    location = index.location_of(row)
    return picture_of(read_record(location), location.path.parent, number)


def page_data(record: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The data from which the page draws a conversation, and the names of its numbered pictures."""
    numbers: dict[str, int] = {}
    shown = {
        "looks": [_numbered(look, numbers) for look in looks(record)],
        "record": _numbered(record, numbers),
        "pictures": [name if not name.startswith("data:") else "in the record" for name in numbers],
    }
    return shown, list(numbers)


def picture_of(record: Mapping[str, Any], directory: pathlib.Path, number: int) -> tuple[bytes, str]:
    """A picture of a record by its number in `page_data`, as `picture` gives it. `directory`: of the record's file."""
    names = page_data(record)[1]
    if number >= len(names):
        raise ValueError(f"the record has {len(names)} pictures, and no number {number}")
    return encoded_image(picture_path(directory, names[number]))


def _briefs(index: Index, rows: np.ndarray, chosen: Int[np.ndarray, " N"]) -> list[dict[str, Any]]:
    return [brief(index, rows, int(row)) for row in chosen[:_RELATED]]


def _numbered(value: Any, numbers: dict[str, int]) -> Any:
    """A copy in which the pictures (under the keys `image` and `images`) are numbers from 0 on, in the order of their first
    place; None where there is no picture. The `image` of a call is a digest, and stays."""
    if isinstance(value, Mapping):
        numbered = {}
        for key, item in value.items():
            if key == "images" and isinstance(item, list):
                numbered[key] = [_number_of(image, numbers) for image in item]
            elif key == "image" and "tool" not in value:
                numbered[key] = _number_of(item, numbers)
            else:
                numbered[key] = _numbered(item, numbers)
        return numbered
    return [_numbered(item, numbers) for item in value] if isinstance(value, list | tuple) else value


def _number_of(image: Any, numbers: dict[str, int]) -> int | None:
    return numbers.setdefault(image, len(numbers)) if isinstance(image, str) and image else None


def _number(value: np.floating) -> float | None:
    return None if math.isnan(value) else round(float(value), 4)
