"""Comparisons question by question, against numbers counted by hand and scipy's binomial test."""

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
    assert np.isnan(found["mcnemar_p"])  # a question is counted once for each run
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
