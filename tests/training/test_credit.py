"""What a step's tokens are reinforced by: masks, whitening and KL together, by hand."""

import dataclasses

import numpy as np
import pytest

from routerl_jax.core.types import Action, Episode, Example, Sequence, Turn
from routerl_jax.training.config import LearnerConfig
from routerl_jax.training.credit import assign, with_logprobs

GROUPS = np.asarray([4, 4, 9, 9])


def sequence(mask: list[bool], logprob: float) -> Sequence:
    trained = np.asarray(mask)
    return Sequence(
        tokens=np.arange(len(mask), dtype=np.int32),
        loss_mask=trained,
        logprobs=np.where(trained, logprob, 0).astype(np.float32),
        positions=np.zeros((3, len(mask)), np.int32),
        versions=np.where(trained, 0, -1).astype(np.int32),
    )


def episode(reward: float, *sequences: Sequence, invalid: bool = False, truncated: bool = False) -> Episode:
    turn = Turn(text="?", stop_reason="stop", tokens=1, action=Action(kind="invalid") if invalid else None)
    return Episode(
        example=Example(id="e", question="?", answers=("a",)),
        sample=0,
        answer=None,
        turns=[turn],
        sequences=list(sequences),
        truncated=truncated,
        rewards={"total": reward},
    )


SHORT, LONG = sequence([False, True], -1.0), sequence([False, True, False, True, True], -0.5)
EPISODES = [episode(1, SHORT, LONG), episode(0, SHORT), episode(1, LONG), episode(1, SHORT)]


def above_the_group(rewards: np.ndarray, groups: np.ndarray) -> list[float]:
    """A user's advantage: r - least reward of the group."""
    return [reward - rewards[groups == group].min() for reward, group in zip(rewards, groups)]


def test_groups_of_equal_rewards_are_dropped_only_where_attempts_are_compared() -> None:
    assert assign(LearnerConfig(advantage="dr_grpo"), EPISODES, GROUPS).keep.tolist() == [0, 1, 2]
    assert assign(LearnerConfig(advantage="dr_grpo", drop_no_signal=False), EPISODES, GROUPS).keep.tolist() == [
        *range(5)
    ]
    assert assign(LearnerConfig(advantage="reinforce_pp"), EPISODES, GROUPS).keep.tolist() == [*range(5)]
    mine = LearnerConfig(advantage="tests.training.test_credit:above_the_group")
    assert assign(mine, EPISODES, GROUPS).keep.tolist() == [0, 1, 2]


def test_reinforce_pp_baseline_is_white_over_all_tokens() -> None:
    credit = assign(LearnerConfig(advantage="reinforce_pp_baseline"), EPISODES, GROUPS)
    masks = [s.loss_mask for e in EPISODES for s in e.sequences]
    trained = np.concatenate([values[mask] for values, mask in zip(credit.advantages, masks)])
    # Four tokens of +1/2, one of -1/2, four of 0: those of the flat group count, though it is not learned from.
    raw = np.asarray([0.5] * 4 + [-0.5] + [0.0] * 4)
    np.testing.assert_allclose(trained, (raw - raw.mean()) / raw.std(), rtol=1e-5)
    assert credit.keep.tolist() == [0, 1, 2]


def test_episodes_that_are_left_out_count_in_their_group() -> None:
    episodes = [EPISODES[0], episode(0, SHORT, invalid=True), episode(0, LONG, truncated=True), EPISODES[3]]
    settings = LearnerConfig(advantage="dr_grpo", leave_out=("void_turns", "overlong"))
    credit = assign(settings, episodes, GROUPS)
    assert credit.keep.tolist() == [0, 1, 4]
    assert [values.max() for values in credit.advantages] == [0.5, 0.5, 0, 0, 0.5]
    assert credit.metrics["actor/left_out/void_turns"] == credit.metrics["actor/left_out/overlong"] == 0.25
    white = assign(dataclasses.replace(settings, advantage="reinforce_pp"), episodes, GROUPS)
    assert not white.advantages[2].any()  # neither in the mean nor in the result
    with pytest.raises(ValueError, match="unknown episode mask 'void'"):
        LearnerConfig(leave_out=("void",))


def test_divergence_of_tokens() -> None:
    """Against a reference that finds every token 0.5 less likely, a token pays for itself and what follows."""
    settings = LearnerConfig(advantage="dr_grpo", reward_kl_coef=0.1, reward_kl="token")
    reference = [s.logprobs - 0.5 for e in EPISODES for s in e.sequences]
    credit = assign(settings, EPISODES, GROUPS, reference)
    np.testing.assert_allclose(credit.advantages[1], [0, 0.5 - 0.15, 0, 0.5 - 0.1, 0.5 - 0.05], rtol=1e-5)
    np.testing.assert_allclose(credit.advantages[3], [0, -0.15, 0, -0.1, -0.05], rtol=1e-5)
    assert credit.keep.tolist() == [*range(5)]  # equal rewards, and yet something to learn
    assert credit.metrics["reward/kl"] == pytest.approx((4 + 1 + 3 + 1) * 0.5 / 4)
    whole = assign(dataclasses.replace(settings, reward_kl="episode"), EPISODES, GROUPS, reference)
    np.testing.assert_allclose(whole.advantages[1][1], 0.5 - 0.1 * (2.0 - 1.25), rtol=1e-5)


def test_the_learner_s_logprobs_replace_the_sampler_s_on_trained_tokens() -> None:
    (replaced,) = with_logprobs([LONG], [np.full(5, -2.0, np.float32)])
    assert replaced.logprobs.tolist() == [0, -2, 0, -2, -2]
    assert LONG.logprobs[1] == -0.5


def test_settings_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match=r"std_floor=0\.1: advantage='rloo' divides by no standard deviation"):
        LearnerConfig(advantage="rloo", std_floor=0.1)
    with pytest.raises(ValueError, match=r"importance_cap=-1\.0 must not be negative"):
        LearnerConfig(importance_cap=-1.0)
