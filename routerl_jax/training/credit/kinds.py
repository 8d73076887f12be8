"""Kinds of credit (`config.learner.credit`): how an episode's reward is shared among its tokens."""

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
    """The part of `config.learner` that kinds of credit read (training.learner_config)."""

    @property
    def credit(self) -> str: ...
    @property
    def turn(self) -> TurnCreditConfig: ...
    @property
    def forks(self) -> ForkCreditConfig: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenCredit:
    """The result of a kind of credit.

    Attributes:
      of_tokens: for each sequence of the episodes, in order, the advantage of each token, [T]. Those of fed tokens are ignored.
      reach: per sequence, the policy's probability of reaching each token, [T], which weights the token in the loss; None: the
        tokens were sampled, and each counts once.
      metrics: entries for the step's metrics.
    """

    of_tokens: Sequence[Float[np.ndarray, " T"]]
    reach: Sequence[Float[np.ndarray, " T"]] | None = None
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)


# (episodes, rewards [N], groups [N], advantage, settings) -> Shares, or their `of_tokens` alone
Credits = Callable[[Sequence[Episode], np.ndarray, np.ndarray, Estimator, Settings], TokenCredit | Sequence[np.ndarray]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CreditKind:
    """A kind of credit and its properties.

    Attributes:
      function: see `Credits`. `rewards` are those of the episodes, `groups` the index of each one's question.
      forked: it needs forked attempts (config.rollout.forks), whose branches' rewards it compares. It excludes whitened
        advantages, KL in the reward, and leaving out episodes.
      whole: every token of an attempt gets its whole reward, so a group has no signal if its rewards are equal. Otherwise a
        group has no signal if all its advantages are 0.
    """

    function: Credits
    forked: bool = False
    whole: bool = False


CREDITS: Registry[CreditKind | Credits] = Registry("kind of credit")


def credit_named(name: str) -> CreditKind:
    """The kind of this name. A plain function counts as a kind without forks. Raises ValueError for an unknown name."""
    kind = CREDITS.get(name)
    return kind if isinstance(kind, CreditKind) else CreditKind(function=kind)


def _episode(
    episodes: Sequence[Episode], rewards: np.ndarray, groups: np.ndarray, advantage: Estimator, settings: Settings
) -> TokenCredit:
    """Every token gets the advantage of its attempt."""
    return TokenCredit(
        of_tokens=[
            np.full(len(sequence), value)
            for episode, value in zip(episodes, advantage(rewards, groups))
            for sequence in episode.sequences
        ]
    )


def _turn(
    episodes: Sequence[Episode], rewards: np.ndarray, groups: np.ndarray, advantage: Estimator, settings: Settings
) -> TokenCredit:
    """A token gets the advantages of the outcome and of the rewards of its own and later turns (learning.advantages)."""
    return TokenCredit(of_tokens=by_turns(settings.turn, episodes, rewards, groups, advantage))


def _counterfactual(
    episodes: Sequence[Episode], rewards: np.ndarray, groups: np.ndarray, advantage: Estimator, settings: Settings
) -> TokenCredit:
    """The choice of a knowledge base is compared with what the other choices led to (learning.advantages)."""
    apart = groups if settings.forks.scale == "question" else np.zeros_like(groups)
    scale = advantage.scale(rewards, groups, apart)
    of_tokens, reach = by_forks(settings.forks, episodes, rewards, groups, advantage, scale)
    return TokenCredit(of_tokens=of_tokens, reach=reach, metrics=fork_metrics(episodes, rewards))


CREDITS.register("episode")(CreditKind(function=_episode, whole=True))
CREDITS.register("turn")(CreditKind(function=_turn))
CREDITS.register("counterfactual")(CreditKind(function=_counterfactual, forked=True))
