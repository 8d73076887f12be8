"""Counterfactual advantages of a choice, when every alternative was tried.

At a decision the policy chooses among n alternatives with probabilities pi_r. If each was tried once and had the value V_r,

    b = sum over r of pi_r V_r        A_r = V_r - b

is the advantage of choosing r, without the noise of drawing one alternative. The gradient of the expected value is

    sum over r of pi_r (A_r grad log pi_r + gradient of the text after r),

plus the gradient of the text before the decision. So the tokens of try r have weight pi_r (`policy`). With weights `even` they
have weight 1 / n, as if the policy chose all alternatives equally often. Then it learns about an alternative that it rarely
takes as fast as about any other.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from jaxtyping import Float

Baseline = Literal["policy", "mean"]
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
      baseline: b as above (`policy`), or the plain mean of the values (`mean`).
    """
    values = np.asarray(values, np.float64)
    return values - (probabilities(logprobs) @ values if baseline == "policy" else values.mean())


def try_weights(logprobs: Float[np.ndarray, " n"], weights: Weights = "policy") -> Float[np.ndarray, " n"]:
    """The weight of each try: pi_r (`policy`) or 1 / n (`even`)."""
    return probabilities(logprobs) if weights == "policy" else np.full(len(logprobs), 1 / len(logprobs))
