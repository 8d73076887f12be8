"""Credit by turns: the tokens of each turn, the turns that it is compared with, and the resulting advantages."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import Float

from routerl_jax.core.config import Fraction, NonNegative, checked
from routerl_jax.core.types import Episode, Turn
from routerl_jax.learning.advantages import Compare, judged_advantages, turn_advantages


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class TurnCreditConfig:
    """Settings of credit="turn" (learning.advantages)."""

    weight: NonNegative = 1.0  # weight of the turns' advantages; the outcome's has weight 1
    discount: Fraction = 1.0  # discount of the rewards of later turns; 0: a turn gets its own rewards alone
    # compare turns of a question at the same position, or asked the same
    compare: Literal["position", "asked"] = "position"


def by_turns(
    settings: TurnCreditConfig,
    episodes: Sequence[Episode],
    rewards: Float[np.ndarray, " N"],
    groups: np.ndarray,
    advantage: Compare,
) -> list[Float[np.ndarray, " T"]]:
    """For each sequence of the episodes, in order, the advantage of each token, which is that of its turn.

    Reward terms that judge the same turns are added, and their sums compared among these turns.

    Args:
      rewards: each episode's whole reward, [N]. The outcome is this less the rewards of its turns (`Turn.rewards`).
      advantage: (values, groups) -> advantages.

    Raises:
      ValueError: an episode's turns don't say where all of its sampled tokens are.
    """
    turns = [turn for episode in episodes for turn in episode.turns]
    of_turns = [np.sum([sum(turn.rewards.values()) for turn in episode.turns]) for episode in episodes]
    alike: dict[tuple[bool, ...], list[str]] = {}  # the terms by the turns that they judge
    for name in dict.fromkeys(name for turn in turns for name in turn.rewards):
        alike.setdefault(tuple(name in turn.rewards for turn in turns), []).append(name)
    first, *others = [
        [np.asarray([_sum_of(turn, names) for turn in episode.turns], np.float64) for episode in episodes]
        for names in alike.values() or [[]]
    ]
    compared = [_compared(episode, settings.compare) for episode in episodes]
    turn_values = turn_advantages(
        rewards - np.asarray(of_turns),
        first,
        groups,
        compared,
        advantage,
        discount=settings.discount,
        weight=settings.weight,
    )
    for part in others:
        own = judged_advantages(part, groups, compared, advantage, discount=settings.discount)
        turn_values = [value + settings.weight * of_part for value, of_part in zip(turn_values, own)]
    return [values for episode, advantages in zip(episodes, turn_values) for values in spread(episode, advantages)]


def _sum_of(turn: Turn, names: Sequence[str]) -> float:
    """The sum of these terms, which judge the same turns; NaN if they don't judge this one."""
    return sum(turn.rewards[name] for name in names) if turn.rewards.keys() & names else np.nan


def spread(episode: Episode, advantages: Sequence[float] | np.ndarray) -> list[Float[np.ndarray, " T"]]:
    """Spreads one number per turn over the tokens of every sequence of the episode; 0 outside of turns.

    Raises:
      ValueError: the turns don't say where all sampled tokens are.
    """
    result = [np.zeros(len(sequence)) for sequence in episode.sequences]
    covered = [np.zeros(len(sequence), bool) for sequence in episode.sequences]
    for turn, advantage in zip(episode.turns, advantages):
        if turn.tokens:
            at = slice(turn.start, turn.start + turn.tokens)
            result[turn.sequence][at] = advantage
            covered[turn.sequence][at] = True
    if any((sequence.loss_mask & ~is_covered).any() for sequence, is_covered in zip(episode.sequences, covered)):
        raise ValueError(
            f"attempt {episode.sample} at question {episode.example.id!r} sampled tokens that belong to no turn; let the agent "
            "write through Conversation.generate alone, which books where a turn's tokens are"
        )
    return result


def _compared(episode: Episode, compare: str) -> list[tuple[str, int]]:
    """The key by which each turn is compared: the agent's request, and the number of equal requests before it."""
    if compare == "asked":
        return [(turn.asked, 0) for turn in episode.turns]
    before: collections.Counter[str] = collections.Counter()
    names = []
    for turn in episode.turns:
        names.append((turn.asked, before[turn.asked]))
        before[turn.asked] += 1
    return names
