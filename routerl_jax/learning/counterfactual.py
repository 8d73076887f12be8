"""Counterfactual advantages of a choice of which every alternative was tried.

At a decision the policy chooses among n alternatives with probabilities pi_r. Where each was taken once and came to V_r,

    b = sum over r of pi_r V_r        A_r = V_r - b

is the advantage of choosing r, without the noise of which one was drawn. The gradient of the expected value is the sum over r
of pi_r A_r grad log pi_r. The n tries count alike in a loss, so what a try's tokens get is n pi_r A_r (`policy`): its share
under the policy against its share among the tries. With weights `even` they get A_r itself, as if the policy chose each
alternative as often: one that the policy hardly ever takes is then learnt about as fast as any other.
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
    values: Float[np.ndarray, " n"],
    logprobs: Float[np.ndarray, " n"],
    baseline: Baseline = "policy",
    weights: Weights = "policy",
) -> Float[np.ndarray, " n"]:
    """What each alternative's tokens are reinforced by.

    Args:
      values: V_r, what came of each.
      logprobs: of each, under the policy.
      baseline: b as above, or the plain mean of the values (`mean`).
      weights: n pi_r or 1.
    """
    values = np.asarray(values, np.float64)
    share = probabilities(logprobs)
    differences = values - (share @ values if baseline == "policy" else values.mean())
    return differences * (len(values) * share if weights == "policy" else 1.0)
