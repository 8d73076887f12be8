"""The table of several runs: two agents of each, question by question."""

import json
import pathlib
import sys

import pytest

from benchmarks import seeds
from routerl_jax.evaluation.records import write_records
from tests.evaluation.test_paired import record


def write_run(workdir: pathlib.Path, right: str) -> str:
    """A run whose policy, called `ours`, is right at these questions, and its control at none of four."""
    found = {"em": 0.5, "searches_per_question": 1.0}
    workdir.mkdir()
    results = {"agents": {"ours": found, "control": found}, "seconds": {"total": 3.0}}
    (workdir / "results.json").write_text(json.dumps(results))
    evaluation = {"normalizer": "search_r1", "names": {"trained": "ours"}}
    (workdir / "config.json").write_text(json.dumps({"evaluation": evaluation}))
    for place, answers in ((workdir, right), (workdir / "controls" / "control", "0000")):
        (place / "evaluation").mkdir(parents=True)
        records = [record(i, answer == "1", 1.0) for i, answer in enumerate(answers)]
        write_records(place / "evaluation" / "trained.jsonl", records)
    return str(workdir)


def test_pairs_over_seeds(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    runs = [write_run(tmp_path / "a", "1110"), write_run(tmp_path / "b", "1000")]
    monkeypatch.setattr(sys, "argv", ["seeds", *runs, "--pair=ours:control"])
    seeds.main()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ours - control")]
    assert [line.split(" | ")[1] for line in lines] == ["0", "1", "all"]
    assert [line.split(" | ")[2].split()[0] for line in lines] == ["+75.0", "+25.0", "+50.0"]
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
