"""Questions by the searches that they take: attempts whose kinds were counted by hand, kills, and what the sample holds."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import signal
from typing import Any

import numpy as np
import pytest

from configs import mmsearch_r1_data
from routerl_jax.data.readers import open_dataset
from routerl_jax.extras.curation.balance import BalanceConfig, SearchNeed, search_need
from routerl_jax.models.images import decode_image
from routerl_jax.models.pretrained import PACKAGED_MODELS
from routerl_jax.parallel.workdir import directory_lock
from routerl_jax.training import config as schema
from tests.extras.curation.balance_job import ATTEMPTS, CONFIG, PICTURE, QUESTIONS, forced, job
from tests.programs import finish, launch_here, refusal, start, two_processes
from tests.training.small_run import make_config, make_sft_config


def rows(path: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_kinds_as_counted_by_hand(tmp_path: pathlib.Path) -> None:
    report = job(tmp_path)
    found = {row["id"]: row["metadata"] for row in rows(tmp_path / "questions.jsonl")}
    assert {name: one["kind"] for name, one in found.items()} == {name: kind for name, (_, kind) in ATTEMPTS.items()}
    right = {name: attempts.count("+") for name, (attempts, _) in ATTEMPTS.items()}
    assert {name: (one["right_attempts"], one["attempts"]) for name, one in found.items()} == {
        name: (count, 8) for name, count in right.items()
    }
    assert report.before == {
        "a": {"image": 2, "mixed": 1, "unsolved": 1},
        "b": {"search_free": 1, "image": 1, "text": 2},
    }
    assert (report.either, report.attempts, report.failed_searches) == (2, 64, 0)


def test_the_sample_is_as_was_asked_and_is_trained_on(tmp_path: pathlib.Path) -> None:
    report = job(tmp_path)
    sample = rows(tmp_path / "train.jsonl")
    kinds = [row["metadata"]["kind"] for row in sample]
    assert len(sample) == 5
    assert kinds.count("search_free") == 1
    assert any(row["metadata"] == {**row["metadata"], "kind": "image", "dataset": "a"} for row in sample)
    assert report.missing == []
    assert sum(sum(kinds.values()) for kinds in report.after.values()) == 5
    data = open_dataset(str(tmp_path / "train.jsonl"))
    assert [data[i].id for i in range(len(data))] == [row["id"] for row in sample]
    np.testing.assert_array_equal(np.asarray(decode_image(data[0].images[0])), PICTURE)
    assert data[0].metadata["kind"] in {kind for _, kind in ATTEMPTS.values()}
    text = (tmp_path / "report.md").read_text()
    assert "| all | questions | 1 | 3 | 2 | 1 | 1 | 8 |" in text
    assert "rejected, as none of the attempts was right: 1\n" in text
    assert "in no sample, as the amounts were reached: 2\n" in text
    assert json.loads((tmp_path / "report.json").read_text()) == report.record()


def test_other_amounts_attempt_nothing_anew(tmp_path: pathlib.Path) -> None:
    job(tmp_path)
    calls = (tmp_path / "calls.txt").read_text()
    report = job(tmp_path, dataclasses.replace(CONFIG, amounts="text:all,mixed:4"))
    assert {row["id"] for row in rows(tmp_path / "train.jsonl")} == {"text", "either, more in words", "mixed"}
    assert report.missing == ["4 mixed were asked for, 1 are there"]
    assert "4 mixed were asked for, 1 are there; the sample is smaller" in str(report)
    assert (tmp_path / "calls.txt").read_text() == calls
    drawn = [
        job(tmp_path, dataclasses.replace(CONFIG, seed=seed)) and rows(tmp_path / "train.jsonl") for seed in (1, 1)
    ]
    assert drawn[0] == drawn[1]


def test_a_killed_job_repeats_nothing_that_was_finished(tmp_path: pathlib.Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    job(whole)
    finish(start("tests.extras.curation.balance_job", killed, "--kill", "round-00/portion-00001"), -signal.SIGKILL)
    before = (killed / "calls.txt").read_text().splitlines()
    assert not (killed / "train.jsonl").exists()
    job(killed)
    calls, expected = ((place / "calls.txt").read_text().splitlines() for place in (killed, whole))
    assert calls == [*before, *expected[len(before) - 1 :]]  # the portion that was being written, and the rest
    for name in ("questions.jsonl", "train.jsonl", "report.json"):
        assert (killed / name).read_bytes() == (whole / name).read_bytes()


def test_two_processes_make_one_sample(tmp_path: pathlib.Path) -> None:
    """The main process writes, whichever comes first."""
    alone, together = tmp_path / "alone", tmp_path / "together"
    job(alone)
    two_processes("tests.extras.curation.balance_job", together, workdir=together, JAX_NUM_CPU_DEVICES="1")
    for name in ("questions.jsonl", "train.jsonl", "report.json"):
        assert (together / name).read_bytes() == (alone / name).read_bytes()
    asked = [(place / "calls.txt").read_text().splitlines() for place in (alone, together)]
    assert sorted(asked[1]) == sorted(2 * asked[0])  # both attempt every portion, once


def test_a_forced_probe_asks_on_only_what_is_unanswered(tmp_path: pathlib.Path) -> None:
    """Two attempts a round; what may not be searched ends them."""
    attempts = {
        "free": ("- + - - - - - -", "search_free"),
        "image": ("i i i+ - - - - -", "image"),
        "text": ("- - t t- t+ - - -", "text"),
        "mixed": ("- - i- - t- - it+ -", "mixed"),
        "never": ("- - - - - - it- it-", "unsolved"),
        "needs less": ("- - - - - - it- i+", "image"),
    }
    questions = [dataclasses.replace(QUESTIONS[0], id=name) for name in attempts]
    job(tmp_path, dataclasses.replace(forced(), portion=9), questions, attempts)
    assert {row["id"]: row["metadata"]["kind"] for row in rows(tmp_path / "questions.jsonl")} == {
        name: kind for name, (_, kind) in attempts.items()
    }
    assert (tmp_path / "calls.txt").read_text().splitlines() == [
        "round 0: free, image, text, mixed, never, needs less",
        "round 1: image, text, mixed, never, needs less",
        "round 2: text, mixed, never, needs less",
        "round 3: mixed, never, needs less",
    ]


def test_a_search_that_failed_does_not_count(tmp_path: pathlib.Path) -> None:
    """Nothing came of it: what was right all the same was known. Where none comes back, nothing is kept."""
    record = {"id": "a", "correct": [True, False], "searched": [[], ["image"]], "failed_searches": 1}
    assert search_need(record, "image") == SearchNeed(kind="search_free")
    with pytest.raises(
        ValueError, match=r"all \d+ searches of these attempts failed, .*index is down.*go on with the job"
    ):
        job(tmp_path, error="the index is down")
    assert not list((tmp_path / "rounds").rglob("*.jsonl"))


def test_other_settings_and_a_second_process_are_refused(tmp_path: pathlib.Path) -> None:
    job(tmp_path)
    with pytest.raises(ValueError, match=r"attempts differs: 8, now 4.*--overwrite"):
        job(tmp_path, dataclasses.replace(CONFIG, attempts=4))
    with pytest.raises(ValueError, match="questions differs"):
        job(tmp_path, questions=QUESTIONS[1:])
    assert job(tmp_path, questions=QUESTIONS[1:], overwrite=True).attempts == 56
    with directory_lock(tmp_path), pytest.raises(ValueError, match="is in use by process"):
        job(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": ""}, "config.policy is not set"),
        ({"metric": "bleu"}, "config.metric='bleu': known are em"),
        ({"normalizer": "x"}, "normalizer"),
        ({"attempts": 0}, "attempts=0"),
        ({"amounts": "image"}, "config.amounts: 'image' is not"),
        ({"amounts": "unsolved:3"}, "'unsolved' is not"),
    ],
)
def test_settings_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BalanceConfig(**{"policy": "runs/pool", **options})


def test_the_program_names_what_is_wrong_with_the_policy(tmp_path: pathlib.Path) -> None:
    arguments = ("construct_data", "--config=configs/mmsearch_r1_data.py:balance", f"--workdir={tmp_path / 'out'}")
    assert "config.policy='runs/none': runs/none holds no run" in refusal(*arguments, "--config.policy=runs/none")
    assert "config.attempts=0" in refusal(*arguments, "--config.attempts=0")
    assert "config.job='x' is no job of this program: golden" in refusal(*arguments, "--config.job=x")
    with pytest.raises(ValueError, match="variant 'x' of the configuration is none of balance"):
        mmsearch_r1_data.get_config("x")
    (tmp_path / "run").mkdir()
    config = json.dumps(dataclasses.asdict(make_sft_config()))
    (tmp_path / "run" / "config.json").write_text(config)
    assert "its config.recipe is 'search'" in refusal(*arguments, f"--config.policy={tmp_path / 'run'}")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_program_on_a_run(
    small_run: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The shipped policy in the place of a trained one: it writes another recipe's tags, so its answers are begun for it."""
    config = make_config(small_run, recipe="mmsearch_r1", stages={"main": schema.StageConfig(reward={"em": 1.0})})
    bases = dict(zip(("image", "text"), config.knowledge.values()))
    config = dataclasses.replace(
        config, knowledge=bases, agent=schema.AgentConfig(max_searches=1, k=1, max_turn_tokens=16, answer_tokens=8)
    )
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text(json.dumps(dataclasses.asdict(config)))
    arguments = (
        *("construct_data", "--config=configs/mmsearch_r1_data.py:balance", f"--workdir={tmp_path / 'out'}", "--json"),
        *(f"--config.policy={run}", f"--config.data={small_run / 'questions.jsonl'}[0:3]", "--config.attempts=2"),
    )
    assert "config.step=0: " in refusal(*arguments)
    (run / "policy").symlink_to(PACKAGED_MODELS["atlas-warm-start"])
    assert not launch_here(*arguments)
    report = json.loads(capsys.readouterr().out)
    assert report["attempts"] == 6
    assert sum(report["before"]["questions"].values()) == 3
    found = rows(tmp_path / "out" / "questions.jsonl")
    assert {row["metadata"]["kind"] for row in found} <= {"search_free", "unsolved"}
    moments = [path.stat().st_mtime_ns for path in (tmp_path / "out" / "rounds").rglob("*.jsonl")]
    assert not launch_here(*arguments)
    assert [path.stat().st_mtime_ns for path in (tmp_path / "out" / "rounds").rglob("*.jsonl")] == moments
