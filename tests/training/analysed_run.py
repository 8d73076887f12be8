"""A finished run as launch.analyze finds it, written by hand: records with known shares of right answers and of searches."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from routerl_jax.core.files import write_json_lines
from routerl_jax.core.types import Action, Call, Episode, Example, Turn
from routerl_jax.evaluation.records import episode_record
from routerl_jax.training import config as schema
from routerl_jax.training.controls import control_directory

TOOLS = ("image", "text")
KINDS = ("search_free", "text", "image", "mixed")
Behaviour = Mapping[str, tuple[float, float]]  # by kind: shares of right answers, and of questions with searches


def records(questions: Sequence[Example], behaviour: Behaviour, searches: int = 2) -> list[dict[str, Any]]:
    """An episode a question; the first so many of each kind are right, the last so many search, with each tool in turn."""
    found = []
    for kind in dict.fromkeys(question.metadata["kind"] for question in questions):
        right, searched = behaviour[kind]
        asked = [question for question in questions if question.metadata["kind"] == kind]
        for i, question in enumerate(asked):
            count = searches if i >= round(len(asked) * (1 - searched)) else 0
            found.append(_record(question, i < round(len(asked) * right), count))
    return found


def _record(question: Example, right: bool, searches: int) -> dict[str, Any]:
    turns = [
        Turn(
            text="s",
            stop_reason="stop",
            tokens=20,
            action=Action(kind="search", tool=tool, query="q"),
            calls=[Call(tool=tool, query="q", cost=1.0, seconds=0.1)],
        )
        for tool in TOOLS[:searches]
    ]
    answer = question.answers[0] if right else "nothing"
    turns.append(Turn(text="a", stop_reason="stop", tokens=12, action=Action(kind="answer", answer=answer)))
    plain = dataclasses.replace(question, images=())
    return episode_record(Episode(example=plain, sample=0, answer=answer, turns=turns, sequences=[], prompt="?"))


def curve(start: float, end: float, steps: int, **extra: Any) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl: reward and searches go from one value to another."""
    rng = np.random.default_rng(0)
    return [
        {
            "step": i,
            "reward/total": 0.4 + 0.3 * i / steps + float(rng.normal(0, 0.03)),
            "rollout/searched_rate": start + (end - start) * i / steps + float(rng.normal(0, 0.02)),
            "rollout/tokens_per_question": 60.0 - i / steps,
            **extra,
        }
        for i in range(steps)
    ]


def write_run(
    workdir: pathlib.Path,
    config: schema.TrainConfig,
    episodes: Mapping[str, Sequence[Mapping[str, Any]]],
    metrics: Mapping[str, Sequence[Mapping[str, Any]]],
    calibration: Mapping[str, Any] | None = None,
) -> None:
    """Writes a run and its controls.

    Args:
      episodes: records of what the run scored, by the name of its file; those of controls by theirs.
      metrics: rows of the run, as `trained`, and of controls.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    (workdir / "config.json").write_text(json.dumps(dataclasses.asdict(config)))
    (workdir / "results.json").write_text(json.dumps({"calibration": calibration} if calibration else {}))
    for name, rows in episodes.items():
        place, file = (control_directory(workdir, name), "trained") if name in config.controls else (workdir, name)
        write_json_lines(place / "evaluation" / f"{file}.jsonl", rows)
    for name, rows in metrics.items():
        write_json_lines((workdir if name == "trained" else control_directory(workdir, name)) / "metrics.jsonl", rows)
