"""Selection by difficulty: the counts of a script whose attempts are known, kills, and what the sets hold."""

from __future__ import annotations

import dataclasses
import io
import json
import pathlib
import signal
from collections.abc import Sequence

import pytest
from PIL import Image

from routerl_jax.core.types import Episode, Example, Passage
from routerl_jax.data.readers import open_dataset
from routerl_jax.extras.curation.selection import SelectionConfig, select
from routerl_jax.models.images import image_digest
from routerl_jax.parallel.workdir import directory_lock
from tests.extras.curation.selection_job import CONFIG, QUESTIONS, job
from tests.programs import finish, launch_here, refusal, start, write_config
from tests.training.small_run import make_config


def rows(path: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_thresholds_of_the_paper() -> None:
    paper = SelectionConfig()
    expected = {1: "easy", 9: "easy", 10: "medium", 20: "medium", 21: "hard", None: "hard"}
    assert {number: paper.difficulty(number) for number in expected} == expected


def test_difficulty_and_sets(tmp_path: pathlib.Path) -> None:
    report = job(tmp_path)
    found = {
        row["id"]: (row["metadata"]["rollouts"], row["metadata"]["difficulty"])
        for row in rows(tmp_path / "difficulty.jsonl")
    }
    assert found == {
        "q1": (1, "easy"),
        "q3": (3, "easy"),
        "q5": (5, "medium"),
        "q6": (6, "medium"),
        "q7": (7, "medium"),
        "q9": (None, "hard"),  # at its eighth attempt and later nobody looks
        "q0": (None, "hard"),
        "q4": (4, "medium"),
        "q8": (None, "hard"),
    }
    assert report.counts == {"easy": 2, "medium": 4, "hard": 3}
    first, second = ({row["id"] for row in rows(tmp_path / f"stage_{i}.jsonl")} for i in (1, 2))
    assert len(first & {"q5", "q7"}) == 1  # one of data set a
    assert first >= {"q6", "q4"}  # all of b, though five were asked for
    assert report.missing == ["stage 1: 5 b/medium were asked for, 2 are there"]
    assert second == {"q5", "q6", "q7", "q4", "q9", "q0", "q8"} - first
    stage = open_dataset(str(tmp_path / "stage_2.jsonl"))
    assert stage[0].answers == ("Accra",)
    assert stage[0].metadata["difficulty"] in ("medium", "hard")
    assert stage[0].metadata["dataset"] in ("a", "b")  # what was known of a question still is
    assert (tmp_path / "difficulty.png").read_bytes().startswith(b"\x89PNG")


def test_only_unanswered_questions_go_on(tmp_path: pathlib.Path) -> None:
    job(tmp_path)
    assert (tmp_path / "calls.txt").read_text().splitlines() == [
        "round 0: q1 q3 q5 q6",
        "round 0: q7 q9 q0 q4",
        "round 0: q8",
        "round 1: q5 q6 q7 q9",
        "round 1: q0 q4 q8",
        "round 2: q7 q9 q0 q8",
    ]
    assert [len(row["correct"]) for row in rows(tmp_path / "rounds/round-02/portion-00000.jsonl")] == [
        1
    ] * 4  # of seven in all


@pytest.mark.parametrize("moment", ["round-00/portion-00001", "round-01/portion-00001"])
def test_a_killed_job_repeats_nothing_that_was_finished(tmp_path: pathlib.Path, moment: str) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    job(whole)
    finish(start("tests.extras.curation.selection_job", killed, "--kill", moment), -signal.SIGKILL)
    before = (killed / "calls.txt").read_text().splitlines()
    assert not (killed / "difficulty.jsonl").exists()
    job(killed)
    calls = (killed / "calls.txt").read_text().splitlines()
    expected = (whole / "calls.txt").read_text().splitlines()
    assert calls == [*before, *expected[len(before) - 1 :]]  # the portion that was being written, and the rest
    for name in ("difficulty.jsonl", "stage_1.jsonl", "stage_2.jsonl"):
        assert (killed / name).read_bytes() == (whole / name).read_bytes()


def test_a_finished_job_attempts_nothing_and_other_questions_are_refused(tmp_path: pathlib.Path) -> None:
    job(tmp_path)
    calls = (tmp_path / "calls.txt").read_text()
    more = dataclasses.replace(CONFIG, stage1={"hard": 2})  # sets may be made anew
    assert job(tmp_path, config=more).stage1 == 2
    assert (tmp_path / "calls.txt").read_text() == calls
    with pytest.raises(ValueError, match=r"portion-00000\.jsonl holds attempts at other questions"):
        job(tmp_path, QUESTIONS[1:])


def test_settings_are_checked() -> None:
    for options, message in (
        ({"easy_below": 30}, "easy_below=30 must be in"),
        ({"per_round": 0}, "per_round=0"),
        ({"metric": "bleu"}, "metric='bleu': known are em"),
        ({"stage1": {"a/mild": 3}}, "'a/mild': expected"),
    ):
        with pytest.raises(ValueError, match=message):
            SelectionConfig(**options)  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_program_on_the_shipped_policy(
    small_run: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The shipped warm start on questions of Atlas: some are answered, and a second sitting changes nothing."""
    config = write_config(make_config(small_run), tmp_path / "config.py")
    tmp_path = tmp_path / "job"
    levels = ("--easy_below=2", "--hard_above=2", "--per_round=1", "--portion=16", "--stage1=medium:2")
    arguments = (
        "select_data",
        f"--config={config}",
        f"--workdir={tmp_path}",
        "--config.data.train_range=(0, 16)",
        *levels,
    )
    assert not launch_here(*arguments)
    shown = capsys.readouterr().out
    assert "16 questions: " in shown
    made = rows(tmp_path / "difficulty.jsonl")
    assert len(made) == 16
    assert {row["metadata"]["difficulty"] for row in made} > {"hard"}
    assert "pass --resume" in refusal(*arguments)
    with directory_lock(tmp_path):
        assert "is in use by process" in refusal(*arguments, "--resume")
    before = sorted(path.stat().st_mtime_ns for path in (tmp_path / "rounds").rglob("*.jsonl"))
    assert not launch_here(*arguments, "--resume")
    assert rows(tmp_path / "difficulty.jsonl") == made
    assert sorted(path.stat().st_mtime_ns for path in (tmp_path / "rounds").rglob("*.jsonl")) == before
    other = ("select_data", f"--config={config}", f"--workdir={tmp_path / 'other'}")
    assert "config.agent.grammar: unknown grammar 'x'" in refusal(*other, "--config.agent.grammar=x")
    assert not (tmp_path / "other").exists()
    assert "--stage2: 'hard' is not" in refusal(*arguments, "--resume", "--stage2=hard")
    assert "easy_below differs" in refusal(*arguments, "--resume", "--easy_below=1")


class Shaky:
    """A knowledge base of which the first `failing` searches fail."""

    def __init__(self, failing: int) -> None:
        self.failing = failing

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        if self.failing:
            self.failing -= 1
            raise ConnectionError("the index is down")
        return [[] for _ in queries]


def test_failed_searches_are_told_and_a_portion_of_nothing_else_is_not_kept(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match=r"all 12 searches of these attempts failed, the first with: .*index is down"):
        job(tmp_path, tools={"text": Shaky(10**6)})
    assert not list((tmp_path / "rounds").rglob("*.jsonl"))
    # A batch of searches that fails is tried again one by one, of which the first fails once more.
    assert job(tmp_path, tools={"text": Shaky(2)}).failed_searches == 1
    assert job(tmp_path).failed_searches == 1  # as it was kept


def test_of_a_few_searches_all_may_fail(tmp_path: pathlib.Path) -> None:
    """They would again at every resumption, and the job would never end."""
    assert job(tmp_path, questions=QUESTIONS[:1], tools={"text": Shaky(10**6)}).failed_searches == 3


def test_questions_keep_their_pictures(tmp_path: pathlib.Path) -> None:
    """Files by their names, what is in memory as itself."""
    buffer = io.BytesIO()
    Image.new("RGB", (4, 4), "red").save(buffer, "PNG")
    picture = buffer.getvalue()
    (tmp_path / "a.png").write_bytes(picture)
    seen = [dataclasses.replace(q, images=(i,)) for q, i in zip(QUESTIONS, (tmp_path / "a.png", picture))]

    def attempt(examples: Sequence[Example], samples: int, number: int) -> list[Episode]:
        return [
            Episode(example=example, sample=sample, answer="Accra", turns=[], sequences=[])
            for example in examples
            for sample in range(samples)
        ]

    select(seen, attempt, CONFIG, tmp_path / "job", progress=False)
    made = {row["id"]: row["images"] for row in rows(tmp_path / "job" / "difficulty.jsonl")}
    assert made["q1"] == [str(tmp_path / "a.png")]
    source = open_dataset(str(tmp_path / "job" / "difficulty.jsonl"))
    assert [image_digest(source[i].images[0]) for i in range(2)] == [image_digest(picture)] * 2
