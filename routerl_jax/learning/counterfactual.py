"""Counterfactual advantages of a choice of which every alternative was tried.

At a decision the policy chooses among n alternatives with probabilities pi_r. Where each was taken once and came to V_r,

    b = sum over r of pi_r V_r        A_r = V_r - b

is the advantage of choosing r, without the noise of which one was drawn. The gradient of the expected value is the sum over r
of pi_r A_r grad log pi_r and pi_r times the gradient of what was written after r, beside that of what was written before. So
what belongs to a try weighs pi_r (`policy`). With weights `even` it weighs 1 / n, as if the policy chose each alternative as
often: one that the policy hardly ever takes is then learnt about as fast as any other.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from jaxtyping import Float

Baseline = Literal["policy", "mean"]
Weights = Literal["policy", "even"]


def probabilities(logprobs: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    """pi_r: the alternatives' own probabilities, scaled to a sum of 1 (the policy may write something else, too)."""
    logprobs = np.asarray(logprobs, np.float64)
    odds = np.exp(logprobs - logprobs.max())
    return odds / odds.sum()


def choice_advantages(
    values: Float[np.ndarray, " n"], logprobs: Float[np.ndarray, " n"], baseline: Baseline = "policy"
) -> Float[np.ndarray, " n"]:
    """A_r of each alternative.

    Args:
      values: V_r, what came of each.
      logprobs: of each, under the policy.
      baseline: b as above, or the plain mean of the values (`mean`).
    """
    values = np.asarray(values, np.float64)
    return values - (probabilities(logprobs) @ values if baseline == "policy" else values.mean())


def try_weights(logprobs: Float[np.ndarray, " n"], weights: Weights = "policy") -> Float[np.ndarray, " n"]:
    """What each try counts: pi_r, or 1 / n (`even`)."""
    return probabilities(logprobs) if weights == "policy" else np.full(len(logprobs), 1 / len(logprobs))
