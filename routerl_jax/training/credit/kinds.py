"""Kinds of credit (`config.learner.credit`): what of an episode's reward each of its tokens answers for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from jaxtyping import Float

from routerl_jax.core.registry import Registry
from routerl_jax.core.types import Episode
from routerl_jax.learning.advantages import Estimator
from routerl_jax.training.credit.forks import ForkCreditConfig, by_forks, fork_metrics
from routerl_jax.training.credit.turns import TurnCreditConfig, by_turns


class Settings(Protocol):
    """What kinds of credit read of `config.learner` (training.learner_config)."""

    @property
    def credit(self) -> str: ...
    @property
    def turn(self) -> TurnCreditConfig: ...
    @property
    def forks(self) -> ForkCreditConfig: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shares:
    """What a kind of credit gives.

    Attributes:
      of_tokens: for each sequence of the episodes, in order, the advantage of each token, [T]; of fed ones it is not read.
      reach: per sequence, how likely the policy gets to each token, which its terms of the loss are weighted by; None: it was
        sampled, and counts once.
      metrics: what the step's metrics show of it.
    """

    of_tokens: Sequence[Float[np.ndarray, " T"]]
    reach: Sequence[Float[np.ndarray, " T"]] | None = None
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)


# (episodes, rewards [N], groups [N], advantage, settings) -> Shares, or their `of_tokens` alone
Credits = Callable[[Sequence[Episode], np.ndarray, np.ndarray, Estimator, Settings], Shares | Sequence[np.ndarray]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CreditKind:
    """A kind of credit and what goes with it.

    Attributes:
      function: as `Credits`; `rewards` are those of the episodes, `groups` say which question each is of.
      forked: it is of attempts that go every way at a decision (config.rollout.forks), and compares the rewards of the ways: no
        advantage that is whitened, no KL in the reward, no episode left out.
      whole: all tokens of an attempt answer for its whole reward, so that a group teaches nothing where rewards are equal; else
        where no token has an advantage.
    """

    function: Credits
    forked: bool = False
    whole: bool = False


CREDITS: Registry[CreditKind | Credits] = Registry("kind of credit")


def credit_named(name: str) -> CreditKind:
    """The kind of that name; a plain function is one that is not forked. Raises ValueError for an unknown name."""
    found = CREDITS.get(name)
    return found if isinstance(found, CreditKind) else CreditKind(function=found)


def _episode(
    episodes: Sequence[Episode], rewards: np.ndarray, groups: np.ndarray, advantage: Estimator, settings: Settings
) -> Shares:
    """Every token of an attempt has its attempt's advantage."""
    return Shares(
        of_tokens=[
            np.full(len(sequence), value)
            for episode, value in zip(episodes, advantage(rewards, groups))
            for sequence in episode.sequences
        ]
    )


def _turn(
    episodes: Sequence[Episode], rewards: np.ndarray, groups: np.ndarray, advantage: Estimator, settings: Settings
) -> Shares:
    """The outcome, and the rewards of the token's turn and of later ones (learning.turn_advantages)."""
    return Shares(of_tokens=by_turns(settings.turn, episodes, rewards, groups, advantage))


def _counterfactual(
    episodes: Sequence[Episode], rewards: np.ndarray, groups: np.ndarray, advantage: Estimator, settings: Settings
) -> Shares:
    """For the choice of a knowledge base what the others would have led to (learning.counterfactual)."""
    apart = groups if settings.forks.scale == "question" else np.zeros_like(groups)
    scale = advantage.scale(rewards, groups, apart)
    of_tokens, reach = by_forks(settings.forks, episodes, rewards, groups, advantage, scale)
    return Shares(of_tokens=of_tokens, reach=reach, metrics=fork_metrics(episodes, rewards))


CREDITS.register("episode")(CreditKind(function=_episode, whole=True))
CREDITS.register("turn")(CreditKind(function=_turn))
CREDITS.register("counterfactual")(CreditKind(function=_counterfactual, forked=True))
