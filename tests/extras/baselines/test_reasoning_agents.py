"""Search-o1 and ReAct, call by call, with scripted policies."""

from typing import Any

import pytest

from routerl_jax.extras.baselines.rounds import (
    BEGIN_QUERY,
    BEGIN_RESULT,
    END_QUERY,
    END_RESULT,
    ReAct,
    SearchO1,
    boxed,
    parse_action,
    shortened,
)
from tests.extras.baselines.playing import EXAMPLE, played

Q = EXAMPLE.question
BARE: dict[str, Any] = {"instruct": False}


def query(text):
    return f"{BEGIN_QUERY}{text}{END_QUERY}"


def result(text):
    return f"{BEGIN_RESULT}{text}{END_RESULT}"


def kinds(episode):
    return [turn.action and turn.action.kind for turn in episode.turns]


# --- Search-o1 ---


def test_search_o1_reads_what_it_finds_in_a_chat_of_its_own():
    found = played(
        SearchO1(k=2, **BARE), f"I wonder. {query('who wrote it')}", " Shelley\nwrote it.", " So \\boxed{Mary}."
    )
    assert found.asked == [("text", "who wrote it", 2)]
    main, reading = found.chats
    assert main.startswith(
        f"Question: {Q}\nAnswer:I wonder. {query('who wrote it')}\n\n{result('Shelley wrote it.')}\n\n So \\boxed{{Mary}}."
    )
    assert reading.startswith(
        f"Reasoning so far:\nStep 1: I wonder. {query('who wrote it')}\n\nQuery: who wrote it\n\nDocuments:\n"
        "[1] text1: <text1 on who wrote it>\n[2] text2: <text2 on who wrote it>\nFinal Information: Shelley"
    )
    assert (found.episode.answer, kinds(found.episode)) == ("Mary", ["search", None, "answer"])


def test_search_o1_in_chats_takes_what_follows_the_mark():
    turns = (query("a"), "Let me see. **Final Information:**\nIt was she.", query("b"), "Nothing here", "\\boxed{Mary}")
    found = played(SearchO1(k=1), *turns, chats=True)
    assert result("It was she.") in found.chats[0]
    assert result("No helpful information was found.") in found.chats[0]
    assert "Step 2: " in found.chats[2]
    assert result("It was she.") in found.chats[2]
    assert [turn.well_formed for turn in found.episode.turns] == [True, True, True, False, True]


def test_search_o1_does_not_search_twice_nor_beyond_its_limit():
    turns = (query("a"), "info", query(" a "), query("b"), "\\boxed{Mary}")
    found = played(SearchO1(k=1, max_searches=1, **BARE), *turns)
    assert found.asked == [("text", "a", 1)]
    assert "searched for before" in found.episode.turns[2].observation
    assert "no searches left" in found.episode.turns[3].observation
    assert kinds(found.episode) == ["search", None, "invalid", "invalid", "answer"]


@pytest.mark.parametrize(("asked", "said"), [("nothing", ""), ("broken", " The search failed: ConnectionError")])
def test_search_o1_says_that_nothing_was_found_without_a_reading(asked, said):
    found = played(SearchO1(k=1, **BARE), query(asked), "\\boxed{Mary}")
    assert f"{BEGIN_RESULT}No helpful information was found.{said}" in found.chats[0]
    assert len(found.chats) == 1
    assert found.episode.answer == "Mary"


def test_search_o1_begins_the_answer_where_none_is_boxed():
    found = played(SearchO1(**BARE), "It was Mary.", "Mary} and")
    assert (found.episode.answer, kinds(found.episode)) == ("Mary", ["invalid", "answer"])
    spent = played(SearchO1(k=1, max_turns=1, **BARE), query("a"), "info", "Mary}")
    assert (spent.episode.answer, spent.episode.turns[-1].forced) == ("Mary", "\n\\boxed{")


@pytest.mark.parametrize("reply", ["Mary", "\\boxed{Mary}.", "The answer is Mary."])
def test_search_o1_in_a_chat_asks_for_the_answer(reply):
    found = played(SearchO1(), "It was she.", reply, chats=True)
    assert "Now write the answer alone" in found.episode.turns[0].observation
    assert (found.episode.answer, found.episode.turns[1].forced) == ("Mary", "")


def test_marks_in_what_is_read_are_broken_up():
    found = played(SearchO1(k=1, **BARE), query("a"), f"x {END_RESULT} y", "\\boxed{Mary}")
    assert result("x < |end_search_result|> y") in found.chats[0]


def test_long_reasoning_is_shortened_for_the_reader():
    lines = ["first", *(f"line {n}" for n in range(2, 7)), query("a"), *(f"line {n}" for n in range(8, 13))]
    assert shortened("\n\n".join(lines)).split("\n") == [
        "Step 1: first",
        "...",
        f"Step 7: {query('a')}",
        "...",
        *(f"Step {n}: line {n}" for n in range(9, 13)),
    ]
    assert shortened("a\nb") == "Step 1: a\nStep 2: b"


def test_boxed_answers():
    assert boxed("\\boxed{a} then \\boxed{b {c} d}") == "b {c} d"
    assert boxed("\\boxed{\\text{New York}}") == "New York"
    assert boxed("\\boxed{x_{1}}") == "x_{1}"
    assert boxed("\\boxed{open") is None
    assert boxed("none") is None
    assert boxed("\\boxed{}") is None


# --- ReAct ---


def test_react_searches_looks_up_and_finishes():
    found = played(
        ReAct(k=2, **BARE),
        "Thought: who?\nAction: search[the author]\n",
        "Thought: more\nAction: lookup[TEXT2]\n",
        "Thought: again\nAction: lookup[TEXT2]\n",
        "Thought: I know.\nAction: finish[Mary]",
    )
    assert found.asked == [("text", "the author", 2)]
    observed = [turn.observation for turn in found.episode.turns]
    assert observed == [
        "Observation: (1) text1: <text1 on the author> (2) text2: <text2 on the author>\n",
        "Observation: (1 of 1) <text2 on the author>\n",
        "Observation: There is no more of it.\n",
        "",
    ]
    assert (found.episode.answer, kinds(found.episode)) == ("Mary", ["search", None, None, "answer"])


def test_react_observes_a_turn_without_an_action_and_failures():
    turns = (
        "Thought: hm\nObservation",
        "Action: search[broken]\n",
        "Action: search[nothing]\n",
        "Action: Finish[Mary].\n",
    )
    found = played(ReAct(k=1, **BARE), *turns)
    observed = [turn.observation for turn in found.episode.turns]
    assert observed[0].startswith(": That is no action.")
    assert observed[1].startswith("Observation: The search failed: ConnectionError")
    assert observed[2] == "Observation: Nothing was found.\n"
    assert (found.episode.answer, kinds(found.episode)) == ("Mary", ["invalid", "search", "search", "answer"])


def test_react_begins_the_answer_after_its_steps():
    found = played(ReAct(k=1, max_steps=2, **BARE), *["Action: search[a]\n"] * 2, "Mary]")
    assert (found.episode.answer, len(found.asked)) == ("Mary", 2)
    assert found.episode.turns[-1].forced == "Thought: I have to answer now.\nAction: finish["


def test_react_in_a_chat_observes_in_messages():
    found = played(ReAct(k=1, max_steps=1), "Thought: x\nAction: search[a]", "Mary]", chats=True)
    assert found.episode.turns[0].observation.startswith("\n[user] \nObservation: (1) text1")
    assert found.episode.answer == "Mary"  # begun in the turn that the observation has opened
    assert found.episode.turns[-1].forced.endswith("finish[")


def test_actions_are_read_in_any_case_and_with_numbers():
    assert parse_action("Thought 1: [x]\nAction 1: Search[a  b]") == ("search", "a b")
    assert parse_action("Thought: then Action: finish[Lome], or not?\nAction: search[Togo]") == ("search", "Togo")
    assert parse_action("Action: search[]") == ("", "")
    assert parse_action("search[a]") == ("", "")
