"""How far sampled tokens are off the policy: importance ratios between the learner's weights and the sampler's, and limits.

Everywhere, `learner` are log-probabilities under the weights before a step's updates, and `sampler` those with which the tokens
were sampled. They differ by numerics and, if rollouts are generated ahead of the updates, by the weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float, Float32

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
