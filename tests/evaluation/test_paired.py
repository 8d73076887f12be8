"""Comparisons question by question, against numbers counted by hand and scipy's binomial test."""

import json
from typing import Any
from unittest import mock

import matplotlib.image
import matplotlib.pyplot
import numpy as np
import pytest
from matplotlib.collections import PathCollection
from scipy.stats import binomtest

from routerl_jax.core.types import Call
from routerl_jax.evaluation import analysis_figure as analysis_module
from routerl_jax.evaluation.analysis import analyse
from routerl_jax.evaluation.analysis_figure import analysis_figure
from routerl_jax.evaluation.paired import compare_records, compare_seeds
from routerl_jax.evaluation.records import episode_record
from tests.evaluation.episodes import episode


def record(key: int, right: bool, *costs: float, tool: str = "graph") -> dict:
    calls = [Call(tool=tool, query="q", cost=cost) for cost in costs]
    made = episode_record(episode(*calls, answer="lion" if right else "cat"))
    return json.loads(json.dumps(made)) | {"id": str(key)}


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


def drawn(picture: np.ndarray, rows: int, columns: int = 4) -> int:
    """How many panels of a grid have something in their inner halves."""
    height, width = picture.shape[0] // rows, picture.shape[1] // columns
    inner = np.s_[height // 4 : 3 * height // 4, width // 4 : 3 * width // 4]
    panels = [picture[i * height :, j * width :][inner] for i in range(rows) for j in range(columns)]
    return sum(panel.std(axis=(0, 1)).max() > 0 for panel in panels)


def test_an_analysis_by_hand(tmp_path):
    before = [record(0, False, 2.0, 2.0), record(1, True, 1.0, tool="passage"), record(2, True)]
    after = [record(0, True, 1.0, tool="passage"), record(1, True, 1.0, tool="passage"), record(2, True)]
    found = analyse({"warm_start": before, "trained": after})
    assert found["warm_start"]["turns"] == pytest.approx(2)  # 3, 2 and 1
    assert found["warm_start"]["searches"] == pytest.approx(1)
    assert found["warm_start"]["retrieval_cost"] == pytest.approx(5 / 3)
    assert found["warm_start"]["mode_usage"] == pytest.approx({"graph": 2 / 3, "passage": 1 / 3})
    assert found["warm_start"]["tokens"] == pytest.approx(4)  # two sampled tokens a turn
    assert found["warm_start"]["em_by_turns"] == [
        {"turns": 1, "em": 1.0, "n": 1},
        {"turns": 2, "em": 1.0, "n": 1},
        {"turns": 3, "em": 0.0, "n": 1},
    ]
    assert found["trained"]["em_by_turns"] == [{"turns": 1, "em": 1.0, "n": 1}, {"turns": 2, "em": 1.0, "n": 2}]
    assert found["trained"]["mode_usage"] == {"passage": 1.0}
    assert found["warm_start"]["mode_by_step"] == [
        {"step": 1, "mode_usage": pytest.approx({"graph": 0.5, "passage": 0.5}), "n": 2},
        {"step": 2, "mode_usage": {"graph": 1.0}, "n": 1},
    ]
    assert found["warm_start"]["searches_of_correct"] == {"mean": 0.5, "share": {"0": 0.5, "1": 0.5}}
    for rows in found.values():  # every episode is in one bin
        assert sum(row["n"] for row in rows["em_by_tokens"]) == 3
    assert found["trained"]["by"] == {}
    path = tmp_path / "figures" / "analysis.png"
    trials = {"top_k": {"1": found["trained"], "2": found["trained"]}, "single_mode": found, "retrievers": found}
    training = [
        {"step": i, "reward/total": 0.1 * i, "reward/std": 0.1, "rollout/tokens_per_question": 30.0} for i in range(4)
    ]
    figures: list[Any] = []
    with mock.patch.object(analysis_module, "save_figure", lambda figure, _: figures.append(figure)):
        analysis_figure({"policies": found, **trials}, path, training)
    artists = [artist for axis in figures[0].axes for artist in [*axis.lines, *axis.collections]]
    marked = [a for a in artists if isinstance(a, PathCollection) or getattr(a, "get_marker", str)() in ("o", "s")]
    assert len(marked) >= 8
    assert not any(artist.get_clip_on() for artist in marked)  # those at the edge are drawn whole
    matplotlib.pyplot.close(figures[0])
    analysis_figure({"policies": found, **trials}, path, training)
    everything = matplotlib.image.imread(path)
    analysis_figure({"policies": found}, path)
    less = matplotlib.image.imread(path)
    assert drawn(everything, rows=3) == 12
    assert drawn(less, rows=2) == 7  # what was not tried has no panel
    kinds = [{**row, "metadata": {"kind": kind}} for row, kind in zip(before, ("table", "text", "text"))]
    found = analyse({"trained": kinds})
    by = found["trained"]["by"]["kind"]
    assert (by["table"]["n"], by["table"]["em"], by["text"]["n"], by["text"]["em"]) == (1, 0, 2, 1)
    assert [step["mode_usage"] for step in by["table"]["mode_by_step"]] == [{"graph": 1.0}] * 2
    assert by["text"]["searches_of_correct"] == {"mean": 0.5, "share": {"0": 0.5, "1": 0.5}}
    analysis_figure({"policies": found}, path)
    assert (
        drawn(matplotlib.image.imread(path), rows=3) == 7 + 2
    )  # what each kind was asked, and how often the right ones were
    with pytest.raises(ValueError, match="trained has no episodes"):
        analyse({"warm_start": before, "trained": []})
    with pytest.raises(ValueError, match=r"warm_start and trained were not asked the same questions; .*\['2'\]"):
        analyse({"warm_start": before, "trained": after[:2]})
