"""The search agent's loop, step by step, with a scripted policy."""

import dataclasses

import numpy as np
import pytest

from routerl_jax.agents.driver import run
from routerl_jax.agents.search_agent import SearchAgent
from routerl_jax.baselines.routing import FixedRouting, RandomRouting, no_search
from routerl_jax.core.types import Demonstration, DemonstrationStep, Example, Passage
from tests import tiny
from tests.agents.scripted import ScriptedEngine

AGENT = SearchAgent(grammar=tiny.GRAMMAR, max_searches=3, k=2, max_turn_tokens=100, answer_tokens=12)
EXAMPLE = Example(id="q", question="What is the capital of Ghana?", answers=("Accra",))
SEARCH = "<think>hm</think><sub-question>capital of Ghana</sub-question><ret>{} retriever</ret>"
ANSWER = "<think>so</think><answer>Accra</answer>"


def play(*turns, agent=AGENT, tools=None, **engine):
    """Runs the agent on a policy that says these turns."""
    made = ScriptedEngine(lambda example, sample, turn: turns[turn], **engine)
    tools = tools or {name: tiny.ScriptedKB(name) for name in ("text", "table")}
    (episode,) = run(agent, [EXAMPLE], made, tools)
    return episode, tools, made


def spoken(episode, engine):
    """The conversation as text."""
    return engine.tokenizer.decode(episode.sequences[0].tokens)


def test_searches_reads_and_answers():
    episode, _, engine = play(SEARCH.format("table"), SEARCH.format("text"), ANSWER)
    assert episode.answer == "Accra"
    assert [(c.tool, c.query) for c in episode.calls] == [("table", "capital of Ghana"), ("text", "capital of Ghana")]
    assert [t.action.kind for t in episode.turns] == ["search", "search", "answer"]
    assert all(t.well_formed for t in episode.turns)
    assert spoken(episode, engine) == (
        "Question: What is the capital of Ghana?\n"
        + SEARCH.format("table")
        + "<information>\ntar-0: fact 0 about 16\ntar-1: fact 1 about 16\n</information>"
        + SEARCH.format("text")
        + "<information>\nter-0: fact 0 about 16\nter-1: fact 1 about 16\n</information>"
        + ANSWER
    )
    assert not engine.live


def test_only_what_the_policy_wrote_is_trained_on():
    """Token in, token out: the mask covers exactly the sampled turns, in place."""
    episode, _, engine = play(SEARCH.format("table"), "<think>no tags", ANSWER)
    sequence = episode.sequences[0]
    runs = np.split(sequence.tokens, np.flatnonzero(np.diff(sequence.loss_mask)) + 1)
    texts = [engine.tokenizer.decode(ids) for ids in runs]
    assert texts[1::2] == [turn.text for turn in episode.turns]
    assert texts[0::2] == [episode.prompt, *(turn.observation for turn in episode.turns[:-1])]
    assert (sequence.logprobs[sequence.loss_mask] == -1).all()
    assert (sequence.logprobs[~sequence.loss_mask] == 0).all()
    assert (sequence.versions >= 0).tolist() == sequence.loss_mask.tolist()


def test_after_the_last_search_the_answer_is_forced():
    episode, _, engine = play(*[SEARCH.format("text")] * 3, "Accra</answer>")
    assert len(episode.calls) == 3
    assert episode.answer == "Accra"
    assert episode.turns[-1].forced == "<answer>"
    assert all(
        turn.well_formed for turn in episode.turns
    )  # that no thought precedes the answer is not the policy's doing
    sequence = episode.sequences[0]
    opening = engine.tokenizer.encode("<answer>")[0]
    assert not sequence.loss_mask[sequence.tokens == opening].any()  # the policy did not choose to answer


@pytest.mark.parametrize("text", ["Accra", "Accra <think>x</think></answer>"])
def test_a_forced_answer_must_be_closed_and_plain(text):
    episode, _, _ = play(*[SEARCH.format("text")] * 3, text)
    assert episode.turns[-1].forced
    assert not episode.turns[-1].well_formed


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("<think>x</think><sub-question>q</sub-question><ret>map retriever</ret>", "there is no 'map retriever'"),
        ("<think>x</think><ret>text retriever</ret>", "the sub-question is missing"),
        ("<think>x</think><sub-question> </sub-question><ret>text retriever</ret>", "the sub-question is missing"),
    ],
)
def test_an_invalid_action_is_explained_and_costs_a_turn(text, error):
    episode, _, _ = play(text, text, ANSWER)
    assert [t.action.kind for t in episode.turns] == ["invalid", "invalid", "answer"]
    assert error in episode.turns[0].observation
    assert episode.invalid_actions == 2
    assert not episode.calls
    assert episode.answer == "Accra"


def test_ending_without_an_answer_ends_the_episode():
    episode, _, _ = play("I give up")
    assert episode.answer is None
    assert episode.turns[-1].stop_reason == "eos"


def test_none_means_that_nothing_more_is_needed():
    episode, _, _ = play("<think>x</think><sub-question>none</sub-question><ret>None</ret>", "Accra</answer>")
    assert not episode.calls
    assert episode.answer == "Accra"


def test_passages_are_dropped_whole_when_room_is_short():
    class Verbose:
        def search(self, queries, k):
            return [
                [Passage(id=str(i), title="", text=f"long story {i} " + "na " * 40) for i in range(k)] for _ in queries
            ]

    tools = {"text": Verbose(), "table": Verbose()}
    agent = dataclasses.replace(AGENT, k=5)
    episode, _, _ = play(SEARCH.format("text"), ANSWER, agent=agent, tools=tools, max_length=360)
    shown = episode.turns[0].observation
    assert 0 < shown.count("long story") < 5
    assert shown.startswith("<information>\nter-0:")
    assert shown.endswith("na\n</information>")
    assert episode.answer == "Accra"
    assert len(episode.sequences[0]) <= 360


def test_when_not_even_an_empty_observation_fits_the_answer_is_forced():
    tight = len(tiny.tokenizer().encode("Question: What is the capital of Ghana?\n" + SEARCH.format("text"))) + 20
    episode, _, _ = play(SEARCH.format("text"), "Accra</answer>", max_length=tight)
    assert episode.turns[-1].forced == "<answer>"
    assert episode.answer == "Accra"
    assert not episode.turns[0].observation


def test_a_prompt_that_leaves_no_room_gives_a_truncated_episode():
    prompt = len(tiny.tokenizer().encode("Question: What is the capital of Ghana?\n"))
    episode, _, _ = play(ANSWER, max_length=prompt + 5)
    assert episode.truncated
    assert episode.answer is None


def test_a_turn_that_runs_into_its_limit_is_invalid_and_the_run_goes_on():
    episode, _, _ = play("<think>" + "na " * 200, ANSWER, agent=dataclasses.replace(AGENT, max_turn_tokens=30))
    assert episode.turns[0].stop_reason == "length"
    assert episode.turns[0].action.kind == "invalid"
    assert episode.turns[0].tokens == 30
    assert episode.answer == "Accra"


def test_demonstrations_are_written_as_rollouts_are():
    """The tokens and the mask of a demonstration equal those of a rollout that says the same, forced answer included."""
    passages = tuple(tiny.ScriptedKB("table").search(["capital of Ghana"], 2)[0])
    step = DemonstrationStep(thought="hm", query="capital of Ghana", tool="table", passages=passages)
    for count in (0, 1, 3):
        demonstration = Demonstration(example=EXAMPLE, steps=(step,) * count, thought="so", answer="Accra")
        last = "Accra</answer>" if count == 3 else ANSWER
        episode, _, engine = play(*[SEARCH.format("table")] * count, last)
        written = AGENT.demonstrate(demonstration, engine.tokenizer)
        np.testing.assert_array_equal(written.tokens, episode.sequences[0].tokens)
        np.testing.assert_array_equal(written.loss_mask, episode.sequences[0].loss_mask)


def test_routing_baselines_change_the_call_not_the_words():
    fields = {name: getattr(AGENT, name) for name in AGENT.__dataclass_fields__}
    episode, _, _ = play(SEARCH.format("text"), ANSWER, agent=FixedRouting(**fields, tool="table"))
    assert episode.turns[0].action.tool == "text"
    assert [call.tool for call in episode.calls] == ["table"]
    examples = [dataclasses.replace(EXAMPLE, id=str(i)) for i in range(200)]
    engine = ScriptedEngine(lambda example, sample, turn: [SEARCH.format("text"), ANSWER][turn])
    tools = {name: tiny.ScriptedKB(name) for name in ("text", "table")}
    drawn = [e.calls[0].tool for e in run(RandomRouting(**fields), examples, engine, tools)]
    assert 70 < drawn.count("table") < 130  # of 200; four standard deviations are 28
    assert drawn == [e.calls[0].tool for e in run(RandomRouting(**fields), examples, engine, tools)]
    episode, _, _ = play("Accra</answer>", agent=no_search(AGENT))
    assert not episode.calls
    assert episode.answer == "Accra"
