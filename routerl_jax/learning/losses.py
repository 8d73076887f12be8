"""Per-token losses and KL estimators, and how tokens are weighed. Aggregation is separate and global over a mini-batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from routerl_jax.core.registry import Registry

KLEstimate = Literal["k1", "k2", "k3"]  # from the sampled token
KLDirection = Literal[
    "forward", "reverse"
]  # summed over the vocabulary: KL(reference || policy), KL(policy || reference)
KLKind = KLEstimate | KLDirection
Aggregation = Literal["token", "sequence", "constant"]
Ratio = Literal["token", "sequence"]  # what a ratio of probabilities is of

# (log-prob, behaviour log-prob, advantage, clip_low, clip_high) -> (loss, clipped?), all per token
PolicyLoss = Callable[[Array, Array, Array, float, float], tuple[Array, Array]]
POLICY_LOSSES: Registry[PolicyLoss] = Registry("policy loss")

# Log-ratios are clamped before they are exponentiated: one token with a ratio of 1e4 otherwise owns the gradient.
_MAX_LOG_RATIO = 10.0
_MAX_K3 = 10.0


@POLICY_LOSSES.register("clip")
def clipped_policy_loss(
    logprobs: Float[Array, "*T"],
    old_logprobs: Float[Array, "*T"],
    advantages: Float[Array, "*T"],
    clip_low: float,
    clip_high: float,
) -> tuple[Float[Array, "*T"], Bool[Array, "*T"]]:
    """PPO's clipped surrogate per token: -min(r A, clip(r, 1 - low, 1 + high) A), r = exp(logprob - old logprob).

    `clip_high > clip_low` is DAPO's clip-higher (arXiv 2503.14476, eq. 10). The second result says where the clip took
    effect (zero gradient).
    """
    ratio = jnp.exp(jnp.clip(logprobs - old_logprobs, -_MAX_LOG_RATIO, _MAX_LOG_RATIO))
    free = -ratio * advantages
    clipped = -jnp.clip(ratio, 1 - clip_low, 1 + clip_high) * advantages
    return jnp.maximum(free, clipped), clipped > free


@POLICY_LOSSES.register("reinforce")
def reinforce_loss(
    logprobs: Float[Array, "*T"],
    old_logprobs: Float[Array, "*T"],
    advantages: Float[Array, "*T"],
    clip_low: float,
    clip_high: float,
) -> tuple[Float[Array, "*T"], Bool[Array, "*T"]]:
    """-A log p per token, without importance ratio or clip: for one update per rollout."""
    return -advantages * logprobs, jnp.zeros(logprobs.shape, bool)


def sequence_sums(values: Float[Array, "B T"], segment_ids: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """At every token the sum over its segment, a stretch of equal ids in a row."""

    def totals(reverse: bool) -> Float[Array, "B T"]:
        """At every token the sum of its segment up to it, or from it on."""
        edge = jnp.ones_like(segment_ids[:, :1], bool)
        differs = segment_ids[:, 1:] != segment_ids[:, :-1]
        begins = jnp.concatenate([differs, edge] if reverse else [edge, differs], axis=1)
        return jax.lax.associative_scan(_join, (values, begins), reverse=reverse, axis=1)[0]

    return totals(False) + totals(True) - values


def _join(before: tuple[Array, Array], after: tuple[Array, Array]) -> tuple[Array, Array]:
    """Two stretches as one: the sum since the last beginning of a segment, and whether there is one."""
    return jnp.where(after[1], after[0], before[0] + after[0]), before[1] | after[1]


def kl_estimate(logprobs: Float[Array, "*T"], reference: Float[Array, "*T"], kind: KLEstimate) -> Float[Array, "*T"]:
    """Per-token estimates of KL(policy || reference) from samples of the policy (J. Schulman, 2020).

    k1 = log p - log q (unbiased, may be negative; as a loss its gradient has mean zero, so it belongs in the reward),
    k2 = k1^2 / 2, k3 = q/p - 1 - log(q/p), clamped at 10.
    """
    difference = logprobs - reference
    if kind == "k1":
        return difference
    if kind == "k2":
        return 0.5 * difference**2
    if kind == "k3":
        log_ratio = jnp.clip(-difference, -_MAX_LOG_RATIO, _MAX_LOG_RATIO)
        return jnp.minimum(jnp.exp(log_ratio) - 1 - log_ratio, _MAX_K3)
    raise ValueError(f"unknown KL estimator {kind!r}; known: k1, k2, k3")


def token_weights(masks: list[np.ndarray], kind: Aggregation, constant: float) -> list[np.ndarray]:
    """What each token counts in the loss of a mini-batch; the loss is sum(weight * token loss), however it is sharded.

    Args:
      masks: per sequence, True on trained tokens.
      kind: "token", every trained token of the mini-batch counts the same (DAPO); "sequence", every sequence does, its
        tokens sharing (GRPO's 1/|o|); "constant", tokens count 1 / (constant * number of sequences) (Dr. GRPO).
      constant: tokens per sequence assumed by "constant".
    """
    total = sum(int(mask.sum()) for mask in masks)
    trained = sum(bool(mask.any()) for mask in masks)
    weights = []
    for mask in masks:
        if kind == "token":
            scale = 1.0 / max(total, 1)
        elif kind == "sequence":
            scale = 1.0 / (max(trained, 1) * max(int(mask.sum()), 1))
        elif kind == "constant":
            scale = 1.0 / (constant * max(trained, 1))
        else:
            raise ValueError(f"unknown aggregation {kind!r}; known: token, sequence, constant")
        weights.append(mask.astype(np.float32) * np.float32(scale))
    return weights
