"""From rewards to advantages: pure functions of (rewards, groups), whole mini-batch in, whole mini-batch out."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jaxtyping import Bool, Float, Int

from routerl_jax.core.registry import Registry

Advantage = Callable[[np.ndarray, np.ndarray], np.ndarray]
ADVANTAGES: Registry[Advantage] = Registry("advantage")

_EPSILON = 1e-6


def _group_mean(values: np.ndarray, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean of each element's group, and the group's size."""
    _, inverse, counts = np.unique(groups, return_inverse=True, return_counts=True)
    sums = np.zeros(len(counts))
    np.add.at(sums, inverse, values)
    return (sums / counts)[inverse], counts[inverse]


@ADVANTAGES.register("grpo")
def grpo(rewards: Float[np.ndarray, " N"], groups: Int[np.ndarray, " N"]) -> Float[np.ndarray, " N"]:
    """GRPO (arXiv 2402.03300, 4.1.2): (r - group mean) / (group std + 1e-6), unbiased std; 0 for groups of one."""
    rewards = np.asarray(rewards, np.float64)
    mean, count = _group_mean(rewards, groups)
    variance = _group_mean((rewards - mean) ** 2, groups)[0] * count / np.maximum(count - 1, 1)
    return (rewards - mean) / (np.sqrt(variance) + _EPSILON)


@ADVANTAGES.register("dr_grpo")
def dr_grpo(rewards: Float[np.ndarray, " N"], groups: Int[np.ndarray, " N"]) -> Float[np.ndarray, " N"]:
    """Dr. GRPO (arXiv 2503.20783): r - group mean, without the division that inflates easy and hard groups."""
    rewards = np.asarray(rewards, np.float64)
    return rewards - _group_mean(rewards, groups)[0]


@ADVANTAGES.register("rloo")
def rloo(rewards: Float[np.ndarray, " N"], groups: Int[np.ndarray, " N"]) -> Float[np.ndarray, " N"]:
    """Leave-one-out baseline (arXiv 2402.14740): r - mean of the others in the group; 0 for groups of one."""
    rewards = np.asarray(rewards, np.float64)
    mean, count = _group_mean(rewards, groups)
    return (rewards - mean) * count / np.maximum(count - 1, 1)


@ADVANTAGES.register("batch_std")
def batch_std(rewards: Float[np.ndarray, " N"], groups: Int[np.ndarray, " N"]) -> Float[np.ndarray, " N"]:
    """r - group mean, divided by the standard deviation of that difference over the whole batch (Lite-PPO,
    arXiv 2508.08221): easy groups are not blown up, and the scale does not depend on the reward's."""
    centred = dr_grpo(rewards, groups)
    return centred / (centred.std() + _EPSILON)


def groups_without_signal(rewards: Float[np.ndarray, " N"], groups: Int[np.ndarray, " N"]) -> Bool[np.ndarray, " G"]:
    """For each group, whether all its rewards are equal, so that it teaches nothing."""
    ids = np.unique(groups)
    return np.asarray([np.ptp(rewards[groups == group]) < 1e-9 for group in ids])
