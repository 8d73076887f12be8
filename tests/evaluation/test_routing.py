"""Routing decisions against a gold path."""

import dataclasses

import pytest

from routerl_jax.core.types import Action, Episode
from routerl_jax.data.trajectories import GoldenStep
from routerl_jax.evaluation.metrics import (
    asked_knowledge_bases,
    knowledge_base_shares,
    routing_accuracy,
    routing_decisions,
)
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


def test_asking_none_of_the_right_knowledge_bases_is_wrong_and_no_other_division() -> None:
    lost = [episode(call("elements", "x9"))] * 3
    assert routing_accuracy(lost, ("text", "table", "elements")) == 0
    assert routing_accuracy(lost, ("elements", "web")) is None  # gold paths are of text and table
    assert routing_accuracy(lost) is None


def golden(tool: str, kind: str = "route") -> Episode:
    """A golden step whose gold is the text retriever, at which the policy named `tool`."""
    step = GoldenStep(kind=kind, history=(), query="q", retrievers=("text retriever",))
    plain = episode(path=None)
    example = dataclasses.replace(plain.example, metadata={"step": step})
    action = Action(kind="search", tool=tool, query="q") if tool else Action(kind="invalid", error="no tags")
    turns = [dataclasses.replace(turn, action=action, calls=[]) for turn in plain.turns[-1:]]
    return dataclasses.replace(plain, example=example, turns=turns)


def test_a_golden_route_counts_by_the_knowledge_base_that_it_names() -> None:
    """It searches nothing, so that the share of each in training would be empty."""
    episodes = [golden("text"), golden("text_image"), golden("none"), golden("")]
    assert [asked_knowledge_bases(one) for one in episodes] == [["text"], ["text_image"], [], []]
    assert knowledge_base_shares(episodes) == {"text": 0.5, "text_image": 0.5}
    assert [routing_decisions(one) for one in episodes] == [(1, 1), (0, 1), (0, 1), (0, 1)]
    assert routing_decisions(golden("text", "answer")) is None
    assert asked_knowledge_bases(episode(call("table", "t1"))) == ["table"]
