"""Reading of prediction files, with every way a row can be wrong, and the bootstrap."""

import gzip
import json
import pathlib
from typing import Any

import numpy as np
import pytest
from scipy import stats

from routerl_jax.rewards import scoring
from routerl_jax.rewards.metrics import ANSWER_METRICS

ROWS: list[dict[str, Any]] = [
    {"id": "1", "question": "?", "prediction": "The Eiffel Tower", "golden_answers": ["eiffel tower"], "model": "x"},
    {"id": 2, "question": "?", "pred_answer": "Nidal Malik Hasan", "golden_answers": "Nidal Hasan", "model": "x"},
    {"id": "3", "question": "?", "prediction": None, "golden_answers": ["Paris"], "model": "y"},
    {"question": "?", "prediction": "line\u2028separator", "golden_answers": ["x", "y"], "model": "y"},
]


def write(path: pathlib.Path, *rows: Any) -> pathlib.Path:
    """Rows as JSON lines; a string is written as it is."""
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    data = "\n".join(lines).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
def test_read_and_score(tmp_path: pathlib.Path, name: str) -> None:
    rows = scoring.read_predictions(write(tmp_path / name, ROWS[0], "", *ROWS[1:], ""), group=("model",))
    assert [row.id for row in rows] == ["1", "2", "3", None]
    assert rows[1].golds == ("Nidal Hasan",)
    scores = scoring.score_rows(rows, "search_r1")
    # Columns: em, cover_em, substring_em, f1, f1_recall, anls: an edit of 4 characters, 6 of 17.
    expected = [[1, 1, 1, 1, 1, 3 / 4], [0, 1, 0, 0.8, 1, 11 / 17], [0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]]
    np.testing.assert_allclose(scores, expected)

    overall = scoring.summarize(scores).to_json()
    assert overall["n"] == 4
    assert [overall[metric] for metric in ANSWER_METRICS] == pytest.approx(
        [0.25, 0.5, 0.25, 0.45, 0.5, (3 / 4 + 11 / 17) / 4]
    )
    groups = scoring.summarize_groups(rows, scores)
    assert {name: (report.n, report.means["em"]) for name, report in groups.items()} == {"x": (2, 0.5), "y": (2, 0.0)}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("[1, 2]", r"line 2: expected an object, found list"),
        ({"golden_answers": ["x"]}, r"line 2: .*'prediction' and 'pred_answer'; neither is present"),
        ({"prediction": "x", "pred_answer": "y", "golden_answers": ["x"]}, r"line 2: .*both are present"),
        ({"prediction": 3, "golden_answers": ["x"]}, r"line 2: key 'prediction' must be a string.*got 3"),
        ({"prediction": "x"}, r"line 2: key 'golden_answers' is missing"),
        ({"prediction": "x", "golden_answers": None}, r"line 2: key 'golden_answers' is missing"),
        ({"prediction": "x", "golden_answers": [True]}, r"line 2: key 'golden_answers' must be a string"),
        ({"prediction": "x", "golden_answers": "['a' ..."}, r"line 2: key 'golden_answers' .* as a list"),
        ({"prediction": "x", "golden_answers": "x", "answer_eval": ["y"]}, r"line 2: key 'answer_eval' is not read"),
        ({"prediction": "x", "golden_answers": []}, r"line 2: key 'golden_answers' holds no answer"),
        ({"prediction": "x", "golden_answers": " "}, r"line 2: key 'golden_answers' holds no answer"),
        ({"id": "1", "prediction": "x", "golden_answers": "x"}, r"line 2: duplicate id '1', first seen in line 1"),
    ],
)
def test_bad_rows_name_the_file_line_and_key(tmp_path: pathlib.Path, bad: Any, message: str) -> None:
    path = write(tmp_path / "rows.jsonl", ROWS[0], bad)
    with pytest.raises(ValueError, match=r"rows\.jsonl, " + message):
        scoring.read_predictions(path)


def test_no_rows(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match="holds no predictions"):
        scoring.read_predictions(write(tmp_path / "empty.jsonl", ""))


def test_groups(tmp_path: pathlib.Path) -> None:
    row = {"id": "1", "prediction": "x", "golden_answers": "x"}
    path = write(tmp_path / "rows.jsonl", {**row, "model": "a"}, {**row, "model": "b"})
    assert len(scoring.read_predictions(path, group=("model",))) == 2  # the same question, two systems
    with pytest.raises(ValueError, match=r"duplicate id '1'.*--group=model"):
        scoring.read_predictions(path)
    with pytest.raises(ValueError, match=r"line 1: key 'dataset' of --group is missing"):
        scoring.read_predictions(path, group=("model", "dataset"))


def test_bootstrap_interval_matches_the_normal_approximation() -> None:
    # 400 coin flips: the standard error is 0.025, so the interval is 0.5 -+ 0.049. Tolerance: the Monte Carlo error of
    # a 2.5% quantile from 1,000 resamples is about 0.002, and means come in steps of 0.0025.
    scores = np.stack([np.arange(400) % 2, np.ones(400)], axis=1).astype(float)
    intervals = scoring.bootstrap_intervals(scores)
    np.testing.assert_allclose(intervals[:, 0], [0.451, 0.549], atol=0.006)
    np.testing.assert_allclose(intervals[:, 1], stats.binomtest(400, 400).proportion_ci(method="wilson"), atol=1e-6)
    np.testing.assert_array_equal(intervals, scoring.bootstrap_intervals(scores))  # the same numbers every time


def test_bootstrap_interval_shrinks_with_the_sample() -> None:
    rng = np.random.default_rng(0)
    small, large = (np.ptp(scoring.bootstrap_intervals(rng.integers(0, 2, (n, 1)))) for n in (50, 5000))
    assert large < small / 5
    values = rng.random((2000, 1))  # not only coin flips; tolerance: Monte Carlo error, as above
    half = 1.96 * values.std() / np.sqrt(len(values))
    assert np.ptp(scoring.bootstrap_intervals(values)) / 2 == pytest.approx(half, rel=0.15)


@pytest.mark.parametrize("value", [0, 1])
def test_intervals_at_the_ends_are_score_intervals(value: int) -> None:
    """Wilson's as scipy has it; for differences Tango's, whose ends solve n (d - x)^2 = z^2 v(x), v the variance at x."""
    wilson = stats.binomtest(20 * value, 20).proportion_ci(method="wilson")
    np.testing.assert_allclose(scoring.bootstrap_intervals(np.full((20, 1), value))[:, 0], wilson, atol=1e-6)
    low, high = scoring.bootstrap_intervals(np.full((20, 1), value), differences=True)[:, 0]
    variance = (
        1 - low**2 if value else -low - low**2
    )  # all questions won, or none differs: what makes this result likeliest
    assert 20 * (value - low) ** 2 == pytest.approx(stats.norm.ppf(0.975) ** 2 * variance, rel=1e-5)
    assert high == (1 if value else -low)


def test_intervals_have_the_variance_between_seeds() -> None:
    """All right with one seed and all wrong with the other: of the draws of two seeds, a quarter are all right."""
    scores = np.stack([np.ones((50, 1)), np.zeros((50, 1))])
    np.testing.assert_array_equal(scoring.bootstrap_intervals(scores)[:, 0], [0, 1])
    holes = np.where(np.arange(50)[:, None] < 10, np.nan, [[1.0]])  # what is nan has no part
    np.testing.assert_allclose(scoring.bootstrap_intervals(holes)[:, 0], [40 / (40 + 1.959964**2), 1])
