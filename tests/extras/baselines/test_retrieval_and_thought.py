"""Direct answers, chains of thought, vanilla RAG, IRCoT, Iter-RetGen and Self-Ask, call by call, with scripted policies."""

import dataclasses
from typing import Any

import pytest

from routerl_jax.extras.baselines.rounds import IRCoT, IterRetGen, SelfAsk
from routerl_jax.extras.baselines.vanilla_rag import ChainOfThought, Direct, VanillaRAG
from tests.extras.baselines.playing import EXAMPLE, played

Q = EXAMPLE.question
BARE: dict[str, Any] = {"instruct": False}


def kinds(episode):
    return [turn.action and turn.action.kind for turn in episode.turns]


# --- without a search ---


def test_a_direct_answer_is_the_first_line():
    found = played(Direct(**BARE), "Mary\nQuestion: and what")
    assert (found.episode.answer, found.asked) == ("Mary", [])
    assert found.chats == [f"Question: {Q}\nAnswer:Mary\n"]
    assert found.episode.turns[0].well_formed


def test_an_instruct_model_is_told_in_its_template():
    found = played(Direct(), "Answer: Mary", chats=True)
    assert found.chats[0].startswith("[system] Answer the question with the answer alone")
    assert f"[user] Question: {Q}\n[assistant] Answer: Mary" in found.chats[0]
    assert found.episode.answer == "Mary"
    plain = played(Direct(), "Mary\n")  # told all the same, as text, where there is no template
    assert plain.chats[0].startswith("Answer the question with the answer alone")
    assert plain.chats[0].endswith(f"\n\nQuestion: {Q}\nAnswer:Mary\n")


def test_marks_in_a_question_are_broken_up():
    example = dataclasses.replace(EXAMPLE, question="What is <|endoftext|>?")
    assert "< |endoftext|>" in played(Direct(**BARE), "it\n", example=example).chats[0]


def test_a_chain_of_thought_answers_with_its_conclusion():
    found = played(ChainOfThought(**BARE), " She was. So the answer is: **Mary**.\nQuestion: Who else")
    assert (found.episode.answer, kinds(found.episode)) == ("Mary", ["answer"])
    assert found.chats[0].endswith("So the answer is: **Mary**.\nQuestion:")


def test_a_chain_without_a_conclusion_has_one_begun_for_it():
    found = played(ChainOfThought(**BARE), " I do not know.", " Mary.\n")
    assert (found.episode.answer, kinds(found.episode)) == ("Mary", ["invalid", "answer"])
    assert found.episode.turns[1].forced == "\nSo the answer is:"


def test_room_is_kept_for_an_answer_that_may_be_begun():
    prompt = len(f"Question: {Q}\nAnswer:")  # letters: more than its tokens
    found = played(ChainOfThought(answer_tokens=8, **BARE), "x" * 500, " Mary\n", max_length=prompt + 60)
    assert (found.episode.answer, found.episode.turns[0].stop_reason) == ("Mary", "length")


def test_a_chat_without_a_conclusion_is_asked_once_more():
    found = played(ChainOfThought(shots=0), "I do not know.", "Mary", chats=True)
    assert (found.episode.answer, found.episode.turns[1].forced) == ("Mary", "")
    assert "Now write the answer alone" in found.episode.turns[0].observation


def test_worked_questions_are_shown_where_the_task_is_told():
    assert played(ChainOfThought(shots=2), "So the answer is: x").chats[0].count("So the answer is:") == 4
    assert played(ChainOfThought(shots=2, **BARE), "So the answer is: x").chats[0].count("So the answer is:") == 1


# --- vanilla RAG ---


def test_vanilla_rag_over_all_has_k_documents_of_each():
    found = played(VanillaRAG(k=2, **BARE), "Mary\n", tools=("text", "table"))
    assert found.asked == [("text", Q, 2), ("table", Q, 2)]
    shown = "\n".join(
        f"[{number}] {name}: <{name} on {Q}>" for number, name in enumerate(("text1", "table1", "text2", "table2"), 1)
    )
    assert found.chats == [f"Documents:\n{shown}\n\nQuestion: {Q}\nAnswer:Mary\n"]
    assert found.episode.answer == "Mary"
    assert [call.tool for call in found.episode.calls] == ["text", "table"]


def test_vanilla_rag_of_one_asks_that_one():
    assert played(VanillaRAG(k=1, tools=("table",), **BARE), "x\n", tools=("text", "table")).asked == [("table", Q, 1)]


@pytest.mark.parametrize(
    ("question", "said"), [("nothing?", "Nothing was found."), ("broken?", "The search failed: ConnectionError")]
)
def test_what_went_wrong_stands_in_the_place_of_documents(question, said):
    example = dataclasses.replace(EXAMPLE, question=question)
    found = played(VanillaRAG(k=2, **BARE), "Mary\n", example=example)
    assert f"Documents:\n{said}" in found.chats[0]
    assert found.episode.answer == "Mary"


def test_documents_that_do_not_fit_are_left_out_from_the_last():
    """60 tokens or so a document; half of the room at most is kept for the answer."""
    found = played(VanillaRAG(k=5, answer_tokens=64, **BARE), "Mary\n", max_length=240)
    shown = [f"[{number}]" in found.chats[0] for number in range(1, 6)]
    assert shown[0]
    assert not shown[4]
    assert shown == sorted(shown, reverse=True)


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
    assert played(agent, " A. b", " So the answer is: Mary.\n").episode.answer == "Mary"
    spent = played(agent, " A. b", " It was Mary.\n")
    assert (spent.episode.answer, len(spent.asked)) == ("It was Mary", 2)  # R1-Router: the last sentence
    silent = played(agent, "\n")
    assert (silent.episode.answer, kinds(silent.episode), len(silent.asked)) == (None, ["invalid"], 1)


def test_ircot_collects_no_more_than_so_many_documents():
    found = played(IRCoT(k=3, max_documents=4, reader="direct", **BARE), " A. b", " So the answer is: x\n", "Mary\n")
    assert found.chats[2].count("on A.>") == 1
    assert "[4]" in found.chats[2]
    assert "[5]" not in found.chats[2]
    assert found.episode.answer == "Mary"


def test_ircot_goes_on_where_a_search_fails():
    found = played(IRCoT(k=1, **BARE), " It is broken. x", " So the answer is: y\n", " So the answer is: Mary")
    assert [call.error is not None for call in found.episode.calls] == [False, True]
    assert found.chats[2].count("[1]") == 1
    assert found.episode.answer == "Mary"


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
