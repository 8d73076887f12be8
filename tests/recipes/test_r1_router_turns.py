"""Rewards of turns on the policy's own prefix: which hop a turn is judged by, in both kinds of agents."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from routerl_jax.agents.grammar import NO_TOOL
from routerl_jax.core.types import Action, Call, Episode, Example, Passage, Turn
from routerl_jax.data.gold_paths import GoldHop, gold_path
from routerl_jax.knowledge.encoders import shared_encoder
from routerl_jax.learning.advantages import rewards_to_go
from routerl_jax.recipes.r1_router.rewards import (
    similarities,
    turn_answer_reward,
    turn_format_reward,
    turn_route_reward,
)
from routerl_jax.rewards.terms import RewardFunction, TurnTerm

HOPS = (
    {"kb": "text", "passage_id": "p1", "query": "who wrote Aida", "value": "Giuseppe Verdi"},
    {"kb": "table", "passage_id": "p2", "query": "where was Verdi born", "value": "Le Roncole"},
)
EXAMPLE = Example(id="q", question="?", answers=("Le Roncole", "Roncole Verdi"), metadata={"path": HOPS})
HIT = {"p1": Passage(id="p1", title="", text="Aida is by Giuseppe Verdi"), "p2": Passage(id="p2", title="", text="x")}


def route(tool: str, query: str, found: str = "", *, asked: str = "", well_formed: bool = True) -> Turn:
    calls = [Call(tool=tool, query=query, passages=(HIT[found],) if found else ())]
    action = Action(kind="search", tool=tool, query=query)
    return Turn(text="", stop_reason="stop", tokens=1, action=action, well_formed=well_formed, calls=calls, asked=asked)


def answer(text: str, *, asked: str = "", well_formed: bool = True) -> Turn:
    action = Action(kind="answer", answer=text)
    return Turn(text="", stop_reason="stop", tokens=1, action=action, well_formed=well_formed, asked=asked)


def episode(*turns: Turn, answer: str | None = "Le Roncole", **metadata: Any) -> Episode:
    example = dataclasses.replace(EXAMPLE, metadata=metadata) if metadata else EXAMPLE
    return Episode(example=example, sample=0, answer=answer, turns=list(turns), sequences=[])


INVALID = Turn(text="", stop_reason="stop", tokens=1, action=Action(kind="invalid", error="?"))
GOOD = ("who wrote aida", "where was verdi born")


def test_a_growing_conversation_is_judged_by_what_it_has_found() -> None:
    """The first search goes astray, so the second is judged by the same hop, and earns what the first did not; the third by the
    next; the fourth is too much."""
    turns = (
        route("table", GOOD[0]),
        INVALID,
        route("text", GOOD[0], "p1"),
        route("text", GOOD[1], "p2"),
        route("text", GOOD[1]),
        answer("It is Le Roncole."),
    )
    assert turn_route_reward([episode(*turns)]) == [[0.5, 0, 0.5, 0.5, 0, 0]]
    assert turn_answer_reward([episode(*turns)]) == [[0, 0, 0, 0, 0, 1.0]]
    weights = turn_route_reward([episode(*turns)], alpha=0.25, beta=1.0)[0]
    assert weights == [0.25, 0, 1.0, 0.25, 0, 0]


def test_independent_chats_are_judged_by_the_answers_that_they_carry_on() -> None:
    """The passage was found and read wrongly: the hop stays open. Half of the value's words are half of the reward, the second
    answer earns the other half, and the same route again nothing."""
    turns = (
        route("text", GOOD[0], "p1", asked="route"),
        answer("Verdi it was", asked="answer"),
        route("text", GOOD[0], "p1", asked="route"),
        answer("giuseppe verdi", asked="answer"),
        route("table", GOOD[1], asked="route"),
        answer("in le roncole", asked="answer", well_formed=False),
        route(NO_TOOL, NO_TOOL, asked="route"),
        answer("le roncole", asked="final"),
    )
    assert turn_route_reward([episode(*turns)]) == [[1.0, 0, 0, 0, 1.0, 0, 1.0, 0]]
    assert turn_answer_reward([episode(*turns)]) == [[0, 0.5, 0, 0.5, 0, 0, 0, 1.0]]


def test_nothing_is_gained_by_failing_first() -> None:
    """The way straight through a one-hop question against a wrong answer first, a route that can't be read, a wrong knowledge
    base, and the same search until the budget is spent: with a discount, it has the most to expect at its first turn."""
    hop = ({"kb": "text", "passage_id": "p1", "query": GOOD[0], "value": "Giuseppe Verdi"},)
    good, right = route("text", GOOD[0], "p1", asked="route"), answer("Giuseppe Verdi", asked="answer")
    wrong, none = answer("Rossini", asked="answer"), route(NO_TOOL, NO_TOOL, asked="route")
    final = answer("Le Roncole", asked="final")
    ways = {
        "straight": (good, right, none, final),
        "a wrong answer first": (good, wrong, good, right, none, final),
        "unreadable first": (INVALID, good, right, none, final),
        "elsewhere first": (route("table", GOOD[0], asked="route"), wrong, good, right, none, final),
        "until the budget is spent": (good, wrong, good, wrong, good, right, final),
    }
    episodes = [episode(*turns, path=hop) for turns in ways.values()]
    routed, answered = turn_route_reward(episodes), turn_answer_reward(episodes)
    rewards = [np.add(*of_turns) for of_turns in zip(routed, answered)]
    assert rewards[0].tolist() == [1, 1, 1, 1]
    assert all(of_turns.sum() <= 4 for of_turns in rewards)
    first = [to_go[0] for to_go in rewards_to_go(rewards, discount=0.9)]
    assert all(first[0] > other for other in first[1:])


def test_stopping_early_and_bad_form_earn_nothing() -> None:
    turns = (route(NO_TOOL, NO_TOOL, asked="route"), answer("Le", asked="final"))
    assert turn_route_reward([episode(*turns)]) == [[0, 0]]
    assert turn_answer_reward([episode(*turns, answer="Le")]) == [[0, 0]]
    assert turn_route_reward([episode(route("text", GOOD[0], well_formed=False))]) == [[0]]
    assert turn_answer_reward([episode(route("text", GOOD[0]), answer=None)]) == [[0]]


def test_bad_form_costs_where_nothing_can_be_earned() -> None:
    """No tags, and tags whose content can't be carried out."""
    turns = (
        route("table", GOOD[0]),
        INVALID,
        dataclasses.replace(INVALID, well_formed=True),
        answer("x", well_formed=False),
    )
    assert turn_format_reward([episode(*turns, answer="x"), episode()]) == [[0, -1, -1, -1], []]


def test_what_a_data_set_does_not_say_is_left_out() -> None:
    triples = [["Aida", "composer", "Giuseppe Verdi"]]
    path = gold_path(dataclasses.replace(EXAMPLE, metadata={"evidence_triples": triples}))
    assert path == (GoldHop(query="composer of Aida", value="Giuseppe Verdi", title="Aida"),)
    asked = episode(route("text", "composer of aida"), evidence_triples=triples)
    assert turn_route_reward([asked]) == [[1.0]]
    supporting = [{"id": "p1", "title": "Aida", "text": "..."}]
    searches = (route("text", "anything", "p1"), route("text", "anything", "p2"))
    assert turn_route_reward([episode(searches[0], supporting_passages=supporting)]) == [[1.0]]
    assert turn_route_reward([episode(*searches[::-1], supporting_passages=supporting)]) == [[0, 1.0]]
    assert gold_path(Example(id="x", question="?", answers=("a",))) is None
    unknown = Episode(
        example=Example(id="x", question="?", answers=("a",)), sample=0, answer="a", turns=[], sequences=[]
    )
    unknown.turns = [route("text", "q"), answer("a")]
    assert turn_route_reward([unknown]) == [[0, 0]]
    assert turn_answer_reward([unknown]) == [[0, 1.0]]


def test_a_comparison_may_be_worked_on_in_either_order() -> None:
    """Neither hop needs the other, so both orders earn the same; asking for the same one twice earns nothing more."""
    triples = [["Aida", "year", "1871"], ["Nabucco", "year", "1842"]]
    asked = [
        (route("text", f"year of {name}", asked="route"), answer(year, asked="answer")) for name, _, year in triples
    ]
    end = (route(NO_TOOL, NO_TOOL, asked="route"), answer("Le Roncole", asked="final"))
    orders = [
        episode(*asked[0], *asked[1], *end, evidence_triples=triples),
        episode(*asked[1], *asked[0], *end, evidence_triples=triples),
        episode(*asked[1], *asked[1], *end, evidence_triples=triples),
    ]
    name = "all-MiniLM-L6-v2"
    routed, answered = turn_route_reward(orders, encoder=name), turn_answer_reward(orders)
    for i in range(2):
        assert routed[i] == pytest.approx([1, 0, 1, 0, 1, 0], abs=1e-5)
        assert answered[i] == [0, 1, 0, 1, 0, 1]
    again = float(similarities([("year of nabucco", "year of aida")], lambda: shared_encoder(name))[0])
    assert routed[2] == pytest.approx([1, 0, again, 0, 0, 0], abs=1e-5)  # as far as it resembles what is left to ask


def test_a_hop_that_needs_another_waits_for_it() -> None:
    """Asked for too early, the second hop of a chain is judged by the first."""
    turns = (route("table", GOOD[1], asked="route"), answer("Le Roncole", asked="answer"))
    assert turn_answer_reward([episode(*turns, answer=None)]) == [[0, 0]]
    free = [{**HOPS[0]}, {**HOPS[1]}]
    triples = [["Aida", "composer", "Giuseppe Verdi"], ["Giuseppe Verdi", "birthplace", "Le Roncole"]]
    assert turn_answer_reward([episode(*turns, answer=None, evidence_triples=triples)]) == [[0, 0]]
    assert turn_answer_reward([episode(*turns, answer=None, path=free[1:])]) == [[0, 1.0]]


def test_a_hop_that_names_a_passage_alone_is_closed_by_finding_it() -> None:
    """In chats: not by any answer to any search."""
    none, final = route(NO_TOOL, NO_TOOL, asked="route"), answer("Le Roncole", asked="final")
    miss = (route("text", "q", "p2", asked="route"), answer("rubbish", asked="answer"))
    hit = (route("text", "q", "p1", asked="route"), answer("right", asked="answer"))
    turns = [episode(*miss, none, final, supporting=["p1"]), episode(*miss, *hit, none, final, supporting=["p1"])]
    assert turn_route_reward(turns) == [[0, 0, 0, 0], [0, 0, 1, 0, 1, 0]]


def test_a_search_that_finds_several_passages_earns_as_much_as_several_searches() -> None:
    """In one conversation, where passages are all that is known of the path."""
    both = dataclasses.replace(
        route("text", "q"), calls=[Call(tool="text", query="q", passages=(HIT["p1"], HIT["p2"]))]
    )
    gold = {"supporting": ["p1", "p2"]}
    found = [episode(both, answer("x"), **gold), episode(route("text", "q", "p1"), both, answer("x"), **gold)]
    assert turn_route_reward(found) == [[2.0, 0], [1.0, 1.0, 0]]


def test_where_no_knowledge_base_is_named_its_passage_tells() -> None:
    """2WikiMultihopQA: a right question that finds nothing is half of a route."""
    gold = {"evidence_triples": [["Aida", "composer", "Verdi"]], "supporting": ["p1"], "supporting_titles": ["Aida"]}
    turns = [route(tool, "composer of aida", found, asked="route") for tool, found in (("table", ""), ("text", "p1"))]
    rewards = turn_route_reward([episode(turn, **gold) for turn in turns])
    assert rewards == [pytest.approx([0.5], abs=1e-5), pytest.approx([1.0], abs=1e-5)]


def test_a_search_that_is_not_made_earns_nothing() -> None:
    """RouteRAG's last turn, when the budget is spent: a policy that is not sure must not gain by writing one more search."""
    spent = dataclasses.replace(route("text", GOOD[0]), calls=[])
    assert turn_route_reward([episode(spent, answer=None)]) == [[0]]


def test_a_sum_for_the_episode_and_each_value_at_its_turn() -> None:
    one = episode(route("text", GOOD[0], "p1"), route("table", GOOD[1], "p2"), answer("Le Roncole"))
    terms = {"em": 1.0, "r1_router.turn_route": {"weight": 0.5}, "r1_router.turn_answer": 2.0}
    assert RewardFunction(terms)([one]) == [
        {"em": 1.0, "r1_router.turn_route": 1.0, "r1_router.turn_answer": 2.0, "total": 4.0}
    ]
    assert [turn.rewards.get("r1_router.turn_route") for turn in one.turns] == [0.5, 0.5, 0]
    assert [turn.rewards.get("r1_router.turn_answer") for turn in one.turns] == [0, 0, 2.0]
    with pytest.raises(ValueError, match="gave 1 values for the 3 turns of attempt 0 at question 'q'"):
        RewardFunction({"tests.recipes.test_r1_router_turns:TOO_FEW": 1.0})([one])


def too_few(episodes: list[Episode]) -> list[list[float]]:
    return [[1.0] for _ in episodes]


TOO_FEW = TurnTerm(too_few)
