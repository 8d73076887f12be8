"""A run that would be evaluated on its training questions says so before it trains."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import pytest

from routerl_jax.core.files import write_json_lines
from routerl_jax.core.types import Episode, Example
from routerl_jax.evaluation.records import episode_record
from routerl_jax.training import config as schema
from routerl_jax.training.checks import check_overlap
from routerl_jax.training.rl import train_rl


@pytest.fixture
def questions(tmp_path: pathlib.Path) -> pathlib.Path:
    texts = [
        "Who built it?",
        "Which river is the longest in Asia?",
        "who built it",
        "In Asia, which river is longest?",
        "Why?",
    ]
    rows = [{"id": f"q{i}", "question": text, "answer": "x"} for i, text in enumerate(texts)]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "q.jsonl"


def config(questions: pathlib.Path, every: int = 0, **data: Any) -> schema.TrainConfig:
    """A run on items 0 and 1 of the questions."""
    return schema.TrainConfig(
        model=schema.ModelConfig(path="nowhere"),
        knowledge={"text": schema.KnowledgeConfig(source="atlas/text")},
        data=schema.DataConfig(train=str(questions), validation="", test="", train_range=(0, 2), **data),
        evaluation=schema.EvaluationConfig(every=every, final_examples=-1),
    )


def test_a_run_refuses_before_it_trains(questions: pathlib.Path, tmp_path: pathlib.Path) -> None:
    expected = r"1 validation or test questions .*'who built it' \(id q0 in training, q2 in evaluation\).*overlap=warn"
    with pytest.raises(ValueError, match=expected):
        train_rl(config(questions, test_range=(2, 5)), tmp_path / "run")
    with pytest.raises(ValueError, match=expected):
        check_overlap(config(questions, 1, test_range=(4, 5), validation_range=(2, 3)))
    check_overlap(config(questions, 0, test_range=(4, 5), validation_range=(2, 3)))  # it never validates


def test_what_is_shown_before_is_looked_at(questions: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Episodes at the test questions, which launch.evaluate writes; and golden steps, of a control."""
    run = config(questions, test_range=(4, 5))
    example = Example(id="q4", question="Why?", answers=("x",))
    episode = Episode(example=example, sample=0, answer="x", turns=[], sequences=[])
    write_json_lines(tmp_path / "rollouts" / "trained.jsonl", [episode_record(episode)])
    shown = schema.WarmStartConfig(steps=1, demonstrations=str(tmp_path / "rollouts"))
    with pytest.raises(ValueError, match=r"1 validation or test questions .*'Why\?' \(id q4 in training"):
        check_overlap(dataclasses.replace(run, warm_start=shown))
    check_overlap(dataclasses.replace(run, warm_start=dataclasses.replace(shown, steps=0)))
    control = schema.ControlConfig(supervised=dataclasses.replace(shown, demonstrations=f"{questions}[4:5]"))
    with pytest.raises(ValueError, match=r"'Why\?' \(id q4 in training"):
        check_overlap(dataclasses.replace(run, controls={"sft": control}))
    # What is annotated is the run's own questions, though every stage may have others.
    own = dataclasses.replace(run, data=dataclasses.replace(run.data, train_range=(4, 5)))
    own = dataclasses.replace(own, stages={"main": schema.StageConfig(data={"train_range": (0, 2)})})
    check_overlap(own)
    with pytest.raises(ValueError, match=r"'Why\?' \(id q4 in training"):
        check_overlap(dataclasses.replace(own, warm_start=schema.WarmStartConfig(steps=1, demonstrations="annotated")))


def test_every_stage_is_looked_at(questions: pathlib.Path) -> None:
    stages = {
        "first": schema.StageConfig(start=0, reward={"em": 1.0}),
        "second": schema.StageConfig(start=5, reward={"em": 1.0}, data={"train_range": (1, 3)}),
    }
    staged = dataclasses.replace(config(questions, test_range=(3, 5)), stages=stages)
    check_overlap(staged)
    stages["second"] = dataclasses.replace(stages["second"], data={"train_range": (4, 5)})
    with pytest.raises(ValueError, match=r"id q4 in training, q4 in evaluation"):
        check_overlap(dataclasses.replace(staged, stages=stages))


def test_what_is_only_told(questions: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", logger="absl"):
        check_overlap(config(questions, test_range=(4, 5)))
        check_overlap(config(questions, test_range=(2, 5), overlap="ignore"))
        assert not caplog.text
        check_overlap(config(questions, test_range=(3, 5)))
        assert "1 pairs of training and evaluation questions are nearly the same" in caplog.text
        check_overlap(config(questions, test_range=(2, 3), overlap="warn"))
        assert "1 validation or test questions are training questions too" in caplog.text


def test_a_few_names_that_are_alike_are_nothing_to_tell(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    texts = [
        "In Asia, which river is longest?",
        "Which river is the longest in Asia?",
        *(f"Who is {i}?" for i in range(200)),
    ]
    rows = [{"id": f"q{i}", "question": text, "answer": "x"} for i, text in enumerate(texts)]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    one = config(tmp_path / "q.jsonl")
    data = dataclasses.replace(one.data, train_range=(0, 1), test_range=(1, 202))
    with caplog.at_level("WARNING", logger="absl"):
        check_overlap(dataclasses.replace(one, data=data))
    assert not caplog.text
