"""Recall and NDCG of what searches showed, by hand: 1 / log2(i + 1) is 1, 0.6309298, 0.5, 0.4306766 at places 1 to 4."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from routerl_jax.core.types import Action, Call, Episode, Example, Passage, Shown
from routerl_jax.rewards.retrieval import Retrieval, retrieval
from routerl_jax.rewards.terms import RewardFunction, judged
from tests.evaluation.episodes import call, episode, looked

A, B, C, X, Y = (f"doc.pdf#{number}" for number in (1, 2, 3, 8, 9))


def of(seen: Episode) -> Retrieval:
    found = retrieval(seen)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("steps", "gold", "ndcg", "recall", "first"),
    [
        ((A,), (A,), 1.0, 1.0, 1.0),
        ((X, A), (A,), 0.6309298, 1.0, 0.0),
        ((X, A, C), (A, C), 1.1309298 / 1.6309298, 1.0, 0.0),
        ((A,), (A, C), 1 / 1.6309298, 0.5, 0.5),
        ((A, "crop", "crop", C), (A, C), 1.0, 1.0, 0.5),  # crops have no place
        ((X, Y, A), (A, B, C), 0.5 / 2.1309298, 1 / 3, 0.0),
        ((A, A, C), (A, C), 1.0, 1.0, 0.5),  # the second A is no new page
        ((A, X, A), (A,), 1.0, 1.0, 1.0),  # shown again later, a page keeps its first place
        ((X, A, X), (A,), 0.6309298, 1.0, 0.0),  # and takes no place from the pages between
        ((X, A, Y, X, C), (A, C), (0.6309298 + 0.4306766) / 1.6309298, 1.0, 0.0),
        ((None, A), (A,), 1.0, 1.0, 0.0),  # a search that showed nothing takes no place, but it was the first
        ((X, Y), (A,), 0.0, 0.0, 0.0),
        ((), (A,), 0.0, 0.0, 0.0),
        (("crop", A), (A,), 1.0, 1.0, 1.0),
        (("doc_1.jpg#1", "in/doc_003"), (A, C), 1.0, 1.0, 0.5),
        ((A,), (A, A), 1.0, 1.0, 1.0),
    ],
)
def test_by_hand(
    steps: tuple[str | None, ...], gold: tuple[str, ...], ndcg: float, recall: float, first: float
) -> None:
    found = of(looked(*steps, gold=gold))
    assert (found.ndcg(), found.recall(), found.recall_at_first()) == pytest.approx((ndcg, recall, first), abs=1e-6)


def test_repeats_gain_again_as_released() -> None:
    """A, A, C: (1 + 0.6309298 + 0.5) / 1.6309298, and with one gold page more than the ideal."""
    assert of(looked(A, A, C, gold=(A, C))).ndcg(repeats=True) == pytest.approx(2.1309298 / 1.6309298, abs=1e-6)
    assert of(looked(A, A)).ndcg(repeats=True) == pytest.approx(1.6309298, abs=1e-6)
    assert of(looked(X, X, A)).ndcg(repeats=True) == pytest.approx(0.5)
    assert of(looked(X, X, A)).ndcg() == pytest.approx(0.6309298, abs=1e-6)


def test_without_repeats_both_are_the_formula_of_the_paper() -> None:
    """Against equations 7 and 8 written down with numpy, over drawn orders."""
    rng = np.random.default_rng(0)
    pages = [f"doc.pdf#{number}" for number in range(1, 9)]
    for _ in range(50):
        shown = [pages[i] for i in rng.permutation(8)[: rng.integers(1, 6)]]
        gold = tuple(pages[i] for i in rng.permutation(8)[: rng.integers(1, 5)])
        relevance = np.asarray([page in gold for page in shown], float)
        discounts = np.log2(np.arange(2, 12))
        expected = ((2**relevance - 1) / discounts[: len(shown)]).sum() / (1 / discounts[: len(gold)]).sum()
        found = of(looked(*shown, gold=gold))
        assert found.ndcg() == pytest.approx(expected)
        assert found.ndcg(repeats=True) == pytest.approx(expected)
        assert found.recall() == pytest.approx(relevance.sum() / len(gold))


def test_a_picture_that_could_not_be_shown_was_not_seen() -> None:
    seen = looked(X, A)
    seen.turns[1].shown = [Shown(passage=A, image="x", error="damaged")]
    assert of(seen).recall() == 0.0


def test_several_passages_a_search_and_text_alone() -> None:
    """Of Atlas's path: the first search shows two, the second the one that is missing; titles are compared, too."""
    seen = episode(call("text", "z1", "t1"), call("text", "x1"))
    for turn in seen.turns[:2]:
        turn.observation, turn.shown = "..", [Shown(passage=one.id) for one in turn.calls[0].passages]
    found = of(seen)
    assert (found.recall(), found.recall_at_first()) == (1.0, 0.5)
    assert found.ndcg() == pytest.approx((0.6309298 + 0.5) / 1.6309298, abs=1e-6)
    titled = dataclasses.replace(seen.example, metadata={"supporting": ["other"], "supporting_titles": ["title t1"]})
    assert of(dataclasses.replace(seen, example=titled)).recall() == 1.0


def test_an_id_means_something_only_with_its_knowledge_base() -> None:
    """Number 1 of the tables is another passage than number 1 of the texts; the same text by another way is not."""
    gold = {"supporting": ["2"]}
    one, two = Passage(id="1", title="", text="a"), Passage(id="2", title="", text="gold")
    other = Passage(id="1", title="", text="b")
    for second, expected in ((other, 0.5), (dataclasses.replace(one, score=3.0), 0.6309298)):
        seen = episode(call("text", "1"), call("table", "1"), call("text", "2"))
        for turn, passage in zip(seen.turns, (one, second, two)):
            turn.calls[:] = [dataclasses.replace(turn.calls[0], passages=(passage,))]
            turn.observation, turn.shown = "..", [Shown(passage=passage.id)]
        seen = dataclasses.replace(seen, example=dataclasses.replace(seen.example, metadata=gold))
        assert of(seen).searches == ((one,), (second,), (two,))
        assert of(seen).ndcg() == pytest.approx(expected, abs=1e-6)
    both = [
        dataclasses.replace(one, tool=tool, passages=(passage,))
        for one, tool, passage in zip(seen.turns[0].calls * 2, ("text", "table"), (one, other))
    ]
    seen.turns[0].calls[:], seen.turns[0].shown = both, [Shown(passage="1"), Shown(passage="1")]
    assert of(seen).searches[0] == (one, other)
    assert of(seen).ndcg() == pytest.approx(0.5, abs=1e-6)  # a, b, (a again,) gold


def test_what_stands_in_the_prompt_is_what_was_found() -> None:
    seen = episode(call("text", "z1", "t1"))
    assert of(seen).searches == (tuple(seen.calls[0].passages),)
    assert of(seen).recall_at_first() == 0.5


def test_a_search_before_its_turn_is_in_the_prompt_whatever_follows() -> None:
    """A reader that is asked again for its answer: its observation is no result of the search."""
    seen = episode(call("text", "z1", "t1"))
    seen.turns[0].observation = "Now write the answer alone."
    for kind, recall in (("invalid", 0.5), ("answer", 0.5), ("search", 0.0)):
        seen.turns[0].action = Action(kind=kind)
        assert of(seen).recall() == recall


def test_a_search_whose_results_are_read_in_another_chat() -> None:
    seen = episode(call("text", "z1", "t1"), call("text", "x1"))
    for turn in seen.turns:
        turn.action, turn.observation = Action(kind="search"), "What helps: .."
    assert of(seen).recall() == 0.0
    for number, turn in enumerate(seen.turns):
        turn.sequence = number
    assert of(seen).recall() == 1.0


def test_passages_that_an_observation_shows_without_naming_them() -> None:
    seen = episode(call("text", "z1", "t1"), call("text", "x1"))
    for turn in seen.turns[:2]:
        turn.action = Action(kind="search")
    shown = seen.turns[0].calls[0].passages[1]
    seen.turns[0].observation = f"(1) {shown.title}:  {shown.text}\n"
    seen.turns[1].observation = "Nothing fits."
    assert of(seen).searches == ((shown,), ())


def test_unknown_gold_passages() -> None:
    assert retrieval(looked(A, gold=())) is None
    assert retrieval(episode(path=None)) is None
    assert isinstance(of(looked(A)).searches[0][0], Passage)


def test_the_reward_for_gold_passages_is_the_share_that_searches_showed() -> None:
    """Of two pages one, none, both (one of them twice); one that was found and not shown; no search; no gold pages."""
    attempts = [
        looked(X, A, gold=(A, C)),
        looked(X, Y, gold=(A, C)),
        looked(A, A, C, gold=(A, C)),
        looked(None, gold=("doc.pdf#98", C)),
        looked(gold=(A,)),
        looked(A, gold=()),
    ]
    rows = RewardFunction({"em": 1.0, "found": 0.5})(attempts)
    assert [row["found"] for row in rows] == [0.25, 0.0, 0.5, 0.0, 0.0, 0.0]
    assert rows[0]["total"] == 1.25
    assert judged("found", attempts) == attempts[:5]  # the mean leaves out the question without gold pages


def of_texts(*texts: str, answers: tuple[str, ...], **metadata: object) -> Episode:
    """One search for each text; agents that don't name what they show."""
    seen = episode(*(Call(tool="text", query="q", passages=(Passage(id="1", title="", text=text),)) for text in texts))
    asked = Example(id="e", question="Which?", answers=answers, metadata=metadata)
    return dataclasses.replace(seen, example=asked)


@pytest.mark.parametrize(
    ("text", "answers", "expected"),
    [
        ("Roncole, where Verdi was born.", ("Le Roncole", "Roncole"), 1),
        ("A party in the West.", ("art",), 0),  # words, not letters
        ("He was born in New Jersey; York is old.", ("New York",), 0),  # one after the other
        ("The U.S. Senate", ("US senate",), 1),
        ("El Niño came.", ("El Nin\u0303o",), 1),
        ("首都は東京都です", ("東京",), 1),
        ("No, not yet.", ("no",), 0),  # says nothing
        ("No, Paris.", ("no", "Paris"), 1),
        ("", ("Paris",), 0),
    ],
)
def test_an_answer_is_found_where_a_passage_states_it(text: str, answers: tuple[str, ...], expected: float) -> None:
    attempts = [of_texts("Nothing.", text, answers=answers), of_texts(answers=answers)]
    rows = RewardFunction({"answer_found": 1.0})(attempts)
    assert [row["answer_found"] for row in rows] == [expected, 0]
    assert bool(judged("answer_found", attempts)) == (answers != ("no",))


def test_an_answer_is_found_in_a_title_and_as_a_number_within_its_range() -> None:
    reward = RewardFunction({"answer_found": 1.0})
    [titled] = reward([dataclasses.replace(looked(A), example=Example(id="e", question="?", answers=("Aida",)))])
    assert titled["answer_found"] == 0  # pages that are pictures state nothing
    aida = episode(Call(tool="text", query="q", passages=(Passage(id="1", title="Aida", text="An opera."),)))
    aida = dataclasses.replace(aida, example=Example(id="e", question="Which?", answers=("Aida",)))
    high, low = (
        of_texts(f"It is {metres:,} metres high.", answers=("1,300 m",), answer_ranges=[[1250, 1350]])
        for metres in (1310, 1400)
    )
    assert [row["total"] for row in reward([aida, high, low])] == [1, 1, 0]


def test_an_answer_that_was_retrieved_but_not_shown_was_not_found() -> None:
    seen = of_texts("Paris is the capital.", answers=("Paris",))
    for observation, expected in (("Paris is the  capital.", 1), ("Too long.", 0)):
        seen.turns[0].action, seen.turns[0].observation = Action(kind="search"), observation
        assert RewardFunction({"answer_found": 1.0})([seen])[0]["total"] == expected
