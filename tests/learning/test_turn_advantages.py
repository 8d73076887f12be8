"""Advantages of turns against numbers by hand, and the property that makes the leave-one-out form unbiased."""

import numpy as np
import pytest

from routerl_jax.learning.advantages import ADVANTAGES, dr_grpo, rewards_to_go, rloo, turn_advantages

GROUPS = np.asarray([7, 7, 3, 3])
OUTCOMES = np.asarray([1.0, 0.0, 1.0, 1.0])
REWARDS = [np.asarray(r) for r in ([0.5, 1.0], [0.25], [0.0, 0.5, 1.0], [1.0, 0.5])]
POSITIONS = [["r0", "a0"], ["r0"], ["r0", "a0", "r1"], ["r0", "a0"]]


def test_rewards_to_go() -> None:
    assert [g.tolist() for g in rewards_to_go(REWARDS, 1.0)] == [[1.5, 1.0], [0.25], [1.5, 1.5, 1.0], [1.5, 0.5]]
    assert [g.tolist() for g in rewards_to_go(REWARDS, 0.5)] == [[1.0, 1.0], [0.25], [0.5, 1.0, 1.0], [1.25, 0.5]]
    assert [g.tolist() for g in rewards_to_go(REWARDS, 0.0)] == [r.tolist() for r in REWARDS]
    assert rewards_to_go([np.zeros(0)], 0.5)[0].tolist() == []


def test_turns_are_compared_with_those_at_their_place() -> None:
    """g = 1/2, w = 2, r - mean. Question 7, r0: 1 and 0.25, a0: one turn alone. Question 3, r0: 0.5 and 1.25, a0: 1 and 0.5."""
    found = turn_advantages(OUTCOMES, REWARDS, GROUPS, POSITIONS, dr_grpo, discount=0.5, weight=2.0)
    assert [a.tolist() for a in found] == [
        [0.5 + 2 * 0.375, 0.5 + 0],
        [-0.5 - 2 * 0.375],
        [2 * -0.375, 2 * 0.25, 0],
        [2 * 0.375, 2 * -0.25],
    ]


def test_questions_are_never_mixed_and_names_may_be_coarser() -> None:
    one = [["x"] * len(r) for r in REWARDS]
    found = turn_advantages(np.zeros(4), REWARDS, GROUPS, one, dr_grpo, discount=0.0)
    assert found[0] == pytest.approx(np.asarray([0.5, 1.0]) - 1.75 / 3)
    assert found[1] == pytest.approx([0.25 - 1.75 / 3])
    assert found[2] == pytest.approx(np.asarray([0.0, 0.5, 1.0]) - 0.6)


def test_without_turn_rewards_it_is_the_episode_s_advantage() -> None:
    silent = [np.zeros(len(r)) for r in REWARDS]
    for name in ADVANTAGES:
        expected = ADVANTAGES.get(name)(OUTCOMES, GROUPS)
        found = turn_advantages(OUTCOMES, silent, GROUPS, POSITIONS, ADVANTAGES.get(name))
        for advantages, value in zip(found, expected):
            assert advantages == pytest.approx(np.full(len(advantages), value))


def test_leave_one_out_baseline_does_not_depend_on_the_turn_itself() -> None:
    """A[i, k] = G[i, k] - b with a b that changing attempt i leaves as it is, though attempts end at different turns."""
    base = turn_advantages(OUTCOMES * 0, REWARDS, GROUPS, POSITIONS, rloo)
    changed = [r.copy() for r in REWARDS]
    changed[2][2] += 5.0
    moved = turn_advantages(OUTCOMES * 0, changed, GROUPS, POSITIONS, rloo)
    assert (moved[2] - base[2])[:2] == pytest.approx([5.0, 5.0])
    assert base[0][1] == 0.0  # alone at its place: nothing to compare with


def test_no_attempts() -> None:
    assert turn_advantages(np.zeros(1), [np.zeros(0)], np.zeros(1, int), [[]], dr_grpo)[0].shape == (0,)
