"""Advantages of turns: each turn is credited with what follows from it, besides the outcome that all turns share.

The equation, for turn k of attempt i at a question, with turn rewards r, outcome reward R, discount g and weight w:

    G[i, k] = sum over judged l >= k of g^(l - k) r[i, l]
    A[i, k] = N(R)[i] + w N(G)[i, k]    if turn k of attempt i is judged
    A[i, k] = N(R)[i]                   if no reward judges it

N is the configured advantage (learning/advantages.py): for R over the attempts at the question, for G over the judged turns
that are compared. Rewards that judge different turns have an N(G) each, and these are added. MT-GRPO (arXiv 2505.11821) has two
turns with g = 0; GiGPO (arXiv 2505.10978) compares turns at equal states.

Which turns are compared must not depend on what they do, or the difference would not be due to them. Turns of one question at
the same position (`position`) are in states that differ by what the attempts did before. With `rloo` and g = 1 the baseline
does not depend on the turn itself, so the gradient is unbiased whichever attempts get that far.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from jaxtyping import Float, Int

from routerl_jax.learning.advantages import Compare


def rewards_to_go(rewards: Sequence[Float[np.ndarray, " K"]], discount: float = 1.0) -> list[Float[np.ndarray, " K"]]:
    """G of every turn of every attempt, with the turn's own reward as the first term.

    Args:
      rewards: per attempt, the rewards of its turns in order; NaN for turns that are not judged, which add nothing.
      discount: g, in [0, 1].
    """
    result = []
    for of_turns in rewards:
        to_go = np.zeros(len(of_turns))
        following = 0.0
        for k in range(len(of_turns) - 1, -1, -1):
            own = 0.0 if np.isnan(of_turns[k]) else float(of_turns[k])
            following = own + discount * following
            to_go[k] = following
        result.append(to_go)
    return result


def turn_advantages(
    outcomes: Float[np.ndarray, " N"],
    rewards: Sequence[Float[np.ndarray, " K"]],
    groups: Int[np.ndarray, " N"],
    compared: Sequence[Sequence[Hashable]],
    advantage: Compare,
    *,
    discount: float = 1.0,
    weight: float = 1.0,
) -> list[Float[np.ndarray, " K"]]:
    """A of every turn of every attempt (the equation above).

    Args:
      outcomes: per attempt, the outcome reward, without the rewards of turns.
      rewards: per attempt, the rewards of its turns in order; NaN for turns that are not judged.
      groups: per attempt, the index of its question.
      compared: per attempt and turn, a key; turns of the same question and key are compared.
      advantage: N, (values, groups) -> advantages.
    """
    shared = np.asarray(advantage(np.asarray(outcomes, np.float64), groups), np.float64)
    own = judged_advantages(rewards, groups, compared, advantage, discount=discount)
    return [total + weight * part for total, part in zip(shared, own)]


def judged_advantages(
    rewards: Sequence[Float[np.ndarray, " K"]],
    groups: Int[np.ndarray, " N"],
    compared: Sequence[Sequence[Hashable]],
    advantage: Compare,
    *,
    discount: float = 1.0,
) -> list[Float[np.ndarray, " K"]]:
    """N(G) of every turn of every attempt, 0 of those that are not judged. Args: see `turn_advantages`."""
    names: dict[Hashable, int] = {}
    turn_groups = [
        names.setdefault((int(group), name), len(names)) for group, turns in zip(groups, compared) for name in turns
    ]
    flat = np.concatenate([np.zeros(0), *rewards_to_go(rewards, discount)])
    judged = ~np.isnan(np.concatenate([np.zeros(0), *rewards]))
    own = np.zeros(len(flat))
    if judged.any():
        own[judged] = advantage(flat[judged], np.asarray(turn_groups, int)[judged])
    return np.split(own, np.cumsum([len(of_turns) for of_turns in rewards])[:-1])
