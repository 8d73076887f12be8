"""Advantages against hand-computed numbers and their defining properties (beside the equations: test_equations.py)."""

import numpy as np
import pytest

from routerl_jax.learning.advantages import (
    ADVANTAGES,
    advantage,
    advantage_named,
    groups_without_signal,
    per_token,
    whiten,
)

REWARDS = np.asarray([1.0, 0.0, 0.0, 1.0, 2.0, 2.0, 2.0, 5.0])
GROUPS = np.asarray([0, 0, 0, 0, 7, 7, 7, 9])


def test_grpo_by_hand():
    # Group 0: mean 1/2, unbiased std sqrt(1/3). Group 7 has no spread. Group 9 has one member.
    expected = np.asarray([0.5, -0.5, -0.5, 0.5]) / (np.sqrt(1 / 3) + 1e-6)
    np.testing.assert_allclose(ADVANTAGES.get("grpo")(REWARDS, GROUPS), [*expected, 0, 0, 0, 0], atol=1e-9)


def test_dr_grpo_and_rloo_by_hand():
    np.testing.assert_allclose(ADVANTAGES.get("dr_grpo")(REWARDS, GROUPS), [0.5, -0.5, -0.5, 0.5, 0, 0, 0, 0])
    # Leave one out: the others of group 0 average 1/3 for a winner and 2/3 for a loser.
    np.testing.assert_allclose(ADVANTAGES.get("rloo")(REWARDS, GROUPS), [2 / 3, -2 / 3, -2 / 3, 2 / 3, 0, 0, 0, 0])


@pytest.mark.parametrize("name", [name for name in ADVANTAGES if advantage_named(name).grouped])
def test_properties_of_baselines(name):
    advantage = ADVANTAGES.get(name)
    rng = np.random.default_rng(0)
    rewards, groups = rng.normal(size=60), rng.integers(0, 9, 60)
    values = advantage(rewards, groups)
    for group in np.unique(groups):
        assert abs(values[groups == group].sum()) < 1e-9  # a baseline moves credit within a group only
    order = rng.permutation(60)
    np.testing.assert_allclose(advantage(rewards[order], groups[order]), values[order])
    np.testing.assert_allclose(advantage(rewards + 3, groups), values, atol=1e-9)


def test_groups_without_signal():
    assert groups_without_signal(REWARDS, GROUPS).tolist() == [False, True, True]


@pytest.mark.parametrize("name", [name for name in ADVANTAGES if advantage_named(name).scaled])
def test_a_floor_keeps_noise_small(name):
    """Rewards that differ by a thousandth stay a thousandth of the floor; those of a real spread are what they were."""
    advantage = ADVANTAGES.get(name)
    noise = np.asarray([1.001, 1.0, 1.0, 1.001])
    groups = np.zeros(4, int)
    assert np.abs(advantage(noise, groups)).max() > 0.8
    np.testing.assert_allclose(advantage(noise, groups, std_floor=0.1), [0.005, -0.005, -0.005, 0.005], rtol=1e-4)
    spread = np.asarray([1.0, 0.0, 0.0, 1.0])
    np.testing.assert_array_equal(advantage(spread, groups, std_floor=0.1), advantage(spread, groups))


MASKS = [np.asarray([False, True, True, False, True]), np.asarray([False, True]), np.asarray([False, False])]


def test_tokens_pay_for_the_divergence_from_them_on():
    kl = [np.asarray([9.0, 1.0, -2.0, 9.0, 4.0]), np.asarray([9.0, 0.5]), np.asarray([9.0, 9.0])]
    found = per_token(np.asarray([1.0, -1.0, 5.0]), MASKS, kl, 0.1)
    expected = [[0, 1 - 0.1 * 3, 1 - 0.1 * 2, 0, 1 - 0.1 * 4], [0, -1 - 0.05], [0, 0]]
    for values, wanted in zip(found, expected):
        np.testing.assert_allclose(values, wanted, rtol=1e-6)
    plain = per_token(np.asarray([1.0, -1.0, 5.0]), MASKS)
    assert [values.tolist() for values in plain] == [[0, 1, 1, 0, 1], [0, -1], [0, 0]]


def test_whitening_by_hand():
    """Over the tokens that are trained: 1, 1, 1 and -3 have mean 0 and variance 3; what is fed stays 0."""
    found = whiten([np.asarray([7.0, 1, 1, 7, 1]), np.asarray([7.0, -3]), np.asarray([7.0, 7])], MASKS)
    for values, wanted in zip(found, [[0, 1, 1, 0, 1], [0, -3], [0, 0]]):
        np.testing.assert_allclose(values, np.asarray(wanted) / np.sqrt(3), rtol=1e-6)


def test_what_an_advantage_says_of_itself():
    assert [name for name in ADVANTAGES if advantage_named(name).whitened] == ["reinforce_pp", "reinforce_pp_baseline"]
    assert [name for name in ADVANTAGES if not advantage_named(name).grouped] == ["reinforce_pp"]
    assert [name for name in ADVANTAGES if advantage_named(name).scaled] == ["batch_std", "grpo"]
    with pytest.raises(ValueError, match="advantage mine is scaled: give it a keyword std_floor"):

        @advantage(scaled=True)
        def mine(rewards, groups):
            return rewards
