"""R1-Router's agents on scripted policies: independent chats, what they carry, retries, what is learnt from."""

import dataclasses

import numpy as np
import pytest

from routerl_jax.agents.driver import run
from routerl_jax.core.types import Example, Passage, TextAndImage
from routerl_jax.data.readers import open_dataset
from routerl_jax.recipes.r1_router.agents import StepAgent, StepwiseAgent
from routerl_jax.recipes.r1_router.steps import StepProtocol
from tests import tiny
from tests.agents.scripted import ScriptedEngine, knowledge
from tests.data.trajectories import CAPITAL, write

TOOLS = ("text", "table")
PROTOCOL = StepProtocol(tools=TOOLS)
AGENT = StepwiseAgent(protocol=PROTOCOL, k=2, max_turn_tokens=200, answer_tokens=40)
EXAMPLE = Example(id="q", question="How many live in the capital?", answers=("2.5 million",))
STEP = PROTOCOL.routes.write_search("hm", "capital?", "text")
LAST = PROTOCOL.routes.write_search("hm", "how many live there?", "table")
STOP = PROTOCOL.routes.write_search("done", "none", "none")
FOUND = PROTOCOL.answers.write_answer("so", "It is Accra.")
FINAL = PROTOCOL.answers.write_answer("sum", "2.5 million")


def play(*turns, agent=AGENT, example=EXAMPLE, tools=None, **engine_options):
    """One episode in which chat number i is answered by turns[i]."""
    options = {"max_length": 3000, **engine_options}
    engine = ScriptedEngine(lambda name, sample, turn: turns[int(name.partition("#")[2] or 0)], **options)
    tools = tools or knowledge()
    [episode] = run(agent, [example], engine, tools)
    assert not engine.live
    return episode, engine, tools


def texts(episode, engine):
    """(prompt, what the policy wrote) of every chat."""
    decode = engine.tokenizer.decode
    return [(decode(s.tokens[~s.loss_mask]), decode(s.tokens[s.loss_mask])) for s in episode.sequences]


# --- a question --------------------------------------------------------------------------------------------------------


def test_a_question_goes_through_routes_answers_and_the_final_answer():
    episode, engine, tools = play(STEP, FOUND, LAST, PROTOCOL.answers.write_answer("so", "2.5 million."), STOP, FINAL)
    assert episode.answer == "2.5 million"
    assert [(call.tool, call.query) for call in episode.calls] == [
        ("text", "capital?"),
        ("table", "how many live there?"),
    ]
    assert [len(call.passages) for call in episode.calls] == [2, 2]
    assert [turn.action.kind for turn in episode.turns] == ["search", "answer", "search", "answer", "search", "answer"]
    assert all(turn.well_formed for turn in episode.turns)
    assert tools["text"].batches == [["capital?"]]
    chats = texts(episode, engine)
    assert [written for _, written in chats] == [
        STEP,
        FOUND,
        LAST,
        PROTOCOL.answers.write_answer("so", "2.5 million."),
        STOP,
        FINAL,
    ]
    so_far = "Question: How many live in the capital?\n"
    assert chats[0][0] == f"{so_far}Next sub-question:\n"
    assert "[text retriever 1] fact 0" in chats[1][0]
    assert chats[1][0].endswith("Question: capital?\nAnswer:\n")
    assert EXAMPLE.question not in chats[1][0]
    so_far += "Sub-question 1: capital?\nAnswer 1: It is Accra.\n"
    assert chats[2][0] == f"{so_far}Next sub-question:\n"
    so_far += "Sub-question 2: how many live there?\nAnswer 2: 2.5 million.\n"
    assert chats[4][0] == f"{so_far}Next sub-question:\n"
    assert chats[5][0] == f"{so_far}Final answer:\n"


def test_none_stops_at_once():
    episode, _, tools = play(STOP, FINAL)
    assert episode.answer == "2.5 million"
    assert not episode.calls
    assert not tools["text"].batches


def test_the_budget_ends_in_the_final_answer():
    """As the trajectories RARARAA: no fourth route is asked for."""
    episode, _, _ = play(*[STEP, FOUND] * 3, FINAL)
    assert len(episode.calls) == AGENT.max_searches == 3
    assert episode.answer == "2.5 million"


def test_a_route_that_cannot_be_read_is_asked_for_again_and_then_given_up():
    bad = "<think>hm</think><sub-question>q</sub-question><ret>web</ret>"
    episode, engine, _ = play(bad, STOP, FINAL)
    chats = texts(episode, engine)
    assert "there is no 'web'" in chats[1][0]
    assert "could not be used" not in chats[0][0]
    assert [turn.action.kind for turn in episode.turns] == ["invalid", "search", "answer"]
    episode, _, _ = play(bad, bad, bad, FINAL)
    assert episode.answer == "2.5 million"
    assert episode.invalid_actions == AGENT.attempts == 3
    assert not episode.calls


def test_the_last_attempt_at_an_answer_is_begun_for_the_policy():
    episode, engine, _ = play(STOP, "it is many", "it is so many", "2.5 million</answer>")
    assert episode.answer == "2.5 million"
    assert [turn.forced for turn in episode.turns] == ["", "", "", "<answer>"]
    assert episode.turns[-1].well_formed
    prompt, written = texts(episode, engine)[-1]
    assert prompt.endswith("Final answer:\n<answer>")
    assert written == "2.5 million</answer>"
    episode, engine, _ = play(STEP, "no", "no", "no", STOP, FINAL)
    assert "Answer 1: not known\n" in texts(episode, engine)[-1][0]
    episode, _, _ = play(STOP, "no", "no", "no")
    assert episode.answer is None


def test_a_failed_search_is_told_and_ends_nothing():
    class Broken:
        def search(self, queries, k):
            raise OSError("no reply")

    episode, engine, _ = play(STEP, FOUND, STOP, FINAL, tools=knowledge(text=Broken()))
    assert "The search failed: OSError: no reply" in texts(episode, engine)[1][0]
    assert episode.answer == "2.5 million"


def test_every_chat_is_learnt_from_and_only_what_was_sampled():
    episode, engine, _ = play(STEP, FOUND, STOP, FINAL)
    sampled = [sequence.tokens[sequence.loss_mask].tolist() for sequence in episode.sequences]
    assert sampled == [engine.said[("q" if not i else f"q#{i}", 0)][0] for i in range(4)]
    assert [turn.tokens for turn in episode.turns] == [*map(len, sampled)]


def test_a_prompt_suffix_begins_every_turn():
    agent = dataclasses.replace(AGENT, prompt_suffix="<think>")
    episode, engine, _ = play(STOP.removeprefix("<think>"), FINAL.removeprefix("<think>"), agent=agent)
    assert episode.answer == "2.5 million"
    assert all(turn.well_formed and turn.forced == "<think>" for turn in episode.turns)
    assert all(prompt.endswith("<think>") for prompt, _ in texts(episode, engine))


def test_documents_leave_room_for_a_turn():
    bare = len(tiny.tokenizer().encode(PROTOCOL.answer("capital?", []).user))
    episode, engine, _ = play(STEP, FOUND, STOP, FINAL, max_length=bare + 20 + AGENT.max_turn_tokens)
    assert "fact 0" in texts(episode, engine)[1][0]
    assert "fact 1" not in texts(episode, engine)[1][0]
    small = dataclasses.replace(AGENT, max_observation_tokens=1)
    episode, engine, _ = play(STEP, FOUND, STOP, FINAL, agent=small)
    assert "fact 0 ..\n" in texts(episode, engine)[1][0]  # what tells that there is nothing is no shorter


def test_of_a_document_that_does_not_fit_the_beginning_is_shown():
    class Long:
        def search(self, queries, k):
            return [[Passage(id="1", title="Accra", text="It is by the sea. " * 40)] * k for _ in queries]

    def prompt(limit):
        agent = dataclasses.replace(AGENT, max_observation_tokens=limit)
        episode, engine, _ = play(STEP, FOUND, STOP, FINAL, agent=agent, tools=knowledge(text=Long()))
        return texts(episode, engine)[1][0]

    bare = len(tiny.tokenizer().encode(PROTOCOL.answer("capital?", []).user))
    whole, shown = prompt(0), 0
    assert " ..\n" not in whole
    for limit in (20, 40, 80):
        cut = prompt(limit)
        beginning, mark, _ = cut.partition(" ..\n")
        assert mark
        assert whole.startswith(beginning)
        assert len(tiny.tokenizer().encode(cut)) <= bare + limit
        assert len(beginning) > shown
        shown = len(beginning)


def test_a_last_chat_that_is_cut_is_truncated():
    """By the limit of a turn: so it is masked as overlong, and counted."""
    agent = dataclasses.replace(AGENT, attempts=1, max_turn_tokens=6)
    [episode] = run(agent, [EXAMPLE], ScriptedEngine(lambda *_: FINAL, max_length=1000), knowledge())  # type: ignore[arg-type]
    assert (episode.answer, episode.truncated) == (None, True)


def test_without_room_for_the_next_chat_there_is_no_answer():
    long = PROTOCOL.answers.write_answer("so", "Accra " * 20)
    episode, _, _ = play(STEP, long, STEP, long, STOP, FINAL, max_length=260)
    assert episode.truncated
    assert episode.answer is None
    assert [turn.action.kind for turn in episode.turns] == ["search", "answer"] * 2


def test_a_picture_goes_to_knowledge_bases_that_see():
    seeing = dataclasses.replace(EXAMPLE, images=("volta.png",))
    assert AGENT.query("text_image", "river?", seeing) == TextAndImage(text="river?", image="volta.png")
    assert AGENT.query("text", "river?", seeing) == "river?"
    assert AGENT.query("text_image", "river?", EXAMPLE) == "river?"


def test_conversations_of_a_rollout_do_not_share_randomness(tmp_path):
    """A real engine: the same prompt twice in one rollout is answered differently, and equally in the next run."""
    from routerl_jax.agents.agent import Agent
    from routerl_jax.engine.engine import Engine

    class Twice(Agent):
        async def run(self, example, llm, tools):
            turns = [await llm.conversation("Question: ").generate(max_tokens=24) for _ in range(2)]
            return llm.conversation("end").episode(answer="|".join(turn.text for turn in turns))

    engine = Engine(tiny.model(), rows=4, max_length=64, segment=8)
    first, again = (run(Twice(), [EXAMPLE], engine, {})[0].answer for _ in range(2))
    assert first == again
    assert first.split("|")[0] != first.split("|")[1]


# --- a golden step -----------------------------------------------------------------------------------------------------


@pytest.fixture
def steps(tmp_path):
    source = open_dataset(f"trajectories:{write(tmp_path / 'golden.jsonl', CAPITAL)}")
    return [source[i] for i in range(len(source))]


@pytest.mark.parametrize("kind", [StepAgent, StepwiseAgent])
def test_a_golden_step_is_one_chat_on_the_gold_steps_before_it(steps, kind):
    agent = kind(protocol=PROTOCOL, max_turn_tokens=200)
    episode, engine, tools = play(LAST, agent=agent, example=steps[2])
    [(prompt, written)] = texts(episode, engine)
    assert prompt == (
        "Question: How many people live in the capital of Ghana?\nSub-question 1: capital of ghana?\nAnswer 1: accra.\n"
        "Next sub-question:\n"
    )
    assert written == LAST
    assert episode.answer == "how many live there?"
    assert not episode.calls
    assert not tools["text"].batches
    episode, engine, _ = play(FOUND, agent=agent, example=steps[1])
    assert texts(episode, engine)[0][0] == (
        "[text retriever 1] Accra is the capital.\n[text retriever 2] Kumasi A city.\nQuestion: capital of ghana?\nAnswer:\n"
    )
    assert episode.answer == "It is Accra."
    episode, _, _ = play("no tags", agent=agent, example=steps[5])
    assert episode.answer is None
    assert not episode.turns[0].well_formed


def test_a_step_agent_takes_no_questions():
    with pytest.raises(RuntimeError, match=r"example 'q', sample 0: it is no golden step; .*trajectories:FILE"):
        play(STOP, agent=StepAgent(protocol=PROTOCOL))


def test_rollouts_and_demonstrations_have_one_prompt(steps):
    for agent in (AGENT, dataclasses.replace(AGENT, instruct=True, prompt_suffix="<think>")):
        for example in steps:
            episode, _, _ = play("x", agent=agent, example=example)
            fed = episode.sequences[0].tokens[~episode.sequences[0].loss_mask]
            np.testing.assert_array_equal(fed, agent.opening(example, tiny.tokenizer()))
            [(written, learnt)] = agent.step_pieces(example)
            assert learnt
            assert play(written, agent=agent, example=example)[0].turns[0].well_formed


def test_demonstrations_leave_out_the_documents_that_rollouts_leave_out(steps):
    agent = dataclasses.replace(AGENT, prompt_suffix="<think>", max_turn_tokens=16)
    shown = set()
    for max_length in range(44, 90):
        episode, _, _ = play("x", agent=agent, example=steps[1], max_length=max_length)
        fed = episode.sequences[0].tokens[~episode.sequences[0].loss_mask]
        np.testing.assert_array_equal(fed, agent.opening(steps[1], tiny.tokenizer(), room=max_length))
        shown.add(tuple(fed.tolist()))
    assert len(shown) == 4  # none of its documents, the first one's beginning, the first, or both


# --- baselines ---------------------------------------------------------------------------------------------------------


def test_baselines_change_the_call_not_the_words():
    agents = AGENT.baselines(TOOLS)
    assert list(agents) == ["only_text", "only_table", "random_kb", "full_budget", "full_budget_random", "no_search"]
    episode, _, _ = play(STEP, FOUND, STOP, FINAL, agent=agents["only_table"])
    assert [turn.action.tool for turn in episode.turns[:1]] == ["text"]
    assert [call.tool for call in episode.calls] == ["table"]
    examples = [dataclasses.replace(EXAMPLE, id=str(i)) for i in range(200)]
    turns = [STEP, FOUND, STOP, FINAL]
    engine = ScriptedEngine(lambda name, sample, turn: turns[int(name.partition("#")[2] or 0)], max_length=3000)
    drawn = [episode.calls[0].tool for episode in run(agents["random_kb"], examples, engine, knowledge())]
    assert 70 < drawn.count("table") < 130  # of 200; four standard deviations are 28
    episode, _, _ = play(FINAL, agent=agents["no_search"])
    assert episode.answer == "2.5 million"
    assert not episode.calls


def test_a_full_budget_takes_nothing_but_stopping_away():
    """Where the policy would stop it goes on with a route of its own; if that is none again, with its own retriever for the
    question; if it names none for that either, with the one that it searched last."""
    agent = AGENT.baselines(TOOLS)["full_budget"]
    opening, asked = "<think></think>\n<sub-question>", f"{EXAMPLE.question}</sub-question>\n<ret>"
    own, none = LAST.partition("<sub-question>")[2], STOP.partition("<sub-question>")[2]
    episode, engine, _ = play(
        STEP, FOUND, STOP, own, FOUND, STOP, none, "table retriever</ret>", FOUND, FINAL, agent=agent
    )
    assert [(call.tool, call.query) for call in episode.calls] == [
        ("text", "capital?"),
        ("table", "how many live there?"),
        ("table", EXAMPLE.question),
    ]
    assert [turn.forced for turn in episode.turns if turn.forced] == [opening, opening, opening + asked]
    assert all(turn.well_formed for turn in episode.turns)
    assert texts(episode, engine)[-1][0].count("Answer ") == 3
    assert episode.answer == "2.5 million"
    stubborn = (LAST, FOUND, *(STOP, none, "none</ret>", FOUND) * 2, FINAL)
    episode, _, _ = play(*stubborn, agent=agent)
    assert [(call.tool, call.query) for call in episode.calls[1:]] == [("table", EXAMPLE.question)] * 2
    assert len(episode.calls) == agent.max_searches


def test_a_random_full_budget_asks_the_question_where_the_policy_would_stop():
    agent = AGENT.baselines(TOOLS)["full_budget_random"]
    episode, engine, _ = play(STEP, FOUND, STOP, FOUND, STOP, FOUND, FINAL, agent=agent)
    assert [call.query for call in episode.calls] == ["capital?", EXAMPLE.question, EXAMPLE.question]
    assert episode.calls[0].tool == "text"  # the policy's own
    assert texts(episode, engine)[-1][0].count("Answer ") == 3
    assert episode.answer == "2.5 million"


def test_one_search_reads_what_the_question_finds():
    agents = AGENT.vanilla_rag(TOOLS)
    assert list(agents) == ["vanilla_rag_text", "vanilla_rag_table"]
    episode, engine, _ = play(FINAL, agent=agents["vanilla_rag_table"])
    assert [(call.tool, call.query) for call in episode.calls] == [("table", EXAMPLE.question)]
    [(prompt, _)] = texts(episode, engine)
    assert "[table retriever 1] fact 0" in prompt
    assert prompt.endswith(f"Question: {EXAMPLE.question}\nFinal answer:\n")
    assert episode.answer == "2.5 million"
    assert [turn.asked for turn in episode.turns] == ["final"]
    told = dataclasses.replace(agents["vanilla_rag_table"], instruct=True)
    episode, engine, _ = play(FINAL, agent=told)
    [(prompt, _)] = texts(episode, engine)
    assert "in as few words as it takes" in prompt  # an exact match is hoped for, as in the final answer's chat
    assert "in one sentence" not in prompt
    alone = dataclasses.replace(AGENT, protocol=StepProtocol(tools=("text",)))
    assert list(alone.baselines(("text",))) == ["vanilla_rag", "full_budget", "full_budget_random", "no_search"]


def test_another_number_of_passages():
    assert AGENT.with_passages(7) == dataclasses.replace(AGENT, k=7)
    with pytest.raises(ValueError, match="StepAgent has no number of passages"):
        StepAgent(protocol=PROTOCOL).with_passages(7)
