"""Credit assignment: from the episodes of a step to an advantage for each of their tokens.

`assign` does it, with a kind of credit (`config.learner.credit`, `CREDITS`): how an episode's reward is shared among its
tokens. Here every token gets the whole reward; finer_credit.py has credit by turns and that of forked attempts. `correct` then
corrects for tokens that are off the policy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from jaxtyping import Float, Int

from routerl_jax.core.registry import Registry
from routerl_jax.core.types import Episode
from routerl_jax.core.types import Sequence as TokenSequence
from routerl_jax.learning.advantages import (
    EPISODE_MASKS,
    Estimator,
    advantage_named,
    groups_without_signal,
    log_ratio_sums,
    outside,
    per_token,
    truncated_importance,
    unjudged,
    whiten,
)
from routerl_jax.learning.losses import Aggregation, token_weights


class CreditSettings(Protocol):
    """The part of `config.learner` that credit reads (sections.LearnerConfig says what each setting means)."""

    @property
    def credit(self) -> str: ...
    @property
    def advantage(self) -> str: ...
    @property
    def std_floor(self) -> float: ...
    @property
    def drop_no_signal(self) -> bool: ...
    @property
    def leave_out(self) -> tuple[str, ...]: ...
    @property
    def reward_kl_coef(self) -> float: ...
    @property
    def reward_kl(self) -> str: ...
    @property
    def importance_cap(self) -> float: ...
    @property
    def mask_sequence_ratio(self) -> float: ...
    @property
    def mask_mean_ratio(self) -> float: ...


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


# (episodes, rewards [N], groups [N], advantage, config.learner) -> TokenCredit, or its `of_tokens` alone
Credits = Callable[[Sequence[Episode], np.ndarray, np.ndarray, Estimator, Any], TokenCredit | Sequence[np.ndarray]]


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


# by name, or by "package.module:function"
CREDITS: Registry[CreditKind | Credits] = Registry(
    "kind of credit",
    {
        "turn": "routerl_jax.training.finer_credit:TURN",
        "counterfactual": "routerl_jax.training.finer_credit:COUNTERFACTUAL",
    },
)


def credit_named(name: str) -> CreditKind:
    """The kind of this name. A plain function counts as a kind without forks. Raises ValueError for an unknown name."""
    kind = CREDITS.get(name)
    return kind if isinstance(kind, CreditKind) else CreditKind(function=kind)


def of_episodes(
    episodes: Sequence[Episode], rewards: np.ndarray, groups: np.ndarray, advantage: Estimator, settings: CreditSettings
) -> TokenCredit:
    """Every token gets the advantage of its attempt."""
    return TokenCredit(
        of_tokens=[
            np.full(len(sequence), value)
            for episode, value in zip(episodes, advantage(rewards, groups))
            for sequence in episode.sequences
        ]
    )


CREDITS.register("episode")(CreditKind(function=of_episodes, whole=True))
NO_ADVANTAGE = 1e-9  # what is less, in absolute value, counts as none


class NotFinite(ValueError):
    """A reward, an advantage or a weight is NaN or infinite.

    Attributes:
      metric: the name of the value: "reward/total", "advantage" or "actor/weights".
    """

    def __init__(self, metric: str, message: str) -> None:
        super().__init__(message)
        self.metric = metric


@dataclasses.dataclass(frozen=True)
class Credit:
    """The result of `assign`.

    Attributes:
      advantages: per sequence, one number per token ([T], 0 on fed tokens).
      keep: indices of the sequences that are trained on.
      metrics: metrics of subtractions from rewards, of sequences left out, and of capped ratios.
      reach: per sequence, the policy's probability of reaching each token, [T], which weights the token in the loss; none:
        the tokens were sampled, and each counts once.
    """

    advantages: list[np.ndarray]
    keep: np.ndarray
    metrics: dict[str, float]
    reach: Sequence[np.ndarray] | None = None

    def token_weights(
        self, sequences: Sequence[TokenSequence], minibatch: np.ndarray, aggregation: Aggregation, constant: float
    ) -> list[np.ndarray]:
        """The weight of each token of a mini-batch in its loss: `losses.token_weights` times the token's `reach`.

        Args:
          sequences: all sequences of the step.
          minibatch: indices of the sequences in the mini-batch.
        """
        weights = token_weights([sequences[i].loss_mask for i in minibatch], aggregation, constant)
        if self.reach is None:
            return weights
        return [weight * self.reach[i].astype(weight.dtype) for weight, i in zip(weights, minibatch)]


def sequences_of(episodes: Sequence[Episode]) -> tuple[list[TokenSequence], Int[np.ndarray, " S"]]:
    """The token sequences of a step, and the index of each one's episode. All values per sequence have this order.

    Raises:
      ValueError: the policy of an episode was a chat model behind an endpoint.
    """
    if written := next((episode for episode in episodes if episode.usage is not None), None):
        raise ValueError(
            f"the episode of example {written.example.id!r} was written by a chat model behind an endpoint, whose token ids "
            "and log-probabilities nobody knows: nothing can be learnt from it by reinforcement; take an Engine as the policy"
        )
    sequences = [sequence for episode in episodes for sequence in episode.sequences]
    owner = np.asarray([i for i, episode in enumerate(episodes) for _ in episode.sequences], int)
    return sequences, owner


def _shares(
    settings: CreditSettings, episodes: Sequence[Episode], rewards: np.ndarray, groups: np.ndarray, advantage: Estimator
) -> TokenCredit:
    """The result of the configured kind of credit.

    Raises:
      ValueError: the result is not one number per token of every sequence.
    """
    shares = credit_named(settings.credit).function(episodes, rewards, groups, advantage, settings)
    shares = shares if isinstance(shares, TokenCredit) else TokenCredit(of_tokens=shares)
    lengths = [(len(sequence),) for episode in episodes for sequence in episode.sequences]
    for numbers in (shares.of_tokens, shares.reach):
        if numbers is not None and [np.shape(values) for values in numbers] != lengths:
            raise ValueError(
                f"config.learner.credit={settings.credit!r} gave arrays of shapes {[np.shape(v) for v in numbers][:8]} for "
                f"sequences of lengths {[n for (n,) in lengths][:8]}: it must give one number per token of every sequence"
            )
    return shares


def assign(
    settings: CreditSettings,
    episodes: Sequence[Episode],
    groups: np.ndarray,
    reference: Sequence[np.ndarray] | None = None,
) -> Credit:
    """Advantages of all trained tokens of a step; corrections of tokens off the policy come after it
    (`credit.off_policy`).

    Args:
      settings: config.learner: the advantage, the KL in the reward, masks.
      episodes: the episodes, with `rewards["total"]`.
      groups: index of each episode's question, [N].
      reference: log-probabilities under the reference, for each of `sequences_of(episodes)`; used for `reward_kl_coef`.

    Raises:
      NotFinite: a reward or an advantage is not finite (names the episode).
      ValueError: an advantage is not one number per episode, or the reference's log-probabilities are missing.
    """
    sequences, owner = sequences_of(episodes)
    masks = [sequence.loss_mask for sequence in sequences]
    rewards = np.asarray([episode.rewards["total"] for episode in episodes], np.float64)
    _check_finite(rewards, episodes, "reward/total", "reward")
    metrics: dict[str, float] = {}

    token_kl, in_tokens = None, settings.reward_kl == "token"
    if settings.reward_kl_coef:
        if reference is None:
            raise ValueError(
                "config.learner.reward_kl_coef is set, which takes the reference's log-probabilities of every sequence"
            )
        token_kl = [np.where(s.loss_mask, s.logprobs - r, 0.0) for s, r in zip(sequences, reference)]
        divergence = np.bincount(owner, [kl.sum() for kl in token_kl], len(episodes))
        metrics["reward/kl"] = float(divergence.mean())
        if not in_tokens:
            rewards, token_kl = rewards - settings.reward_kl_coef * divergence, None
    advantage = advantage_named(settings.advantage)
    credit = _shares(settings, episodes, rewards, groups, Estimator(settings.advantage, settings.std_floor))
    sums = np.zeros(len(episodes))
    np.add.at(sums, owner, [float(np.sum(np.where(m, row, 0.0))) for row, m in zip(credit.of_tokens, masks)])
    _check_finite(sums, episodes, "advantage", f"advantage ({settings.advantage})")
    metrics |= credit.metrics
    advantages = per_token(credit.of_tokens, masks, token_kl, settings.reward_kl_coef)

    left_out = np.zeros(len(episodes), bool)
    # an episode with a verdict that does not count is left out, whatever is configured
    always = ("unjudged",) if any(map(unjudged, episodes)) else ()
    for name in dict.fromkeys((*settings.leave_out, *always)):
        chosen = np.asarray([EPISODE_MASKS.get(name)(episode) for episode in episodes], bool)
        metrics[f"actor/left_out/{name}"] = float(chosen.mean())
        left_out |= chosen
    if settings.drop_no_signal and advantage.grouped and token_kl is None:
        left_out |= _without_signal(settings, rewards, groups, advantages, owner)
    if advantage.whitened:  # over the trained tokens alone, so that these have mean 0
        advantages = whiten(advantages, [mask & ~left_out[i] for mask, i in zip(masks, owner)])
    # A conversation without a token of the policy teaches nothing: one in which texts were only scored, or, in a forked
    # attempt, one whose tokens are trained on in another of its episodes.
    written = np.asarray([mask.any() for mask in masks], bool)
    return Credit(advantages, np.flatnonzero(~left_out[owner] & written), metrics, credit.reach)


def _without_signal(
    settings: CreditSettings,
    rewards: np.ndarray,
    groups: np.ndarray,
    advantages: Sequence[np.ndarray],
    owner: np.ndarray,
) -> np.ndarray:
    """Which episodes belong to a group without signal: all rewards are equal or, with finer credit, all advantages are 0.

    Args:
      advantages: per sequence and token, before whitening, because that moves zeros.
    """
    _, inverse = np.unique(groups, return_inverse=True)
    if credit_named(settings.credit).whole:
        return groups_without_signal(rewards, groups)[inverse]
    largest = np.zeros(inverse.max(initial=-1) + 1)
    np.maximum.at(largest, inverse[owner], [np.abs(values).max(initial=0.0) for values in advantages])
    return (largest < NO_ADVANTAGE)[inverse]


def _check_finite(values: np.ndarray, episodes: Sequence[Episode], metric: str, quantity: str) -> None:
    """Raises NotFinite if a value is not finite. A single NaN would reach every weight, through means and the gradient."""
    for index in np.flatnonzero(~np.isfinite(values))[:1]:
        episode = episodes[index]
        raise NotFinite(
            metric,
            f"the {quantity} of attempt {episode.sample} at question {episode.example.id!r} is {values[index]}, where its "
            f"rewards are {episode.rewards}: give a finite number, or an error that says why there is none",
        )


def attempts_of(episodes: Sequence[Episode]) -> Int[np.ndarray, " S"]:
    """For each of `sequences_of(episodes)`, the index of its attempt. All branches of a forked attempt have the same one."""
    numbers: dict[tuple[str, int], int] = {}
    return np.asarray(
        [numbers.setdefault((e.example.id, e.sample), len(numbers)) for e in episodes for _ in e.sequences], int
    )


def portions(
    keep: np.ndarray, count: int, order: np.random.Generator, together: np.ndarray | None = None
) -> list[np.ndarray]:
    """Splits sequences into mini-batches at random, in about equal numbers.

    Args:
      keep: indices of sequences.
      together: for every sequence, the index of what stays together, such as its group.
    """
    if together is None:
        return np.array_split(order.permutation(keep), count)
    of_kept = together[keep]
    members = [keep[of_kept == unit] for unit in order.permutation(np.unique(of_kept))]
    before = np.cumsum([0, *map(len, members)])[:-1]
    target = before * count // max(len(keep), 1)
    return [np.concatenate([np.zeros(0, int), *(m for m, t in zip(members, target) if t == i)]) for i in range(count)]


def corrects(limits: CreditSettings) -> bool:
    """Whether the learner's own log-probabilities are needed before the updates."""
    return bool(limits.importance_cap or limits.mask_sequence_ratio or limits.mask_mean_ratio)


def correct(
    limits: CreditSettings, credit: Credit, sequences: Sequence[TokenSequence], current: Sequence[np.ndarray]
) -> Credit:
    """Leaves out sequences that are too far off the policy, and multiplies advantages by the truncated importance of tokens.

    With r_t = p_learner / p_sampler at the |o| trained tokens of a sequence and C a bound, these are left out (as by
    `leave_out`, so they do not count in means either):
      mask_sequence_ratio: prod_t r_t outside [1 / C, C] (Liu, Li et al., When Speed Kills Stability, 2025);
      mask_mean_ratio: (prod_t r_t)^(1 / |o|) outside [1 / C, C], which does not depend on the length.
    Whitened advantages were whitened with the sequences that are left out here.

    Args:
      current: for each of `credit.keep`, the learner's log-probabilities before the step's updates, [T].

    Returns:
      The credit with metrics: `importance/mean`, `/capped_share`, of the tokens that remain; `importance/masked/sequence`,
      `/masked/mean`, shares of the sequences; `importance/masked_tokens`, the share of trained tokens that either leaves out;
      `importance/kl`, the mean over all tokens of log p_sampler - log p_learner, which estimates KL(sampler || learner).
    """
    trained = [sequences[i] for i in credit.keep]
    masks = [s.loss_mask for s in trained]
    tokens = np.asarray([mask.sum() for mask in masks], int)
    sums = log_ratio_sums(current, [s.logprobs for s in trained], masks)
    metrics = dict(credit.metrics)
    if tokens.sum():
        metrics["importance/kl"] = float(-sums.sum() / tokens.sum())
    excluded = np.zeros(len(trained), bool)
    for name, bound, log_ratios in (
        ("sequence", limits.mask_sequence_ratio, sums),
        ("mean", limits.mask_mean_ratio, sums / np.maximum(tokens, 1)),
    ):
        if bound and len(trained):
            far = outside(log_ratios, bound)
            metrics[f"importance/masked/{name}"] = float(far.mean())
            excluded |= far
    if (limits.mask_sequence_ratio or limits.mask_mean_ratio) and tokens.sum():
        metrics["importance/masked_tokens"] = float(tokens[excluded].sum() / tokens.sum())
    advantages = list(credit.advantages)
    if limits.importance_cap:
        factors = truncated_importance(current, [s.logprobs for s in trained], limits.importance_cap)
        for i, factor in zip(credit.keep, factors):
            advantages[i] = advantages[i] * factor
        kept = [factor[mask] for factor, mask, skip in zip(factors, masks, excluded) if not skip]
        if len(remaining := np.concatenate([np.zeros(0, np.float32), *kept])):
            metrics["importance/mean"] = float(remaining.mean())
            metrics["importance/capped_share"] = float((remaining >= limits.importance_cap).mean())
    return dataclasses.replace(credit, advantages=advantages, keep=credit.keep[~excluded], metrics=metrics)


def with_logprobs(
    sequences: Sequence[TokenSequence], keep: np.ndarray, logprobs: Sequence[np.ndarray]
) -> list[TokenSequence]:
    """The sequences, with the learner's log-probabilities in those of `keep`, so that ratios start at 1."""
    result = list(sequences)
    for i, values in zip(keep, logprobs):
        filled = np.where(sequences[i].loss_mask, values, 0.0).astype(np.float32)
        result[i] = dataclasses.replace(sequences[i], logprobs=filled)
    return result
