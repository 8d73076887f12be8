"""Which tokens a turn has, and what they are reinforced by, in one growing conversation and in chats of their own."""

import dataclasses

import numpy as np
import pytest

from routerl_jax.agents.driver import run
from routerl_jax.core.types import Episode, Example, Turn
from routerl_jax.recipes.r1_router.agents import StepwiseAgent
from routerl_jax.recipes.r1_router.steps import StepProtocol
from routerl_jax.training.config import LearnerConfig, TurnCreditConfig
from routerl_jax.training.credit import assign, sequences_of
from routerl_jax.training.finer_credit import spread
from tests import tiny
from tests.agents.scripted import AGENT, ANSWER, SEARCH, ScriptedEngine, knowledge

EXAMPLE = Example(id="q", question="What is the capital of Ghana?", answers=("Accra",))
TURNS = {0: (SEARCH.format("text"), ANSWER), 1: (SEARCH.format("table"), "no tags"), 2: (ANSWER,)}
REWARDS = {0: (1.0, 0.0), 1: (0.0, 0.5), 2: (0.0,)}
STEPS = StepwiseAgent(protocol=StepProtocol(tools=("text", "table")), max_searches=1, k=1, max_turn_tokens=100)


def attempts(agent, script, samples):
    """Episodes of a scripted policy with outcome 1, 0, 0 and the turn rewards above."""
    engine = ScriptedEngine(script, max_length=2000)
    episodes = run(agent, [EXAMPLE], engine, knowledge(), samples=samples)
    for episode in episodes:
        for turn, reward in zip(episode.turns, REWARDS[episode.sample]):
            turn.rewards = {"r": reward}
        outcome = float(episode.sample == 0)
        episode.rewards = {"total": outcome + sum(sum(turn.rewards.values()) for turn in episode.turns)}
    return episodes, engine


def segments(episode, values):
    """The distinct values of sampled segments, in order."""
    found = []
    for sequence, per_token in zip(episode.sequences, values):
        for part in np.split(np.arange(len(sequence)), np.flatnonzero(np.diff(sequence.loss_mask)) + 1):
            if sequence.loss_mask[part[0]]:
                assert np.ptp(per_token[part]) == 0
                found.append(float(per_token[part[0]]))
            else:
                assert not per_token[part].any()
    return found


def test_a_turn_s_tokens_are_those_that_the_ledger_recorded() -> None:
    """Though encoding the turn's text again would give others."""
    episodes, engine = attempts(AGENT, lambda example, sample, turn: TURNS[sample][turn], 3)
    differs = []
    for episode in episodes:
        (sequence,) = episode.sequences
        for turn, said in zip(episode.turns, engine.said["q", episode.sample]):
            assert sequence.tokens[turn.start : turn.start + turn.tokens].tolist() == said
            differs.append(engine.tokenizer.encode(turn.text) != said)
    assert any(differs)


def test_each_turn_of_a_growing_conversation_has_its_own_advantage() -> None:
    """r - mean of its place, g = 1: to go are [1, 0], [0.5, 0.5] and [0], outcomes 1, 0, 0."""
    episodes, _ = attempts(AGENT, lambda example, sample, turn: TURNS[sample][turn], 3)
    settings = LearnerConfig(advantage="dr_grpo", credit="turn")
    credit = assign(settings, episodes, np.zeros(3, int))
    found = [segments(episode, [values]) for episode, values in zip(episodes, credit.advantages)]
    expected = [[2 / 3 + 0.5, 2 / 3 - 0.25], [-1 / 3 + 0, -1 / 3 + 0.25], [-1 / 3 - 0.5]]
    assert found == [pytest.approx(values, abs=1e-6) for values in expected]
    assert credit.keep.tolist() == [0, 1, 2]


def test_chats_of_their_own_are_turns_by_what_was_asked() -> None:
    """Attempt 0 routes, answers and concludes; attempt 1 routes to none, so that its second turn is a final answer, too."""
    route = "<think>hm</think>\n<sub-question>capital of Ghana</sub-question>\n<ret>text retriever</ret>"
    none = "<think>hm</think>\n<sub-question>none</sub-question>\n<ret>none</ret>"
    said = {0: (route, ANSWER, ANSWER), 1: (none, ANSWER)}

    def script(example, sample, turn):
        return said[sample][int(example.partition("#")[2] or 0)]

    episodes, _ = attempts(STEPS, script, 2)
    assert [[turn.asked for turn in e.turns] for e in episodes] == [["route", "answer", "final"], ["route", "final"]]
    assert [[turn.sequence for turn in e.turns] for e in episodes] == [[0, 1, 2], [0, 1]]
    for episode, rewards in zip(episodes, ([0.5, 1.0, 0.0], [1.0, 1.0])):
        for turn, reward in zip(episode.turns, rewards):
            turn.rewards = {"r": reward}
        episode.rewards = {"total": sum(rewards)}
    settings = LearnerConfig(advantage="dr_grpo", credit="turn", turn=TurnCreditConfig(discount=0.0, weight=2.0))
    credit = assign(settings, episodes, np.zeros(2, int))
    sequences, owner = sequences_of(episodes)
    values = [a[s.loss_mask] for a, s in zip(credit.advantages, sequences)]
    assert owner.tolist() == [0, 0, 0, 1, 1]
    assert [v[0] for v in values] == pytest.approx([-0.5, 0.0, -1.0, 0.5, 1.0])
    assert all(np.ptp(v) == 0 for v in values)


def test_a_question_on_which_no_turn_differs_is_left_out() -> None:
    episodes, _ = attempts(AGENT, lambda example, sample, turn: TURNS[0][turn], 2)
    for episode in episodes:
        for turn in episode.turns:
            turn.rewards = {"r": 1.0}
        episode.rewards = {"total": 2.0}
    settings = LearnerConfig(advantage="dr_grpo", credit="turn")
    assert assign(settings, episodes, np.zeros(2, int)).keep.tolist() == []
    assert assign(dataclasses.replace(settings, drop_no_signal=False), episodes, np.zeros(2, int)).keep.tolist() == [
        0,
        1,
    ]


@pytest.mark.parametrize("advantage", ["dr_grpo", "reinforce_pp_baseline"])
def test_a_question_without_signal_beside_one_with(advantage: str) -> None:
    """Whitening moves an advantage of 0: what is left out is told before it, and has no part in it."""
    equal, _ = attempts(AGENT, lambda example, sample, turn: TURNS[0][turn], 2)
    for episode in equal:
        for turn in episode.turns:
            turn.rewards = {"r": 1.0}
        episode.rewards = {"total": 2.0}
    unequal, _ = attempts(AGENT, lambda example, sample, turn: TURNS[sample][turn], 3)
    episodes, groups = [*equal, *unequal], np.asarray([0, 0, 1, 1, 1])
    credit = assign(LearnerConfig(advantage=advantage, credit="turn"), episodes, groups)
    assert credit.keep.tolist() == [2, 3, 4]
    sequences, _ = sequences_of(episodes)
    assert len({int(sequence.loss_mask.sum()) for sequence in sequences}) > 2
    trained = np.concatenate([credit.advantages[i][sequences[i].loss_mask] for i in credit.keep])
    plain = assign(LearnerConfig(advantage="dr_grpo", credit="turn"), episodes, groups).advantages
    raw = np.concatenate([plain[i][sequences[i].loss_mask] for i in credit.keep])
    expected = (raw - raw.mean()) / raw.std() if advantage == "reinforce_pp_baseline" else raw
    np.testing.assert_allclose(trained, expected, atol=1e-6)  # float32


def test_what_is_refused() -> None:
    episodes, _ = attempts(AGENT, lambda example, sample, turn: TURNS[0][turn], 1)
    episodes[0].turns[0].start += 1
    with pytest.raises(ValueError, match="attempt 0 at question 'q' sampled tokens that belong to no turn"):
        spread(episodes[0], [1.0, 1.0])
    with pytest.raises(ValueError, match=r"^discount=1\.5 must be in \[0, 1\]"):
        TurnCreditConfig(discount=1.5)
    with pytest.raises(ValueError, match=r"^weight=-1\.0 must not be negative"):
        TurnCreditConfig(weight=-1.0)


def judged(*values):
    """Attempts at one question, whose turns have these rewards by term; a turn's tokens are one each."""
    episodes = []
    for sample, turns in enumerate(values):
        sequence = tiny.random_sequences(1, seed=sample, turns=1)[0]
        mask = np.zeros(len(sequence), bool)
        mask[: len(turns)] = True
        episodes.append(
            Episode(
                example=EXAMPLE,
                sample=sample,
                answer=None,
                turns=[
                    Turn(text="", stop_reason="stop", tokens=1, start=i, rewards=dict(rewards))
                    for i, rewards in enumerate(turns)
                ],
                sequences=[dataclasses.replace(sequence, loss_mask=mask)],
                rewards={"total": float(sample == 0) + sum(sum(rewards.values()) for rewards in turns)},
            )
        )
    return episodes


def of_turns(settings, episodes):
    credit = assign(settings, episodes, np.zeros(len(episodes), int))
    return [values[: len(e.turns)].tolist() for e, values in zip(episodes, credit.advantages)]


def test_an_answer_is_not_compared_with_the_rewards_of_searches_at_its_place() -> None:
    """r - mean. Outcomes 1, 0, 0, so 2/3 and -1/3. At place 0 gains 0.6 and 0.2 of those who searched; attempt 0 answered."""
    episodes = judged([{}], [{"gain": 0.6}, {}], [{"gain": 0.2}, {}])
    found = of_turns(LearnerConfig(advantage="dr_grpo", credit="turn"), episodes)
    assert found == [
        pytest.approx([2 / 3], abs=1e-6),
        pytest.approx([-1 / 3 + 0.2, -1 / 3], abs=1e-6),
        pytest.approx([-1 / 3 - 0.2, -1 / 3], abs=1e-6),
    ]


def test_an_unjudged_turn_passes_later_rewards_on_and_gets_none() -> None:
    """g = 1/2 over places: G of place 0 is 0.8 + 0.4 / 4 and 0 + 0.8 / 4, mean 0.55; of place 2 0.4 and 0.8, mean 0.6."""
    episodes = judged([{"gain": 0.8}, {}, {"gain": 0.4}], [{"gain": 0.0}, {}, {"gain": 0.8}])
    settings = LearnerConfig(advantage="dr_grpo", credit="turn", turn=TurnCreditConfig(discount=0.5))
    assert of_turns(settings, episodes) == [
        pytest.approx([0.5 + 0.35, 0.5, 0.5 - 0.2], abs=1e-6),
        pytest.approx([-0.5 - 0.35, -0.5, -0.5 + 0.2], abs=1e-6),
    ]


def test_each_term_is_compared_among_the_turns_that_it_judges() -> None:
    """`tidy` judges both, 1 and 0: +-0.5; `gain` judges attempt 1 alone, so there is nothing to compare: 0."""
    episodes = judged([{"tidy": 1.0}], [{"tidy": 0.0, "gain": 5.0}])
    found = of_turns(LearnerConfig(advantage="dr_grpo", credit="turn"), episodes)
    assert found == [pytest.approx([0.5 + 0.5], abs=1e-6), pytest.approx([-0.5 - 0.5], abs=1e-6)]


def test_terms_that_judge_the_same_turns_are_added_before_they_are_compared() -> None:
    both = judged([{"a": 1.0, "b": 0.5}], [{"a": 0.0, "b": 0.25}], [{"a": 0.5, "b": 0.0}])
    one = judged([{"c": 1.5}], [{"c": 0.25}], [{"c": 0.5}])
    settings = LearnerConfig(advantage="grpo", credit="turn")
    assert of_turns(settings, both) == of_turns(settings, one)
