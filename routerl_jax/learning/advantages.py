"""Advantages from rewards: pure functions of (rewards, groups) of a whole step.

An advantage is one number per sequence at first. Values that differ between tokens (KL to go, importance) and operations over
all tokens of a step (whitening) come after that.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Bool, Float, Float32, Int

from routerl_jax.core.registry import Registry

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
