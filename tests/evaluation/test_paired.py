"""Comparisons question by question, against numbers counted by hand and scipy's binomial test."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from scipy.stats import binomtest

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
