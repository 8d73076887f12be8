"""Advantages from rewards: pure functions of (rewards, groups) of a whole step.

An advantage is one number per sequence at first. Values that differ between tokens (KL to go, importance) and operations over
all tokens of a step (whitening) come after that.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Hashable, Sequence
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float, Float32, Int

from routerl_jax.core.registry import Registry
from routerl_jax.core.types import Episode

Compare = Callable[[np.ndarray, np.ndarray], np.ndarray]  # (rewards [N], groups [N]) -> advantages [N]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Advantage:
    """A function (rewards, groups) -> advantages, and its properties.

    Attributes:
      grouped: it compares the attempts of a group. So a group needs several, and one whose advantages are all 0 may be left
        out.
      scaled: it divides by a standard deviation, and takes the smallest divisor as a keyword `std_floor`.
      whitened: its advantages are whitened over all tokens of a step.

    Raises:
      ValueError: the function is `scaled` but takes no `std_floor`.
    """

    function: Callable[..., np.ndarray]
    grouped: bool = True
    scaled: bool = False
    whitened: bool = False

    def __post_init__(self) -> None:
        if self.scaled and "std_floor" not in inspect.signature(self.function).parameters:
            name = getattr(self.function, "__name__", "it")
            raise ValueError(
                f"advantage {name} is scaled: give it a keyword std_floor, the least deviation to divide by"
            )

    def __call__(self, rewards: np.ndarray, groups: np.ndarray, **options: float) -> np.ndarray:
        return self.function(rewards, groups, **options)


def advantage(
    *, grouped: bool = True, scaled: bool = False, whitened: bool = False
) -> Callable[[Callable[..., np.ndarray]], Advantage]:
    """Decorator that sets the properties of an advantage (see `Advantage`). A plain function has the defaults."""
    return lambda function: Advantage(function=function, grouped=grouped, scaled=scaled, whitened=whitened)


ADVANTAGES: Registry[Advantage | Callable[..., np.ndarray]] = Registry("advantage")


def advantage_named(name: str) -> Advantage:
    """The advantage of this name. Raises ValueError for an unknown name."""
    function = ADVANTAGES.get(name)
    return function if isinstance(function, Advantage) else Advantage(function=function)


@dataclasses.dataclass(frozen=True)
class Estimator:
    """A configured advantage: (rewards, groups) -> one number per reward.

    Raises:
      ValueError: when called, if the function returns something else.
    """

    name: str
    std_floor: float = 0.0

    def __call__(self, rewards: Float[np.ndarray, " N"], groups: Int[np.ndarray, " N"]) -> Float[np.ndarray, " N"]:
        kind = advantage_named(self.name)
        values = kind(rewards, groups, **({"std_floor": self.std_floor} if kind.scaled else {}))
        advantages = np.asarray(values, np.float64)
        if advantages.shape != rewards.shape:
            raise ValueError(
                f"config.learner.advantage={self.name!r} gave an array of shape {advantages.shape} for {len(rewards)} rewards: "
                "it must give one number for each"
            )
        return advantages

    def scale(
        self, rewards: Float[np.ndarray, " N"], groups: Int[np.ndarray, " N"], over: Int[np.ndarray, " N"]
    ) -> Float[np.ndarray, " N"]:
        """The divisor for each reward's differences: the standard deviation, within questions, of the rewards with the same
        number in `over`. 1 if the advantage is not scaled."""
        if not advantage_named(self.name).scaled:
            return np.ones(len(rewards))
        variance = _group_mean(dr_grpo(rewards, groups) ** 2, over)[0]
        return np.maximum(np.sqrt(variance), self.std_floor) + _EPSILON


_EPSILON = 1e-6
_LEAST_VARIANCE = 1e-8


def _group_mean(values: np.ndarray, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean of each element's group, and the group's size."""
    _, inverse, counts = np.unique(groups, return_inverse=True, return_counts=True)
    sums = np.zeros(len(counts))
    np.add.at(sums, inverse, values)
    return (sums / counts)[inverse], counts[inverse]


@ADVANTAGES.register("grpo")
@advantage(scaled=True)
def grpo(
    rewards: Float[np.ndarray, " N"], groups: Int[np.ndarray, " N"], std_floor: float = 0.0
) -> Float[np.ndarray, " N"]:
    """GRPO (arXiv 2402.03300, 4.1.2): (r - group mean) / (group std + 1e-6), unbiased std; 0 for groups of one.

    Args:
      std_floor: smallest standard deviation to divide by. Without it, a group whose rewards differ only by noise (such as right
        answers that differ by milliseconds of retrieval) counts as much as a group of right and wrong answers.
    """
    rewards = np.asarray(rewards, np.float64)
    mean, count = _group_mean(rewards, groups)
    variance = _group_mean((rewards - mean) ** 2, groups)[0] * count / np.maximum(count - 1, 1)
    return (rewards - mean) / (np.maximum(np.sqrt(variance), std_floor) + _EPSILON)


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
@advantage(scaled=True)
def batch_std(
    rewards: Float[np.ndarray, " N"], groups: Int[np.ndarray, " N"], std_floor: float = 0.0
) -> Float[np.ndarray, " N"]:
    """r - group mean, divided by the standard deviation of that difference over the whole step.

    Easy groups are not inflated, and the result does not depend on the scale of the reward. This follows Lite-PPO (arXiv
    2508.08221), which divides by the standard deviation of the rewards over the batch. That of the differences, as in
    REINFORCE++-baseline, does not shrink the advantages if questions differ in difficulty.
    """
    centred = dr_grpo(rewards, groups)
    return centred / (max(centred.std(), std_floor) + _EPSILON)


@ADVANTAGES.register("reinforce_pp")
@advantage(grouped=False, whitened=True)
def reinforce_pp(rewards: Float[np.ndarray, " N"], groups: Int[np.ndarray, " N"]) -> Float[np.ndarray, " N"]:
    """REINFORCE++ (arXiv 2501.03262, eq. 4) before its whitening: the reward itself, no critic and no group."""
    return np.asarray(rewards, np.float64)


@ADVANTAGES.register("reinforce_pp_baseline")
@advantage(whitened=True)
def reinforce_pp_baseline(rewards: Float[np.ndarray, " N"], groups: Int[np.ndarray, " N"]) -> Float[np.ndarray, " N"]:
    """REINFORCE++-baseline before its whitening: r - group mean (R1-Searcher's `reinforce_baseline`)."""
    return dr_grpo(rewards, groups)


def per_token(
    advantages: Float[np.ndarray, " N"] | Sequence[Float[np.ndarray, " T"]],
    masks: Sequence[Bool[np.ndarray, " T"]],
    kl: Sequence[Float[np.ndarray, " T"]] | None = None,
    kl_coef: float = 0.0,
) -> list[Float32[np.ndarray, " T"]]:
    """An advantage for every trained token, 0 elsewhere.

    Args:
      advantages: one per sequence, or for each token of it.
      masks: per sequence, True on trained tokens.
      kl: per sequence, the k1 estimate at each token, log p - log reference. The penalty belongs to the reward of that token
        (InstructGPT, arXiv 2203.02155), without discount: from the advantage of token t, kl_coef times the sum of the
        estimates from t to the end of the sequence is subtracted.
    """
    result = []
    for i, mask in enumerate(masks):
        values = np.broadcast_to(np.asarray(advantages[i], np.float64), mask.shape).copy()
        if kl is not None:
            values -= kl_coef * np.cumsum(np.where(mask, kl[i], 0.0)[::-1])[::-1]
        result.append(np.where(mask, values, 0.0).astype(np.float32))
    return result


def whiten(
    advantages: Sequence[Float[np.ndarray, " T"]], masks: Sequence[Bool[np.ndarray, " T"]]
) -> list[Float32[np.ndarray, " T"]]:
    """(A - mean) / std over all trained tokens of a step, as in REINFORCE++ (arXiv 2501.03262, eq. 5); 0 elsewhere.

    The variance is at least 1e-8, as in OpenRLHF. Long sequences weigh more than short ones.
    """
    trained = np.concatenate([np.zeros(0), *(values[mask] for values, mask in zip(advantages, masks))])
    mean, scale = (trained.mean(), np.sqrt(max(trained.var(), _LEAST_VARIANCE))) if len(trained) else (0.0, 1.0)
    return [np.where(mask, (values - mean) / scale, 0.0).astype(np.float32) for values, mask in zip(advantages, masks)]


def groups_without_signal(rewards: Float[np.ndarray, " N"], groups: Int[np.ndarray, " N"]) -> Bool[np.ndarray, " G"]:
    """For each group, whether all its rewards are equal, so that it gives no signal."""
    ids = np.unique(groups)
    return np.asarray([np.ptp(rewards[groups == group]) < 1e-9 for group in ids])


# --- turns -------------------------------------------------------------------------------------------------------------
# Advantages of turns: each turn is credited with what follows from it, besides the outcome that all turns share.
#
# The equation, for turn k of attempt i at a question, with turn rewards r, outcome reward R, discount g and weight w:
#
#     G[i, k] = sum over judged l >= k of g^(l - k) r[i, l]
#     A[i, k] = N(R)[i] + w N(G)[i, k]    if turn k of attempt i is judged
#     A[i, k] = N(R)[i]                   if no reward judges it
#
# N is the configured advantage (`Advantage`): for R over the attempts at the question, for G over the judged
# turns that are compared. Rewards that judge different turns have an N(G) each, and these are added. MT-GRPO (arXiv
# 2505.11821) has two turns with g = 0; GiGPO (arXiv 2505.10978) compares turns at equal states.
#
# Which turns are compared must not depend on what they do, or the difference would not be due to them. Turns of one
# question at the same position (`position`) are in states that differ by what the attempts did before. With `rloo` and
# g = 1 the baseline does not depend on the turn itself, so the gradient is unbiased whichever attempts get that far.


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


# --- choices of which every alternative was tried ----------------------------------------------------------------------
# Counterfactual advantages of a choice, when every alternative was tried.
#
# At a decision the policy chooses among n alternatives with probabilities pi_r. If each was tried once and had the
# value V_r,
#
#     b = sum over r of pi_r V_r        A_r = V_r - b
#
# is the advantage of choosing r, without the noise of drawing one alternative. The gradient of the expected value is
#
#     sum over r of pi_r (A_r grad log pi_r + gradient of the text after r),
#
# plus the gradient of the text before the decision. So the tokens of try r have weight pi_r (`policy`). With weights
# `even` they have weight 1 / n, as if the policy chose all alternatives equally often. Then it learns about an
# alternative that it rarely takes as fast as about any other.
#
# With the least value as b and even weights, the step is that of reward-weighted regression (Peters and Schaal, ICML 2007):
# where one alternative alone is right, it is the gradient of its log-probability. It ends where that alternative is chosen
# for certain, and does not vanish where it is hardly ever chosen.

Baseline = Literal["policy", "mean", "worst"]
Weights = Literal["policy", "even"]


def probabilities(logprobs: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    """pi_r: the alternatives' probabilities, scaled to a sum of 1 (because the policy may also write something else)."""
    logprobs = np.asarray(logprobs, np.float64)
    odds = np.exp(logprobs - logprobs.max())
    return odds / odds.sum()


def choice_advantages(
    values: Float[np.ndarray, " n"], logprobs: Float[np.ndarray, " n"], baseline: Baseline = "policy"
) -> Float[np.ndarray, " n"]:
    """A_r of each alternative.

    Args:
      values: V_r, the value of each alternative.
      logprobs: log-probability of each alternative under the policy.
      baseline: b as above (`policy`), the plain mean of the values (`mean`), or the least of them (`worst`).
    """
    values = np.asarray(values, np.float64)
    if baseline == "policy":
        return values - probabilities(logprobs) @ values
    return values - (values.mean() if baseline == "mean" else values.min())


def try_weights(logprobs: Float[np.ndarray, " n"], weights: Weights = "policy") -> Float[np.ndarray, " n"]:
    """The weight of each try: pi_r (`policy`) or 1 / n (`even`)."""
    return probabilities(logprobs) if weights == "policy" else np.full(len(logprobs), 1 / len(logprobs))


# --- masks -------------------------------------------------------------------------------------------------------------
# Masks: named functions that say whether an episode is left out of the loss. It still counts in its group.

EPISODE_MASKS: Registry[Callable[[Episode], bool]] = Registry("episode mask")


@EPISODE_MASKS.register("void_turns")
def void_turns(episode: Episode) -> bool:
    """Some turn has neither a complete call nor an answer (SimpleTIR, arXiv 2509.02479).

    Text after such turns is often unlikely under the policy itself, and its gradients are large and useless.
    """
    return episode.invalid_actions > 0


@EPISODE_MASKS.register("overlong")
def overlong(episode: Episode) -> bool:
    """A token limit ended the episode, so its reward says little about it (DAPO, arXiv 2503.14476, section 3.4)."""
    return episode.truncated


@EPISODE_MASKS.register("unjudged")
def unjudged(episode: Episode) -> bool:
    """The judge gave no verdict that counts.

    Such episodes are always left out, whether or not this mask is configured: nothing is known about their answers, and their
    reward is a placeholder (rewards.terms.judge_reward).
    """
    return episode.verdict is not None and episode.verdict.counts is None


# --- importance ratios -------------------------------------------------------------------------------------------------
# How far sampled tokens are off the policy: importance ratios between the learner's weights and the sampler's, and
# limits.
#
# Everywhere, `learner` are log-probabilities under the weights before a step's updates, and `sampler` those with which
# the tokens were sampled. They differ by numerics and, if rollouts are generated ahead of the updates, by the weights.

_MAX_LOG_RATIO = 20.0


def truncated_importance(
    learner: Sequence[Float[np.ndarray, " T"]], sampler: Sequence[Float[np.ndarray, " T"]], cap: float
) -> list[Float32[np.ndarray, " T"]]:
    """min(p_learner / p_sampler, cap) per token, a factor for advantages: truncated importance sampling (F. Yao et al., 2025).

    It corrects differences in numerics and, of rollouts that were generated ahead, in weights.
    """
    return [
        np.minimum(np.exp(np.clip(ours - theirs, -_MAX_LOG_RATIO, _MAX_LOG_RATIO)), cap).astype(np.float32)
        for ours, theirs in zip(learner, sampler)
    ]


def log_ratio_sums(
    learner: Sequence[Float[np.ndarray, " T"]],
    sampler: Sequence[Float[np.ndarray, " T"]],
    masks: Sequence[Bool[np.ndarray, " T"]],
) -> Float[np.ndarray, " S"]:
    """Per sequence, log prod_t (p_learner / p_sampler) over its trained tokens, in nats; 0 without any."""
    return np.asarray(
        [float((ours.astype(np.float64) - theirs)[mask].sum()) for ours, theirs, mask in zip(learner, sampler, masks)],
        np.float64,
    )


def outside(log_ratios: Float[np.ndarray, " S"], bound: float) -> Bool[np.ndarray, " S"]:
    """Whether each ratio is outside [1 / bound, bound]; a ratio that is not finite is.

    Args:
      bound: above 1.
    """
    return ~(np.abs(log_ratios) <= np.log(bound))
