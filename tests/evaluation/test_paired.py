"""Comparisons question by question, of one run and of several, against numbers counted by hand and scipy's binomial test."""

import itertools
import json
import pathlib
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from scipy.stats import binomtest

from benchmarks import runs, seeds
from routerl_jax.core.files import write_json_lines
from routerl_jax.evaluation.paired import compare_records, compare_seeds
from tests.evaluation.episodes import record


def test_what_only_one_of_them_answers_and_what_it_costs():
    # of 20 questions both answer 10, the first alone 6, the second alone 2, none 2
    first = [record(i, i < 16, 1.0) for i in range(20)]
    second = [record(i, i < 10 or 16 <= i < 18, 1.0, 2.0) for i in range(20)]
    found = compare_records(first, reversed(second))
    assert found["em_difference"] == pytest.approx(0.2)
    assert found["mcnemar_p"] == pytest.approx(binomtest(6, 8).pvalue)
    assert found["cost_reduction"] == pytest.approx(2 / 3)
    assert found["cost_reduction_interval"] == pytest.approx([2 / 3, 2 / 3])  # the same for every question
    low, high = found["em_difference_interval"]
    assert low < 0 < 0.2 < high  # se = sqrt((8 - 16 * 0.1) / 20^2) = 0.13: eight questions decide nothing
    assert found["n"] == 20


def test_the_same_agent_twice_differs_in_nothing():
    rows = [record(i, i % 2 == 0, 1.0) for i in range(6)]
    found = compare_records(rows, rows)
    assert (found["em_difference"], found["mcnemar_p"], found["cost_reduction"]) == (0, 1, 0)


def test_seeds_are_pooled_question_by_question():
    """Question 0 is won in both runs, 1 in one of them, 2 is lost once and won once, 3 is right in all."""
    runs = [
        (
            [record(i, c == "1", 1.0) for i, c in enumerate(first)],
            [record(i, c == "1", 2.0) for i, c in enumerate(other)],
        )
        for first, other in [("1111", "0011"), ("1001", "0011")]
    ]
    found = compare_seeds(runs)
    assert found["em_difference"] == pytest.approx(np.mean([1, 0.5, -0.5, 0]))
    assert found["em_difference_by_run"] == [0.5, 0.0]
    assert found["mcnemar_p_by_run"] == [0.5, 1.0]  # 2:0 and 1:1
    assert found["mcnemar_p"] == 1.0
    assert found["cost_reduction"] == pytest.approx(0.5)
    assert found["n"] == 4
    low, high = found["em_difference_interval"]
    assert low <= found["em_difference"] <= high
    with pytest.raises(ValueError, match="no runs"):
        compare_seeds([])
    with pytest.raises(ValueError, match="the second of run 2 were not asked the same questions"):
        compare_seeds([runs[0], (runs[1][0], runs[1][1][:3])])


def test_runs_that_differ_leave_the_difference_open():
    """+5, -5 and +15 of 100 questions: of these very runs it is above 0 for certain."""
    runs = []
    for won, lost in ((6, 1), (1, 6), (16, 1)):
        ours, theirs = [won_ * won + lost_ * lost + "1" * (100 - won - lost) for won_, lost_ in ("10", "01")]
        runs.append(tuple([record(i, c == "1", 1.0) for i, c in enumerate(marks)] for marks in (ours, theirs)))
    found = compare_seeds(runs)
    low, high = found["em_difference_interval"]
    assert found["em_difference"] == pytest.approx(0.05)
    assert low < 0 < found["em_difference"] < high
    assert min(found["mcnemar_p_by_run"]) == pytest.approx(binomtest(16, 17).pvalue)
    assert (found["mcnemar_p"], found["bootstrap_p"] > 0.3) == (1, True)  # one of them says the opposite


def of_gains(*gains: Sequence[int]) -> dict[str, Any]:
    """Runs in which the first agent alone is right (1), the second alone (-1), or both are."""
    sides = [[[record(i, gain != wrong, 1.0) for i, gain in enumerate(run)] for wrong in (-1, 1)] for run in gains]
    return compare_seeds([(first, second) for first, second in sides])


def test_the_p_of_all_runs_is_that_of_every_possible_resample():
    """Two runs of five questions have 4 x 3125 resamples. Four questions differ, so a sign test gives 1/8 at least."""
    gains = np.asarray([[1, 1, 0, 1, -1], [1, 0, 0, 1, -1]])
    found, seen = of_gains(*gains), gains.mean()
    drawn = [
        gains[np.ix_(runs, questions)].mean()
        for runs in itertools.product(range(2), repeat=2)
        for questions in itertools.product(range(5), repeat=5)
    ]
    exact = np.mean([abs(mean - seen) >= abs(seen) - 1e-9 for mean in drawn])
    assert exact > 0.125
    assert found["bootstrap_p"] == pytest.approx(exact, abs=0.006)  # four standard errors of 99,999 draws
    assert found["bootstrap_resamples"] == 99_999
    assert of_gains(*-gains[::-1])["bootstrap_p"] == pytest.approx(exact, abs=0.006)


def test_questions_that_recur_in_all_runs_count_once():
    """Eight to two in one run is eight to two in three equal ones; as thirty questions they would be significant."""
    run = [1] * 8 + [-1] * 2 + [0] * 90
    once, thrice = of_gains(run), of_gains(run, run, run)
    assert thrice["mcnemar_p_by_run"] == [pytest.approx(binomtest(8, 10).pvalue)] * 3
    assert thrice["mcnemar_p"] == once["mcnemar_p"]
    assert thrice["bootstrap_p"] == pytest.approx(once["bootstrap_p"], abs=0.006)
    assert binomtest(24, 30).pvalue < 0.002 < 0.03 < thrice["bootstrap_p"]


def test_chance_is_no_difference_and_a_strong_effect_has_the_least_p():
    rng = np.random.default_rng(5)
    null = [of_gains(*rng.choice([-1, 0, 1], size=(3, 60), p=[0.2, 0.6, 0.2]))["bootstrap_p"] for _ in range(10)]
    assert sorted(null)[1] > 0.05
    assert 0.2 < np.mean(null) < 0.8
    strong = of_gains(*rng.choice([-1, 0, 1], size=(3, 100), p=[0.03, 0.5, 0.47]))
    assert strong["bootstrap_p"] == 1e-5
    assert strong["mcnemar_p"] == max(strong["mcnemar_p_by_run"]) < 1e-5
    assert of_gains([1, 1, 1, 1], [1, 1, 1, 1])["bootstrap_p"] == 0.125  # what never varies is not certain
    assert of_gains([0, 0], [0, 0])["bootstrap_p"] == 1


def test_without_any_searches_nothing_is_saved():
    rows = [record(i, True) for i in range(3)]
    assert compare_records(rows, rows)["cost_reduction_interval"] == [0, 0]


def test_other_questions_are_refused():
    with pytest.raises(ValueError, match=r"not asked the same questions.*\['3'\]"):
        compare_records([record(i, True) for i in range(3)], [record(i, True) for i in range(4)])
    with pytest.raises(ValueError, match="the first has no episodes"):
        compare_records([], [])
    with pytest.raises(ValueError, match="the second has no episodes"):
        compare_records([record(0, True)], [])


def test_two_attempts_at_a_question_are_refused():
    """Else one of them, whichever comes last, would stand for both."""
    once, twice = [record(0, True)], [record(0, True), record(0, False)]
    with pytest.raises(ValueError, match="the second has two episodes at question '0'"):
        compare_records(once, twice)


POLICY = {"model": {"path": "atlas-warm-start"}, "knowledge": {"text": {"source": "atlas/text"}}}


def write_run(workdir: pathlib.Path, right: str, seed: int = 0) -> str:
    """A run whose policy, called `ours`, is right at these questions, and its control at none of four."""
    found = {"em": 0.5, "searches_per_question": 1.0, "by": {"kind": {"text": {"em": seed / 10, "searched_rate": 1.0}}}}
    workdir.mkdir()
    where = {"seed": seed, "devices": 2, "platform": "cpu"}
    results = {"agents": {"ours": found, "control": found}, "seconds": {"total": 3.0}, **where}
    (workdir / "results.json").write_text(json.dumps(results))
    evaluation = {"normalizer": "search_r1", "names": {"trained": "ours"}}
    (workdir / "config.json").write_text(json.dumps({**POLICY, "evaluation": evaluation}))
    for place, answers in ((workdir, right), (workdir / "controls" / "control", "0000")):
        (place / "evaluation").mkdir(parents=True)
        records = [record(i, answer == "1", 1.0) for i, answer in enumerate(answers)]
        write_json_lines(place / "evaluation" / "trained.jsonl", records)
    return str(workdir)


def test_pairs_over_seeds(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    runs = [write_run(tmp_path / "3-AVX", "1110", 3), write_run(tmp_path / "b", "1000", 5)]
    monkeypatch.setattr(sys, "argv", ["seeds", *runs, "--pair=ours:control"])
    seeds.main()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ours - control")]
    assert [line.split(" | ")[1] for line in lines] == ["3, AVX", "5", "all"]
    assert [line.split(" | ")[2].split()[0] for line in lines] == ["+75.0", "+25.0", "+50.0"]
    assert [line.split(" | ")[3] for line in lines] == ["0.25", "1", "1 (worst)"]
    assert [line.split(" | ")[4] == "-" for line in lines] == [True, True, False]
    monkeypatch.setattr(sys, "argv", ["seeds", *runs, "--pair=ours:theirs"])
    with pytest.raises(SystemExit, match="has no episodes of 'theirs'"):
        seeds.main()


def test_runs_against_others(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    run, other = write_run(tmp_path / "a", "1110"), write_run(tmp_path / "b", "1000")
    rows = [json.dumps({"step": step, "perf/decoded_tokens": 2000}) for step in range(3)]
    (tmp_path / "a" / "metrics.jsonl").write_text("\n".join(rows))
    monkeypatch.setattr(sys, "argv", ["seeds", run, "--against", other, "--pair=ours:ours"])
    seeds.main()
    printed = capsys.readouterr().out
    assert "| ours - ours | 0 | +50.0" in printed
    assert printed.count("Thousand tokens generated in training: 6\n") == 1
    monkeypatch.setattr(sys, "argv", ["seeds", run, "--against", other, other])
    with pytest.raises(SystemExit):
        seeds.main()
    assert "--against needs as many runs as are compared with them: 1, not 2" in capsys.readouterr().err


def launched(monkeypatch: pytest.MonkeyPatch, steps: int = 120) -> list[tuple[int, str]]:
    """Stands in for launch.train: notes (seed, instruction set) and leaves a finished run whose EM falls with the seed."""
    made = []

    def start(command: list[str], *, check: bool, env: dict[str, str]) -> None:
        flags = dict(flag.removeprefix("--").split("=", 1) for flag in command if "=" in flag)
        seed, workdir = int(flags["config.seed"]), pathlib.Path(flags["workdir"])
        isa = env.get("XLA_FLAGS", "").partition("--xla_cpu_max_isa=")[2] or "native"
        made.append((seed, isa))
        workdir.mkdir(parents=True)
        (workdir / "config.json").write_text(json.dumps({**POLICY, "seed": seed, "steps": steps}))
        trained = {"em": 0.9 - seed / 10, "searches_per_question": 1.2 + seed / 10, "em_interval": [0, 1]}
        agents = {"warm_start": {"em": 0.2, "searches_per_question": 1.6}, "trained": trained}
        results = {"agents": agents, "seconds": {"training": 400.0}, "seed": seed, "devices": 2, "platform": "cpu"}
        (workdir / "results.json").write_text(json.dumps(results))
        rows = [
            {"step": step, "rollout/em": step / 9, "rollout/searches_per_question": 1.5, "perf/decoded_tokens": 500}
            for step in range(8)
        ]
        rows[-1]["validation/em"] = 0.8
        (workdir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    monkeypatch.setattr(subprocess, "run", start)
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    return made


def test_settings_are_what_a_configuration_says_beyond_the_defaults(tmp_path: pathlib.Path) -> None:
    """So a run from before the schema had a setting is of the same settings as one from after."""

    def settings(name: str, **said: object) -> str:
        workdir = pathlib.Path(write_run(tmp_path / name, "1110", 3))
        (workdir / "config.json").write_text(json.dumps({**POLICY, "seed": 3, **said}))
        return seeds.finished(workdir).settings

    older = settings("a")
    assert settings("b", judge={"retries": 4}, controls={}) == older
    assert settings("c", judge={"retries": 5}) != older
    assert settings("d", knowledge={"text": {"source": "atlas/text", "index": "auto"}}) == older
    assert settings("e", knowledge={"text": {"source": "atlas/text", "index": "exact"}}) != older


def test_runs_are_made_kept_and_gone_on_with(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """Two seeds on two instruction sets; what a file has kept is not run again, wherever the runs have gone."""
    made, kept = launched(monkeypatch), tmp_path / "kept" / "runs.json"
    asked = ["seeds", "--config=configs/quickstart.py", "--isa=native,AVX", f"--workdir={tmp_path / 'runs'}"]
    asked += [f"--keep={kept}", f"--picture={tmp_path / 'curves.png'}"]
    monkeypatch.setattr(sys, "argv", [*asked, "--run=1"])
    seeds.main()
    assert made == [(0, "native"), (0, "AVX")]
    (tmp_path / "runs").rename(tmp_path / "elsewhere")
    monkeypatch.setattr(sys, "argv", [*asked, "--run=2"])
    seeds.main()
    assert made[2:] == [(1, "native"), (1, "AVX")]
    printed = capsys.readouterr().out
    assert "Mean and worst of 4 runs." in printed
    assert "| after RL | 85.0 (worst 80.0) | 1.2 (worst 1.3) |" in printed
    assert "| before RL | 20.0 | 1.6 |" in printed
    assert "| 1, AVX | 80.0 | 1.3 |" in printed
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    launched(monkeypatch, steps=60)
    monkeypatch.setattr(sys, "argv", [*asked, "--run=3"])
    with pytest.raises(SystemExit, match=r"differ in more than their seed; .*runs.json holds runs of earlier settings"):
        seeds.main()
    assert len(json.loads(kept.read_text())) == 4


def test_a_run_that_has_begun_is_resumed(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = []
    monkeypatch.setattr(subprocess, "run", lambda command, **_: commands.append(command))
    runs.train("configs/quickstart.py", tmp_path, seed=3, flags=["config.steps=4"])
    assert commands[0][3:] == [
        "--config=configs/quickstart.py",
        f"--workdir={tmp_path}",
        "--config.seed=3",
        "--config.steps=4",
        "--resume=auto",
    ]
    (tmp_path / "config.json").write_text('{"controls": {"sft": {}}}')
    for results in ({"agents": {"trained": {}}, "stopped": {"message": "worse"}}, {"agents": {"trained": {}}}):
        (tmp_path / "results.json").write_text(json.dumps(results))  # its controls have not run
        runs.train("configs/quickstart.py", tmp_path, seed=3)
        with pytest.raises(SystemExit, match="holds no finished run"):
            seeds.finished(tmp_path)
    assert len(commands) == 3
    (tmp_path / "results.json").write_text('{"agents": {"trained": {}, "sft": {}}}')
    runs.train("configs/quickstart.py", tmp_path, seed=3)
    assert len(commands) == 3


def test_named_runs_are_kept_once(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    run, kept = write_run(tmp_path / "a", "1110"), tmp_path / "kept.json"
    for _ in range(2):
        monkeypatch.setattr(sys, "argv", ["seeds", run, f"--keep={kept}"])
        seeds.main()
        assert len(json.loads(kept.read_text())) == 1
    assert "Mean and worst" not in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["seeds", f"--keep={kept}", "--pair=ours:control"])
    with pytest.raises(SystemExit):
        seeds.main()
    assert "--pair compares the episodes of runs: name their directories" in capsys.readouterr().err


def test_runs_share_the_machine_and_columns_are_chosen(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    made = launched(monkeypatch)
    asked = ["seeds", "--config=configs/quickstart.py", f"--workdir={tmp_path}", "--run=3", "--at-once=2"]
    monkeypatch.setattr(sys, "argv", [*asked, "--columns=searches_per_question"])
    seeds.main()
    assert sorted(made) == [(0, "native"), (1, "native"), (2, "native")]
    printed = capsys.readouterr().out
    assert "| after RL | 1.3 (worst 1.4) |" in printed
    assert "EM" not in printed
    for wrong, complaint in (("--columns=em,bleu", "bleu is none of em"), ("--at-once=0", "at least one")):
        monkeypatch.setattr(sys, "argv", [*asked, wrong])
        with pytest.raises(SystemExit):
            seeds.main()
        assert complaint in capsys.readouterr().err


def test_groups_of_questions(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    made = [write_run(tmp_path / str(seed), "1110", seed) for seed in (3, 6)]
    monkeypatch.setattr(sys, "argv", ["seeds", *made, "--by=kind"])
    seeds.main()
    printed = capsys.readouterr().out
    assert "| agent | text: EM %, questions with a search % |" in printed
    assert "| ours | 45 (30 to 60), 100 |" in printed
    assert "| ours, seed |" in printed
    monkeypatch.setattr(sys, "argv", ["seeds", *made, "--by=kind", "--of-groups=em"])
    seeds.main()
    assert "| agent | text: EM % |" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["seeds", *made, "--by=type"])
    with pytest.raises(SystemExit, match="--by=type: the runs' questions are grouped by kind"):
        seeds.main()
