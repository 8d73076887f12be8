"""Episodes as JSON lines: what was said, called, found and rewarded."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from routerl_jax.core.rows import Place, read_rows
from routerl_jax.core.types import Action, Branch, Call, Episode, Example, Passage, Turn, Verdict
from routerl_jax.data.pictures import picture_name
from routerl_jax.evaluation.groups import group_fields
from routerl_jax.rewards.ranges import accepted_answers


def episode_record(episode: Episode, **extra: Any) -> dict[str, Any]:
    """Everything a reader wants to see of an episode (token sequences left out); of its metadata `groups.GROUPS`, and the
    judge's verdict if there is one.

    Pictures are named (data.pictures.picture_name); one that was in memory alone has "" for a name.
    """
    return {
        "id": episode.example.id,
        "sample": episode.sample,
        "question": episode.example.question,
        "images": [picture_name(image) for image in episode.example.images],
        "golden_answers": list(accepted_answers(episode.example, episode.answer)),
        "metadata": group_fields(episode.example.metadata),
        "prediction": episode.answer,
        "prompt": episode.prompt,
        "turns": [dataclasses.asdict(turn) for turn in episode.turns],
        "rewards": episode.rewards,
        "truncated": episode.truncated,
        "branches": [dataclasses.asdict(branch) for branch in episode.branches],
        **({"verdict": dataclasses.asdict(episode.verdict)} if episode.verdict else {}),
        **extra,
    }


def episode_of(record: Mapping[str, Any], place: Place) -> Episode:
    """The episode of a record, without token sequences. Raises ValueError that names the row if it is none."""
    try:
        example = Example(
            id=str(record["id"]),
            question=record["question"],
            answers=tuple(record["golden_answers"]),
            images=tuple(record["images"]),
            metadata=record.get("metadata", {}),
        )
        return Episode(
            example=example,
            sample=record["sample"],
            answer=record["prediction"],
            turns=[_turn(turn) for turn in record["turns"]],
            sequences=[],
            prompt=record["prompt"],
            truncated=record["truncated"],
            rewards=dict(record["rewards"]),
            branches=tuple(Branch(**branch) for branch in record.get("branches", ())),
            verdict=Verdict(**record["verdict"]) if record.get("verdict") else None,
        )
    except (KeyError, TypeError) as error:
        fault = f"key {error} is missing" if isinstance(error, KeyError) else str(error)
        raise place.error(f"no episode as a run or launch.evaluate writes them: {fault}") from error


def _turn(fields: Mapping[str, Any]) -> Turn:
    action = None if fields["action"] is None else Action(**fields["action"])
    calls = [
        Call(**{**call, "passages": tuple(Passage(**passage) for passage in call["passages"])})
        for call in fields["calls"]
    ]
    return Turn(**{**fields, "action": action, "calls": calls})


def read_records(path: pathlib.Path) -> Iterator[dict[str, Any]]:
    """The records of a file, one a line. Raises ValueError as `core.rows.read_rows`."""
    return (record for _, record in read_rows(path, lines=True))
