"""Few-shot prompting of a recipe: what its worked chats look like, and that the recipe's agent runs after them."""

import dataclasses
from typing import Any

import pytest

from routerl_jax.extras.baselines.baseline import WORKED
from routerl_jax.extras.baselines.few_shot import SIZE, WORKED_PAGES, FewShot, demonstration, few_shot
from routerl_jax.extras.baselines.registry import baseline_agents
from routerl_jax.models.regions import RegionRule
from tests import tiny
from tests.extras.baselines.playing import BOTH, EXAMPLE, Q, played, with_template


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
