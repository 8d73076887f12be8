"""`python -m launch.score` as a user runs it: its table, its JSON and its error messages."""

import json
import pathlib
import subprocess
from typing import Any

import pytest

from tests.programs import launch

ROWS: list[dict[str, Any]] = [
    {"id": "1", "prediction": "The Eiffel Tower", "golden_answers": ["eiffel tower"], "dataset": "d", "model": "x"},
    {"id": "2", "prediction": "well known", "golden_answers": "well-known", "dataset": "d", "model": "x"},
    {"id": "3", "pred_answer": None, "golden_answers": ["Paris"], "dataset": "[d]", "model": "y"},
]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return launch("score", *arguments)


@pytest.fixture
def predictions(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "predictions.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in ROWS))
    return path


def test_json(predictions: pathlib.Path) -> None:
    done = run(f"--predictions={predictions}", "--normalizer=r1_searcher", "--group=dataset,model", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["n"], result["em"], result["normalizer"]) == (3, pytest.approx(2 / 3), "r1_searcher")
    assert {name: (group["n"], group["f1"]) for name, group in result["groups"].items()} == {
        "d/x": (2, 1.0),
        "[d]/y": (1, 0.0),
    }
    low, high = result["intervals"]["em"]
    assert 0.0 <= low <= result["em"] <= high <= 1.0


def test_table(predictions: pathlib.Path) -> None:
    done = run(f"--predictions={predictions}", "--group=dataset,model")
    assert done.returncode == 0, done.stderr
    assert all(title in done.stdout for title in ("EM", "CEM", "SubEM", "F1", "F1-Recall", "d/x", "[d]/y", "search_r1"))
    overall = next(line for line in done.stdout.splitlines() if " all " in line)
    assert [cell for cell in overall.split() if cell[0].isalnum()] == ["all", "3", *["33.33"] * 5]


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        (None, (), "absent.jsonl: No such file"),
        ("{", (), "rows.jsonl, line 1: not JSON"),
        ('{"prediction": "x"}', (), "rows.jsonl, line 1: key 'golden_answers' is missing"),
        ('{"prediction": "x", "golden_answers": "x"}', ("--normalizer=squad",), "unknown normalizer 'squad'"),
        (
            '{"prediction": "x", "golden_answers": "x"}',
            ("more.jsonl",),
            "launch.score: unexpected argument 'more.jsonl'",
        ),
    ],
)
def test_bad_input(tmp_path: pathlib.Path, text: str | None, arguments: tuple[str, ...], message: str) -> None:
    path = tmp_path / ("absent.jsonl" if text is None else "rows.jsonl")
    if text is not None:
        path.write_text(text)
    done = run(f"--predictions={path}", "--json", *arguments)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
