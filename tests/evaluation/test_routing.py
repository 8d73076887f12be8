"""Routing decisions against a gold path."""

import pytest

from routerl_jax.evaluation.routing import routing_accuracy, routing_decisions
from tests.evaluation.episodes import call, episode


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ((call("table", "t1"), call("text", "x1")), (2, 2)),
        ((call("text", "x9"), call("table", "t1"), call("text", "x1")), (2, 3)),
        ((call("table", "t9"), call("table", "t1")), (2, 2)),  # the right place, though it missed: asked again there
        ((call("table", "t1"), call("table", "t2")), (1, 2)),
        ((call("table", "t1", "x1"), call("text", "x1")), (1, 2)),  # everything was found: a further search is wrong
        ((), (0, 1)),  # answered without looking
        ((call("table", error="down"),), (1, 1)),
    ],
)
def test_two_hops(calls: tuple, expected: tuple[int, int]) -> None:
    assert routing_decisions(episode(*calls)) == expected


def test_questions_that_need_no_search() -> None:
    assert routing_decisions(episode(path=[])) == (1, 1)
    assert routing_decisions(episode(call("text", "x1"), path=[])) == (0, 1)


def test_accuracy_is_over_decisions() -> None:
    episodes = [episode(call("table", "t1"), call("text", "x1")), episode(), episode(path=None)]
    assert routing_accuracy(episodes) == pytest.approx(2 / 3)
    assert routing_accuracy([episode(path=None)]) is None
