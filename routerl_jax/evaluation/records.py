"""Episodes as JSON lines: what was said, called, found and rewarded."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

from routerl_jax.core.types import Episode


def episode_record(episode: Episode, **extra: Any) -> dict[str, Any]:
    """Everything a reader wants to see of an episode (token sequences left out)."""
    return {
        "id": episode.example.id,
        "sample": episode.sample,
        "question": episode.example.question,
        "golden_answers": list(episode.example.answers),
        "prediction": episode.answer,
        "prompt": episode.prompt,
        "turns": [dataclasses.asdict(turn) for turn in episode.turns],
        "rewards": episode.rewards,
        "truncated": episode.truncated,
        **extra,
    }


def write_records(path: pathlib.Path, records: Iterable[dict[str, Any]]) -> None:
    """Writes records to a file that appears whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
    temporary.replace(path)


def read_records(path: pathlib.Path) -> Iterator[dict[str, Any]]:
    """Reads what `write_records` wrote."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number}: not JSON ({error.msg})") from error
