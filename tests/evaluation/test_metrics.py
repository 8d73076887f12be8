"""Summaries of episodes whose numbers can be counted by hand, and routing decisions against a gold path."""

import dataclasses
from typing import Any

import pytest

from routerl_jax.core.types import Action, Episode
from routerl_jax.data.trajectories import GoldenStep
from routerl_jax.evaluation.metrics import (
    asked_knowledge_bases,
    knowledge_base_shares,
    routing_accuracy,
    routing_decisions,
    summarize,
)
from tests.evaluation.episodes import call, episode, looked


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


def test_a_search_is_repeated_where_the_same_is_asked_of_the_same() -> None:
    """Another knowledge base, or other words, are another search; case and spaces are not."""
    first, other = call("text"), call("table")
    elsewhere = dataclasses.replace(first, query="another thing")
    spelled = dataclasses.replace(first, query=f" {first.query.upper()}  ")
    assert first.query.strip()
    rates = [
        summarize([episode(*calls)])["repeated_search_rate"]
        for calls in [(), (first,), (first, other), (first, elsewhere), (first, spelled), (other, first, other)]
    ]
    assert rates == [0, 0, 0, 0, 1, 1]
    assert summarize([episode(first, first), episode(first)])["repeated_search_rate"] == 0.5


def test_golden_steps_are_told_apart() -> None:
    """A sub-question that is asked in other words is no wrong answer."""

    def at(step: GoldenStep, answers: tuple[str, ...], said: str) -> Episode:
        plain = episode(path=None, answer=said)
        example = dataclasses.replace(plain.example, answers=answers, metadata={"step": step})
        return dataclasses.replace(plain, example=example)

    steps = [
        at(GoldenStep(kind="route", history=(), query="who?", retrievers=("none",)), ("who?",), "who was it?"),
        at(GoldenStep(kind="answer", history=(), query="who?", answers=("Verdi",)), ("Verdi",), "Verdi"),
        at(GoldenStep(kind="answer", history=(), query="who?", answers=("Verdi",)), ("Verdi",), "Rossini"),
        at(GoldenStep(kind="final", history=(), answers=("Verdi",)), ("Verdi",), "Verdi"),
    ]
    found = summarize(steps)
    assert {key: found[key] for key in found if key.startswith("em/")} == {
        "em/route": 0,
        "em/answer": 0.5,
        "em/final": 1,
    }
    assert found["em"] == 0.5
    assert "em/final" not in summarize([episode()])


def of(episode: Episode, **metadata: Any) -> Episode:
    example = dataclasses.replace(episode.example, metadata={**episode.example.metadata, **metadata})
    return dataclasses.replace(episode, example=example)


def test_groups() -> None:
    """By what the examples say and tell apart: two data sets; one kind tells nothing, and one question has no type."""
    one = of(episode(call("table", "t1"), call("text", "x1")), dataset="wiki", kind="multi", type="bridge")
    two = of(episode(call("text", "x2"), answer="king"), dataset="wiki", kind="multi", type="bridge")
    three = of(episode(path=None, answer="no"), dataset="popqa", kind="multi", type="author")
    four = of(episode(path=None), dataset="popqa", kind="multi")
    summary = summarize([one, two, three, four])
    assert summary["by"].keys() == {"dataset", "type"}
    wiki, popqa = summary["by"]["dataset"]["wiki"], summary["by"]["dataset"]["popqa"]
    assert wiki == pytest.approx(
        {
            "n": 2,
            "em": 0.5,
            "f1": (1 + 2 / 3) / 2,
            "cover_em": 0.5,
            "substring_em": 0.5,
            "f1_recall": wiki["f1_recall"],
            "anls": 0.5,
            "routing_accuracy": 2 / 3,
            "recall": 0.5,
            "ndcg": 0.5,
            "recall_at_first": 0.25,
            "searches_per_question": 1.5,
            "searched_rate": 1.0,
        }
    )
    assert wiki["f1_recall"] == summarize([one, two])["f1_recall"]
    assert (popqa["n"], popqa["em"], popqa["searches_per_question"]) == (2, 0.5, 0)
    assert "routing_accuracy" not in popqa
    assert {value: row["n"] for value, row in summary["by"]["type"].items()} == {"author": 1, "bridge": 2}
    assert "by" not in summarize([one, two])
    assert summarize([of(one, data_source="nq", dataset=""), two])["by"]["dataset"].keys() == {"nq", "wiki"}
    many = [of(episode(), type=str(i)) for i in range(25)]  # such a type is each question's own
    assert "by" not in summarize(many)


def test_groups_of_several_values() -> None:
    """A question that takes a chart and a table counts in both; one without source types in none."""
    right, wrong = episode(), episode(answer="king")
    asked = [
        of(right, source_type=["chart", "table"]),
        of(wrong, source_type=("chart", "chart")),
        of(right, source_type=[]),
        of(wrong, source_type="text"),
        of(wrong, source_type=["text", 3]),
    ]
    found = summarize(asked)["by"]["source_type"]
    assert {value: (row["n"], row["em"]) for value, row in found.items()} == {
        "chart": (2, 0.5),
        "table": (1, 1.0),
        "text": (1, 0.0),
    }


def test_pages_found() -> None:
    """Means of the questions with gold pages alone: 1, 1 / log2(3) = 0.6309298 and 0."""
    seen = [looked("doc.pdf#1"), looked("doc.pdf#2", "doc.pdf#1"), looked("doc.pdf#2"), looked("doc.pdf#1", gold=())]
    found = summarize(seen)
    assert found["recall"] == pytest.approx(2 / 3)
    assert found["ndcg"] == pytest.approx(1.6309298 / 3, abs=1e-6)
    assert found["recall_at_first"] == pytest.approx(1 / 3)
    assert not {"recall", "ndcg", "recall_at_first"} & summarize(seen[-1:]).keys()


@dataclasses.dataclass(frozen=True)
class Placed:
    """A picture of so many tokens."""

    tokens: int
    digest: str = "d"


def test_looks_and_their_tokens() -> None:
    """Two pages and three crops in two episodes; 20 and 4 tokens in one, none in the other."""
    seen = [looked("doc.pdf#1", "crop", "crop"), looked("doc.pdf#2", "crop")]
    plain = episode().sequences[0]
    seen[0].sequences = [dataclasses.replace(plain, images=((0, Placed(20)), (1, Placed(4)))), plain]
    found = summarize(seen)
    assert (found["crops_per_question"], found["image_tokens_per_question"]) == (1.5, 12)
    assert found["unusable_picture_rate"] == 0
    assert not {"crops_per_question", "image_tokens_per_question"} & summarize([episode()]).keys()


def test_where_it_looked() -> None:
    """The last look counts: half of the gold box, another page, none at all; a question without boxes is left out."""

    def looking(*boxes: tuple[str, tuple[float, ...]], gold: bool = True) -> Episode:
        seen = looked("doc.pdf#1", *["crop"] * len(boxes))
        metadata = {**seen.example.metadata, **({"boxes": {"doc.pdf#1": [0, 0, 10, 20]}} if gold else {})}
        seen.example = dataclasses.replace(seen.example, metadata=metadata)
        crops = iter(boxes)
        for turn in seen.turns:
            turn.shown = [
                dataclasses.replace(item, passage=(crop := next(crops))[0], box=crop[1]) if item.parent else item
                for item in turn.shown
            ]
        return seen

    exact = ("doc.pdf#1", (0, 0, 10, 20))
    half = looking(exact, ("doc.pdf#1", (0, 0, 10, 10)))
    wide = looking(("doc.pdf#1", (0, 10, 20, 20)))  # 100 of 300
    elsewhere = looking(exact, ("doc.pdf#2", (0, 0, 10, 20)))
    assert summarize([half])["box_iou"] == 0.5
    assert summarize([half, wide, elsewhere, looking(), looking(exact, gold=False)])["box_iou"] == pytest.approx(5 / 18)
    assert "box_iou" not in summarize([looking()])


def test_who_finishes() -> None:
    """One answers by itself, one is made to, one never does."""
    forced = looked("doc.pdf#1")
    forced.turns[-1].forced = "<answer>"
    found = summarize([looked("doc.pdf#1"), forced, looked("doc.pdf#1", answer=None)])
    assert (found["finish_rate"], found["forced_rate"]) == pytest.approx((1 / 3, 1 / 3))


def test_no_gold_path_no_routing() -> None:
    assert "routing_accuracy" not in summarize([episode(path=None)])


def test_nothing_to_summarise() -> None:
    with pytest.raises(ValueError, match="no episodes"):
        summarize([])


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
