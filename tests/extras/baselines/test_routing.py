"""Baselines that decide whether to search, and where, call by call, with scripted policies."""

import pytest

from routerl_jax.extras.baselines.routing import SKR, CogPlanner, CRPlanner, UniversalRAG, chosen
from tests.extras.baselines.playing import BARE, BOTH, Q, kinds, played

# --- SKR ---


ODD = ("Perhaps\n", "It has no date, so yes.\n", "<think>no, wait\n")


@pytest.mark.parametrize(
    ("said", "searches"),
    [("No, I know it.\n", 0), ("No: yes or no is no help\n", 0), (" Yes\n", 1), *((said, 1) for said in ODD)],
)
def test_skr_searches_where_the_policy_needs_it(said, searches):
    found = played(SKR(k=2, **BARE), said, "Mary\n")
    assert found.asked == [("text", Q, 2)] * searches
    assert ("Documents:" in found.chats[1]) == bool(searches)
    assert found.episode.answer == "Mary"
    assert kinds(found.episode) == ["invalid" if said in ODD else "search", "answer"]


# --- UniversalRAG ---


def test_universal_rag_asks_the_knowledge_base_that_it_names():
    agent = UniversalRAG(k=2, about={"table": "tables of countries"})
    found = played(agent, "The Table, I think.\n", "Mary\n", tools=BOTH)
    assert found.asked == [("table", Q, 2)]
    assert "- text\n- table: tables of countries" in found.chats[0]
    assert found.episode.answer == "Mary"
    assert [turn.action and turn.action.tool for turn in found.episode.turns] == ["table", ""]


def test_universal_rag_answers_directly_or_asks_the_first():
    none = played(UniversalRAG(**BARE), " none\n", "Mary\n", tools=BOTH)
    assert (none.asked, none.episode.answer) == ([], "Mary")
    assert none.chats[1] == f"Question: {Q}\nAnswer:Mary\n"
    odd = played(UniversalRAG(k=1, **BARE), " what?\n", "Mary\n", tools=BOTH)
    assert (odd.asked, kinds(odd.episode)) == ([("text", Q, 1)], ["invalid", "answer"])


def test_names_are_read_whole():
    assert chosen("text_image.", ("text", "text_image")) == "text_image"
    assert chosen("context or tables", ("text", "table")) is None
    assert chosen("None of them", ("text",)) == "none"


# --- CogPlanner ---


def test_cogplanner_plans_until_nothing_is_missing():
    turns = ("who wrote it\n", " table\n", "her mother\n", " text\n", "none\n", "Mary\n")
    found = played(CogPlanner(k=1, **BARE), *turns, tools=BOTH)
    assert found.asked == [("table", "who wrote it", 1), ("text", "her mother", 1)]
    assert found.chats[0] == f"Question: {Q}\nQuery:who wrote it\n"
    assert found.chats[1] == f"Question: {Q}\nQuery: who wrote it\nKnowledge base: table\n"
    assert found.chats[2].startswith("Found so far:\n[1] table1: <table1 on who wrote it>\n\nQuestion: ")
    everything = "[1] table1: <table1 on who wrote it>\n[2] text1: <text1 on her mother>"
    assert found.chats[5] == f"Documents:\n{everything}\n\nQuestion: {Q}\nAnswer:Mary\n"
    assert [turn.asked for turn in found.episode.turns] == ["query", "route", "query", "route", "query", ""]
    assert found.episode.answer == "Mary"


def test_cogplanner_stops_at_its_limit_and_where_a_choice_is_unread():
    spent = played(CogPlanner(k=1, rounds=1, **BARE), "a\n", "text\n", "Mary\n", tools=BOTH)
    assert (len(spent.asked), spent.episode.answer) == (1, "Mary")
    odd = played(CogPlanner(k=1, **BARE), "a\n", "nowhere\n", "Mary\n", tools=BOTH)
    assert (odd.asked, kinds(odd.episode)) == ([], [None, "invalid", "answer"])


def test_cogplanner_in_parallel_takes_both_from_one_reply():
    turns = ("Query: a\nKnowledge base: table", "Query: b\nKnowledge base: none", "Mary\n")
    found = played(CogPlanner(k=1, modelling="parallel", **BARE), *turns, tools=BOTH)
    assert found.asked == [("table", "a", 1)]
    assert found.episode.answer == "Mary"


# --- CR-Planner ---


def asked_for(episode):
    return [turn.asked or turn.action.kind for turn in episode.turns]


def test_a_search_and_then_a_thought_that_answers():
    turns = (
        "search\n",
        " who wrote it\n2. the author's name\n3. who wrote it\n",  # two are different
        " 2\n",
        " [2]\n",
        " reason\n",
        " It was somebody.\n2. So the answer is: Mary.\n",
        " the 2nd\n",
    )
    found = played(CRPlanner(k=2, **BARE), *turns)
    assert found.asked == [("text", "the author's name", 2)]
    assert found.episode.answer == "Mary"
    assert asked_for(found.episode) == ["route", "queries", "choice", "choice", "route", "thoughts", "choice"]
    assert found.chats[0] == f"Question: {Q}\nNext:search\n"
    assert found.chats[2] == (f"Question: {Q}\n\nProposals:\n[1] who wrote it\n[2] the author's name\nNumber: 2\n")
    shown = "[1] text1: <text1 on the author's name>\n[2] text2: <text2 on the author's name>"
    assert found.chats[3] == f"Question: {Q}\n\nQuery: the author's name\n\nFound:\n{shown}\nNumber: [2]\n"
    steps = "Query: the author's name\nDocument: text2: <text2 on the author's name>"
    assert found.chats[4] == f"Question: {Q}\n\n{steps}\nNext: reason\n"
    assert found.chats[5].startswith(f"Question: {Q}\n\n{steps}\nThoughts:\n1. It was")
    queries = found.episode.turns[1]
    assert queries.action is not None
    assert (queries.action.kind, queries.action.query, queries.action.tool) == (
        "search",
        "the author's name",
        "",
    )  # all it has
    answer = found.episode.turns[5].action
    assert answer is not None
    assert (answer.kind, answer.answer) == ("answer", "Mary")


def test_without_searches_left_thoughts_come_and_then_the_answer_is_asked_for():
    turns = ("search\n", " nothing here\n", " One.\n2. Two.\n", " 1\n", " Three.\n", " Mary\n")
    found = played(CRPlanner(max_searches=1, max_steps=3, **BARE), *turns)
    assert [query for _, query, _ in found.asked] == ["nothing here"]  # a single candidate is not put to the vote
    steps = "Query: nothing here\nDocument: Nothing was found.\nThought: One\nThought: Three"
    assert found.chats[-1] == f"Question: {Q}\n\n{steps}\nAnswer: Mary\n"
    assert found.episode.answer == "Mary"
    assert asked_for(found.episode) == ["route", "queries", "thoughts", "choice", "thoughts", "answer"]


def test_what_cannot_be_read_is_invalid_and_goes_on():
    turns = ("perhaps\n", " A.\n2. B.\n", " both\n", "search\n", "\n", " 9\n", " Mary\n")
    found = played(CRPlanner(k=2, max_steps=2, **BARE), *turns)
    assert found.asked == [("text", Q, 2)]  # the question itself where no query is proposed
    assert "Thought: A\nQuery: " in found.chats[-1]
    assert "Document: text1: " in found.chats[-1]
    kinds = [turn.action and turn.action.kind for turn in found.episode.turns]
    assert kinds == ["invalid", None, "invalid", None, "search", "invalid", "answer"]
    assert found.episode.answer == "Mary"


def test_as_a_chat_it_is_told_what_to_do():
    turns = ("I would search.", "1. who wrote it\n2) her name", "1", "2", "reason", "1. So the answer is: Mary")
    found = played(CRPlanner(k=2), *turns, tools=("text",), chats=True)
    assert found.asked == [("text", "who wrote it", 2)]
    assert 'write "reason" or "search", alone' in found.chats[0]
    assert "Propose 3 different queries" in found.chats[1]
    assert found.episode.answer == "Mary"


@pytest.mark.parametrize("length", [240, 20_000])
def test_the_latest_steps_are_seen_where_room_is_short(length):
    thoughts = [f" Thought number {number} says something of the mother.\n" for number in range(5)]
    agent = CRPlanner(max_searches=0, max_steps=5, max_turn_tokens=80, **BARE)
    found = played(agent, *thoughts, " Mary\n", max_length=length)
    last = found.chats[-1]
    assert last.startswith(f"Question: {Q}\n\nThought: ")
    assert "number 4 says" in last
    assert ("number 0 says" in last) == (length == 20_000)
    assert found.episode.answer == "Mary"


def test_several_knowledge_bases_are_asked_at_once():
    turns = ("search\n", " her name\n", " 2\n", " So the answer is: Mary\n")
    found = played(CRPlanner(k=1, max_searches=1, **BARE), *turns, tools=("text", "table"))
    assert found.asked == [("text", "her name", 1), ("table", "her name", 1)]
    assert "Document: table1: <table1 on her name>" in found.chats[-1]
    assert CRPlanner(tools=("text", "table")).search_budget == 6
