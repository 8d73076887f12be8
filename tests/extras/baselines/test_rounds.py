"""Baselines that search in rounds while they reason, call by call, with scripted policies."""

import pytest

from routerl_jax.extras.baselines.rounds import (
    BEGIN_QUERY,
    BEGIN_RESULT,
    END_QUERY,
    END_RESULT,
    IRCoT,
    IterRetGen,
    OmniSearch,
    ReAct,
    SearchO1,
    SelfAsk,
    boxed,
    parse_action,
    shortened,
)
from tests.extras.baselines.playing import BARE, BOTH, Q, kinds, played

# --- IRCoT ---


def test_ircot_searches_for_each_sentence_and_reads_all_documents():
    found = played(
        IRCoT(k=2, **BARE),
        " Shelley wrote it. And more ",
        " So she is the author.\n",  # a conclusion: what was searched for last stays
        " Her mother was Mary.\n",
        " So the answer is: Mary.\n",
        " I read it again. So the answer is: Mary W.\n",
    )
    assert found.asked == [("text", Q, 2), ("text", "Shelley wrote it.", 2), ("text", "Her mother was Mary.", 2)]
    one = [f"[{n}] text{n}: <text{n} on {Q}>" for n in (1, 2)]
    two = [f"[{n + 2}] text{n}: <text{n} on Shelley wrote it.>" for n in (1, 2)]
    three = [f"[{n + 4}] text{n}: <text{n} on Her mother was Mary.>" for n in (1, 2)]

    def prompt(lines, written=""):
        return "Documents:\n" + "\n".join(lines) + f"\n\nQuestion: {Q}\nAnswer:{written}"

    assert found.chats == [
        prompt(one) + " Shelley wrote it. ",
        prompt(one + two, " Shelley wrote it.") + " So she is the author.\n",
        prompt(one + two, " Shelley wrote it. So she is the author.") + " Her mother was Mary.\n",
        prompt(one + two + three, " Shelley wrote it. So she is the author. Her mother was Mary.")
        + " So the answer is: Mary.\n",
        prompt(one + two + three) + " I read it again. So the answer is: Mary W.\n" + found.chats[4][-len(END) :],
    ]
    assert found.episode.answer == "Mary W"
    assert kinds(found.episode) == ["search", "search", "search", None, "answer"]


END = "<|endoftext|>"


def test_ircot_without_a_reader_answers_with_its_chain():
    agent = IRCoT(k=1, reader="none", max_steps=2, **BARE)
    assert played(agent, " She did. b", " So the answer is: Mary.\n").episode.answer == "Mary"
    spent = played(agent, " She did. b", " It was Mary.\n")
    assert (spent.episode.answer, len(spent.asked)) == ("It was Mary", 2)  # R1-Router: the last sentence
    silent = played(agent, "\n")
    assert (silent.episode.answer, kinds(silent.episode), len(silent.asked)) == (None, ["invalid"], 1)


def test_ircot_collects_no_more_than_so_many_documents():
    turns = (" She did. b", " So the answer is: x\n", "Mary\n")
    found = played(IRCoT(k=3, max_documents=4, reader="direct", **BARE), *turns)
    assert found.chats[2].count("on She did.>") == 1
    assert "[4]" in found.chats[2]
    assert "[5]" not in found.chats[2]
    assert found.episode.answer == "Mary"


def test_ircot_goes_on_where_a_search_fails():
    found = played(IRCoT(k=1, **BARE), " It is broken. x", " So the answer is: y\n", " So the answer is: Mary")
    assert [call.error is not None for call in found.episode.calls] == [False, True]
    assert found.chats[2].count("[1]") == 1
    assert found.episode.answer == "Mary"


def test_ircot_does_not_take_an_initial_for_the_end_of_a_sentence():
    """Only the next word tells, so the policy writes on behind it, in the same chat."""
    turns = (
        " It was by J. ",
        "Lee. And more",
        " He left the U.S. ",
        "He died. x",
        *(" So the answer is: J. ", "R. ", "Lee.\n"),
    )
    found = played(IRCoT(k=1, reader="none", **BARE), *turns)
    assert [query for _, query, _ in found.asked] == [Q, "It was by J. Lee.", "He left the U.S."]
    assert found.chats[0].endswith("Answer: It was by J. Lee. ")
    assert found.episode.answer == "J. R. Lee"


def test_a_sentence_that_is_repeated_ends_the_chain_and_not_the_episode():
    turns = (" Shelley wrote it. x", " Shelley wrote it. x", " So the answer is: Mary.\n")
    found = played(IRCoT(k=1, **BARE), *turns)
    assert ([query for _, query, _ in found.asked], found.episode.answer) == ([Q, "Shelley wrote it."], "Mary")


# --- Iter-RetGen ---


def test_iter_retgen_searches_with_the_last_chain_and_the_question():
    found = played(IterRetGen(k=1, rounds=3, **BARE), " First\nthought.", " Second.", " So the answer is: Mary.")
    queries = [Q, f"First thought. {Q}", f"Second. {Q}"]
    assert found.asked == [("text", query, 1) for query in queries]
    for chat, query in zip(found.chats, queries, strict=True):  # documents of its own round alone
        assert chat.startswith(f"Documents:\n[1] text1: <text1 on {query}>\n\nQuestion: {Q}\nAnswer:")
    assert found.episode.answer == "Mary"


def test_iter_retgen_searches_again_for_the_question_where_nothing_was_written():
    found = played(IterRetGen(k=1, **BARE), "", " The answer is Mary")
    assert found.asked == [("text", Q, 1)] * 2
    assert found.episode.answer == "Mary"


# --- Self-Ask ---


FOLLOW = " Yes.\nFollow up: Who wrote it?\nIntermediate answer:"


def test_self_ask_puts_what_was_found_after_its_question():
    found = played(
        SelfAsk(**BARE), FOLLOW, "Follow up: Her mother?\nIntermediate answer:", "So the final answer is: Mary.\n"
    )
    assert found.asked == [("text", "Who wrote it?", 1), ("text", "Her mother?", 1)]
    assert found.chats[0].startswith(
        f"Question: {Q}\nAre follow up questions needed here: Yes.\nFollow up: Who wrote it?\nIntermediate answer: "
        "<text1 on Who wrote it?>\nFollow up: Her mother?\nIntermediate answer: <text1 on Her mother?>\nSo the final answer is"
    )
    assert (found.episode.answer, kinds(found.episode)) == ("Mary", ["search", "search", "answer"])


def test_self_ask_answers_itself_where_nothing_is_found():
    turns = (" Yes.\nFollow up: nothing?\nIntermediate answer:", " Shelley.\nSo the final answer is: Mary\n")
    found = played(SelfAsk(**BARE), *turns)
    assert "Follow up: nothing?\nIntermediate answer: Shelley.\nSo" in found.chats[0]
    assert found.episode.answer == "Mary"


def test_self_ask_begins_the_answer_without_a_form_and_after_its_budget():
    found = played(SelfAsk(**BARE), " No idea.", " Mary\n")
    assert (found.episode.answer, found.asked, kinds(found.episode)) == ("Mary", [], ["invalid", "answer"])
    assert found.episode.turns[1].forced == "\nSo the final answer is:"
    spent = played(SelfAsk(max_follow_ups=1, **BARE), FOLLOW, FOLLOW, " Mary\n")
    assert (spent.episode.answer, len(spent.asked)) == ("Mary", 1)


def test_self_ask_in_flashrags_form_shows_the_latest_passages_above():
    found = played(SelfAsk(above=True, k=2, **BARE), FOLLOW, " Shelley.\nSo the final answer is: Mary\n")
    assert found.asked == [("text", Q, 2), ("text", "Who wrote it?", 2)]
    assert f"on {Q}" in found.chats[0]
    assert f"on {Q}" not in found.chats[1]
    assert "needed here: Yes.\nFollow up: Who wrote it?\nIntermediate answer: Shelley." in found.chats[1]
    assert found.episode.answer == "Mary"


def test_self_ask_in_a_chat_is_told_in_messages():
    found = played(SelfAsk(shots=1), " Yes.\nFollow up: Who wrote it?", "So the final answer is: Mary", chats=True)
    assert found.asked == [("text", "Who wrote it?", 1)]
    assert "\nIntermediate answer: <text1 on Who wrote it?>\n" in found.episode.turns[0].observation
    assert "[user]" in found.episode.turns[0].observation
    assert found.episode.answer == "Mary"


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


# --- Search-o1 ---


def query(text):
    return f"{BEGIN_QUERY}{text}{END_QUERY}"


def result(text):
    return f"{BEGIN_RESULT}{text}{END_RESULT}"


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


# --- OmniSearch ---


STEP = "Thought: hm\nSub-question: Who wrote it?\nSearch: {}\nFound:"


def test_omnisearch_searches_where_it_says_and_answers():
    turns = (STEP.format("table: the author"), STEP.format("text"), STEP.format("none"), "Final answer: Mary.\n")
    found = played(OmniSearch(k=1, **BARE), *turns, tools=BOTH)
    assert found.asked == [
        ("table", "the author", 1),
        ("text", "Who wrote it?", 1),
    ]  # without a query, the sub-question
    assert [turn.observation for turn in found.episode.turns] == [
        " (1) table1: <table1 on the author>\n",
        " (1) text1: <text1 on Who wrote it?>\n",
        " Nothing was searched for.\n",
        "",
    ]
    assert (found.episode.answer, kinds(found.episode)) == ("Mary", ["search", "search", "search", "answer"])


def test_omnisearch_takes_no_answer_from_a_thought_before_a_search():
    step = STEP.format("text").replace("hm", "too early for a Final answer: the author is missing.")
    found = played(OmniSearch(k=1, **BARE), step, "Thought: that is it. Final answer: Mary.\n")
    assert (found.episode.answer, kinds(found.episode)) == ("Mary", ["search", "answer"])


def test_omnisearch_is_told_of_a_step_that_cant_be_done():
    found = played(
        OmniSearch(k=1, max_steps=2, **BARE), "Search: the web\nFound:", STEP.format("text: broken"), " Mary\n"
    )
    assert "it names none of text and none" in found.episode.turns[0].observation
    assert "The search failed: ConnectionError" in found.episode.turns[1].observation
    assert (found.episode.answer, found.episode.turns[-1].forced) == ("Mary", "Final answer:")
