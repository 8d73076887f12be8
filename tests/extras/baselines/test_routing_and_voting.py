"""Baselines that choose a knowledge base, or decide between candidates, call by call, with scripted policies."""

import dataclasses
from typing import Any

import pytest

from routerl_jax.extras.baselines.baseline import WORKED
from routerl_jax.extras.baselines.few_shot import SIZE, WORKED_PAGES, FewShot, demonstration, few_shot
from routerl_jax.extras.baselines.registry import baseline_agents
from routerl_jax.extras.baselines.rounds import OmniSearch
from routerl_jax.extras.baselines.routing import SKR, CogPlanner, UniversalRAG, chosen
from routerl_jax.extras.baselines.vanilla_rag import HippoRAGReader, SuRe, listed
from routerl_jax.models.regions import RegionRule
from tests import tiny
from tests.extras.baselines.playing import EXAMPLE, played, with_template

Q = EXAMPLE.question
BARE: dict[str, Any] = {"instruct": False}
BOTH = ("text", "table")


def kinds(episode):
    return [turn.action and turn.action.kind for turn in episode.turns]


# --- HippoRAG 2's reader ---


def test_the_reader_thinks_and_answers():
    found = played(HippoRAGReader(k=2, **BARE), " It says so.\nAnswer: Mary.\nQuestion: more")
    assert found.asked == [("text", Q, 2)]
    assert found.chats[0].startswith(f"Documents:\n[1] text1: <text1 on {Q}>\n[2] text2: ")
    assert f"\n\nQuestion: {Q}\nThought: It says so.\nAnswer: Mary." in found.chats[0]
    assert found.episode.answer == "Mary"
    without = played(HippoRAGReader(k=1, **BARE), " It does not say.", " Mary\n")
    assert (without.episode.answer, without.episode.turns[1].forced) == ("Mary", "\nAnswer:")


def test_the_readers_worked_question_has_documents():
    text = played(HippoRAGReader(k=1), " x\nAnswer: Mary", chats=True).chats[0]
    assert text.count("Documents:\n[1]") == 2
    assert "[2] Mary Wollstonecraft: " in text.split("[user]")[0]


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


# --- SuRe ---


def test_sure_votes_between_summaries():
    found = played(
        SuRe(k=2, **BARE),
        " Jane, (b) Mary\n",
        " For Jane.\n",
        " True",
        " For Mary.\n",
        " True",
        " 2",  # Jane's before Mary's
        " 1",  # Mary's before Jane's
    )
    assert found.asked == [("text", Q, 2)]
    shown = f"Documents:\n[1] text1: <text1 on {Q}>\n[2] text2: <text2 on {Q}>\n\nQuestion: {Q}\n"
    assert found.chats[0].startswith(f"{shown}Answers: (a) Jane")
    assert [
        chat.startswith(f"{shown}Given answer: {name}\nPassage:")
        for chat, name in zip(found.chats[1:4:2], ("Jane", "Mary"))
    ]
    assert found.chats[2].startswith(f"Question: {Q}\nGiven answer: Jane\nPassage: For Jane.\nTrue or False:")
    assert found.chats[5].startswith(f"Passage 1: For Jane.\nPassage 2: For Mary.\nQuestion: {Q}\nBetter: Passage 2")
    assert found.chats[6].startswith(f"Passage 1: For Mary.\nPassage 2: For Jane.\nQuestion: {Q}\nBetter: Passage 1")
    assert found.episode.answer == "Mary"


@pytest.mark.parametrize(
    ("valid", "answer"),
    [
        (("False", "True"), "Mary"),
        (("True", "True"), "Jane"),
        (("False. It's not true.", "True"), "Mary"),
        (("untrue", "It is true"), "Mary"),
    ],
)
def test_sure_counts_validity_and_takes_the_first_of_equals(valid, answer):
    turns = ("Jane (b) Mary", "x\n", valid[0], "y\n", valid[1], "neither", "neither")
    assert played(SuRe(k=1, **BARE), *turns).episode.answer == answer


def test_sure_with_one_candidate_and_with_none():
    one = played(SuRe(k=1, **BARE), "Mary, (b) Mary", "x\n", "False")
    assert one.episode.answer == "Mary"
    none = played(SuRe(k=1), "I can't say.", chats=True)
    assert (none.episode.answer, kinds(none.episode)) == (None, ["invalid"])
    assert listed("(a) Jane Doe, (b) **Mary**\n(c)") == ["Jane Doe", "Mary"]


# --- few-shot prompting of a recipe ---


def test_few_shot_shows_eight_worked_chats_in_the_recipes_form():
    agent: Any = few_shot(tools=("text",), recipe="search_r1")
    chat = agent.opening(EXAMPLE, with_template())
    text = with_template().decode(chat)
    assert text.count("[user] ") == text.count("[assistant] ") == 9
    assert text.endswith(f"[user] {Q}\n[assistant] ")
    first = text.split("[user] ")[1]
    assert first.startswith("Which philosopher was the mother of the author of Frankenstein?\n[assistant] <think>")
    assert (
        "<search>Who wrote Frankenstein?</search>\n\n<information>Doc 1(Title: Frankenstein) Frankenstein is" in first
    )
    assert first.rstrip().endswith("<answer>Mary Wollstonecraft</answer>")
    for one in WORKED:  # every turn of them is one that the protocol takes
        turns = [piece for piece, written in agent.pieces(demonstration(one, "text")) if written]
        assert len(turns) == 3
        assert all(isinstance(turn, str) and agent.grammar.well_formed(turn) for turn in turns)


def test_few_shot_runs_as_the_recipes_agent():
    turns = ("<think>a</think><search>who</search>", "<think>b</think><answer>Mary</answer>")
    agent: Any = next(
        iter(baseline_agents("few_shot", ("text",), {"recipe": "search_r1", "shots": 2, "k": 1}).values())
    )
    found = played(agent, *turns)
    assert (found.asked, found.episode.answer) == ([("text", "who", 1)], "Mary")
    assert found.chats[0].count("<answer>") == 2 + 1 + agent.grammar.instructions().count("<answer>")


def test_few_shot_of_r1_router_shows_chats_of_the_kind_that_is_asked():
    """Every worked route and answer is one that the protocol takes; the third of a question asks for nothing more."""
    agent: Any = few_shot(tools=BOTH, recipe="r1_router")
    route = "<think>a</think>\n<sub-question>who</sub-question>\n<ret>table retriever</ret>"
    stop = "<think>b</think>\n<sub-question>none</sub-question>\n<ret>none</ret>"
    answer = "<think>c</think>\n<answer>Mary</answer>"
    found = played(agent, route, answer, stop, answer, tools=BOTH, chats=True)
    assert (found.asked, found.episode.answer) == ([("table", "who", agent.k)], "Mary")
    assert [chat.count("[assistant] ") for chat in found.chats] == [9] * 4
    first, second, _, last = found.chats
    assert first.count("<sub-question>") == 8 + 1 + 2  # worked, the policy's own, and two in the instructions
    assert "Sub-question 1: Who designed the Sydney Opera House?" in first
    assert "<ret>none</ret>" in first
    assert "text retriever 1] Frankenstein" in second
    assert last.endswith(f"Sub-question 1: who\nAnswer 1: Mary\nFinal answer:\n[assistant] {answer}")
    protocol = agent.protocol
    for number, one in enumerate(WORKED):
        for kind in ("route", "answer", "final"):
            request, written = protocol.worked(one, kind, number)
            assert request.asked == kind
            assert request.form.well_formed(written)
    plain = protocol.opening(protocol.final("Why?", ()), tiny.tokenizer(), instruct=False)
    assert tiny.tokenizer().decode(plain).endswith("\n\nQuestion: Why?\nFinal answer:\n")


def test_few_shot_of_mmsearch_r1_searches_in_words():
    agent: Any = few_shot(tools=("image", "text"), recipe="mmsearch_r1", shots=2)
    text = with_template().decode(agent.opening(EXAMPLE, with_template()))
    assert text.count("[user] ") == 2 * 2 + 1
    assert text.count("[assistant] ") == 2 * 2 + 1
    for one in WORKED:
        roles = [(message.role, message.content) for message in agent.worked(one)]
        assert [role for role, _ in roles] == ["user", "assistant", "user", "assistant"]
        assert f"<text_search>{one.hops[-1].question}</text_search>" in roles[1][1]
        assert one.hops[-1].text in roles[2][1]
        assert all(agent.form.well_formed(said) for role, said in roles if role == "assistant")


@pytest.mark.parametrize("looks", [True, False])
@pytest.mark.parametrize("scale", [0, 1000])
def test_few_shot_of_vrag_rl_searches_looks_closer_and_answers(looks, scale):
    """Every worked turn is one that the protocol takes, and its boxes lie in the page or the scale of the boxes."""
    made: Any = few_shot(tools=("pages",), recipe="vrag_rl")
    agent = dataclasses.replace(made, looks=looks, regions=RegionRule(box_scale=scale), max_turns=4)
    text = with_template().decode(agent.opening(EXAMPLE, with_template()))
    chats = [agent.worked(one) for one in WORKED_PAGES]
    assert text.count("[assistant] ") == sum(len(chat) // 2 for chat in chats) + 1
    assert text.endswith(f"[user] Question: {Q}\n[assistant] ")
    kinds_of = []
    for chat in chats:
        assert [message.role for message in chat] == ["user", "assistant"] * (len(chat) // 2)
        turns = [message.content for message in chat[1::2]]
        assert all(agent.form.well_formed(turn) for turn in turns)
        actions = [agent.form.parse(turn) for turn in turns]
        kinds_of.append([action.kind for action in actions])
        for action in (action for action in actions if action.kind == "region"):
            left, top, right, bottom = action.box
            assert 0 <= left < right <= (scale or SIZE[0])
            assert 0 <= top < bottom <= (scale or SIZE[1])
    assert all(kinds[0] == "search" and kinds[-1] == "answer" for kinds in kinds_of)
    assert sum("region" in kinds for kinds in kinds_of) == (4 if looks else 0)
    assert ("<bbox>[448, 344, 672, 804]</bbox>" in text) == (looks and not scale)
    assert "Harbour line 5,100" in text  # also where it is told with the page


def test_few_shot_of_vrag_rl_keeps_to_the_budget():
    agent: Any = next(iter(baseline_agents("few_shot", ("pages",), {"recipe": "vrag_rl", "max_turns": 2}).values()))
    assert [len(agent.worked(one)) for one in WORKED_PAGES] == [4, 0, 0, 0, 0, 4, 0, 0]
    told = dataclasses.replace(agent, shows="text", max_turns=3, searches=1)
    assert [len(told.worked(one)) for one in WORKED_PAGES] == [4, 6, 0, 0, 6, 4, 0, 6]
    assert told.worked(WORKED_PAGES[0])[2].content == WORKED_PAGES[0].steps[0].shows
    turns = ("<think>a</think><search>who</search>", "<think>b</think><answer>Mary</answer>")
    found = played(told, *turns, tools=("pages",), chats=True)
    assert (found.asked[0][:2], found.episode.answer) == (("pages", "who"), "Mary")


def test_few_shot_of_any_number_of_knowledge_bases():
    agent = few_shot(tools=BOTH)  # recipe "search"
    assert isinstance(agent, FewShot)
    assert agent.grammar.tools == BOTH
