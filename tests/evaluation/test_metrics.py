"""Summaries of episodes whose numbers can be counted by hand."""

import pytest

from routerl_jax.evaluation.metrics import summarize
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
    assert summary["em_interval"] == [0, 1]  # four wrong draws, or four right ones: each 1/16 > 2.5 %


def test_no_gold_path_no_routing() -> None:
    assert "routing_accuracy" not in summarize([episode(path=None)])


def test_nothing_to_summarise() -> None:
    with pytest.raises(ValueError, match="no episodes"):
        summarize([])
