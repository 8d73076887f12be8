"""Advantages against hand-computed numbers and their defining properties."""

import numpy as np
import pytest

from routerl_jax.learning.advantages import ADVANTAGES, groups_without_signal

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


def test_batch_std_divides_by_one_number_for_all():
    centred = ADVANTAGES.get("dr_grpo")(REWARDS, GROUPS)
    np.testing.assert_allclose(ADVANTAGES.get("batch_std")(REWARDS, GROUPS), centred / centred.std(), rtol=1e-5)


@pytest.mark.parametrize("name", list(ADVANTAGES))
def test_properties_of_all(name):
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
