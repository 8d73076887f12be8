"""Summaries of episodes whose numbers can be counted by hand."""

import numpy as np
import pytest

from routerl_jax.evaluation.metrics import bootstrap_interval, summarize
from tests.evaluation.episodes import call, episode


def test_summary() -> None:
    episodes = [
        episode(call("table", "t1"), call("text", "x1")),  # 3 turns, right
        episode(call("text", "x2"), answer="a lion", invalid=1),  # 3 turns; "a" is no word of an answer
        episode(call("text", error="down"), answer=None, truncated=True),  # 1 turn
        episode(answer="king"),  # 1 turn, shares a word with "the lion king"
    ]
    summary = summarize(episodes)
    assert summary["n"] == 4
    assert summary["em"] == pytest.approx(0.5)
    assert summary["f1"] == pytest.approx((1 + 1 + 0 + 2 / 3) / 4)
    assert summary["searches_per_question"] == pytest.approx(1.0)
    assert summary["invalid_action_rate"] == pytest.approx(1 / 8)
    assert summary["answered_rate"] == pytest.approx(0.75)
    assert summary["truncated_rate"] == pytest.approx(0.25)
    assert summary["tool_error_rate"] == pytest.approx(1 / 4)
    assert summary["tokens_per_question"] == pytest.approx(16 / 4)
    assert summary["kb_share"] == {"table": 0.25, "text": 0.75}
    assert summary["routing_accuracy"] == pytest.approx((2 + 0 + 0 + 0) / 5)
    low, high = summary["em_interval"]
    assert 0 <= low < 0.5 < high <= 1


def test_no_gold_path_no_routing() -> None:
    assert "routing_accuracy" not in summarize([episode(path=None)])


def test_nothing_to_summarise() -> None:
    with pytest.raises(ValueError, match="no episodes"):
        summarize([])


def test_interval_shrinks_with_the_sample_and_repeats() -> None:
    rng = np.random.default_rng(0)
    small, large = (bootstrap_interval(rng.integers(0, 2, n)) for n in (50, 5000))
    assert large[1] - large[0] < (small[1] - small[0]) / 5
    values = rng.random(200)
    assert bootstrap_interval(values) == bootstrap_interval(values)
    # about the normal interval, for a mean of 2,000
    values = rng.random(2000)
    low, high = bootstrap_interval(values)
    half = 1.96 * values.std() / np.sqrt(len(values))
    assert (high - low) / 2 == pytest.approx(half, rel=0.15)
