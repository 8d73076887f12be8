"""Per-token losses, KL estimators and token weights. The weights aggregate over a whole mini-batch."""

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
# probability ratio of each token, of the whole sequence (the product), or the geometric mean over the sequence's tokens
Ratio = Literal["token", "sequence", "geometric"]

# (log-prob, behaviour log-prob, advantage, clip_low, clip_high) -> (loss, clipped?), all per token
PolicyLoss = Callable[[Array, Array, Array, float, float], tuple[Array, Array]]
POLICY_LOSSES: Registry[PolicyLoss] = Registry("policy loss")

# Log-ratios are clamped before exp: a single token with a ratio of 1e4 would dominate the gradient.
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

    `clip_high > clip_low` is DAPO's clip-higher (arXiv 2503.14476, eq. 10). The second result is True where the clip takes
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


@POLICY_LOSSES.register("cispo")
def cispo_loss(
    logprobs: Float[Array, "*T"],
    old_logprobs: Float[Array, "*T"],
    advantages: Float[Array, "*T"],
    clip_low: float,
    clip_high: float,
) -> tuple[Float[Array, "*T"], Bool[Array, "*T"]]:
    """CISPO (MiniMax-M1, arXiv 2506.13585, eqs. 4 and 5): -sg(clip(r, 1 - low, 1 + high)) A log p, sg: without gradient.

    A clipped token keeps a gradient, of a bounded size. With `clip_low >= 1` only the upper bound is left, as in the paper. The
    second result is True where the ratio is out of its range.
    """
    ratio = jnp.exp(jnp.clip(logprobs - old_logprobs, -_MAX_LOG_RATIO, _MAX_LOG_RATIO))
    bounded = jax.lax.stop_gradient(jnp.clip(ratio, 1 - clip_low, 1 + clip_high))
    return -bounded * advantages * logprobs, (ratio < 1 - clip_low) | (ratio > 1 + clip_high)


def dual_clip(
    losses: Float[Array, "*T"], clipped: Bool[Array, "*T"], advantages: Float[Array, "*T"], bound: float
) -> tuple[Float[Array, "*T"], Bool[Array, "*T"]]:
    """Dual-clip PPO (arXiv 1912.09729): -max(min(r A, clip(r) A), bound A) where A < 0, so at most -bound A; else unchanged.

    Without it, an unlikely token that has become likely (r >> 1) has a gradient of any size if its advantage is negative.

    Args:
      losses, clipped: of `clipped_policy_loss`.
      bound: the largest ratio that counts, above 1 + clip_high.
    """
    over = (advantages < 0) & (losses > -bound * advantages)
    return jnp.where(over, -bound * advantages, losses), clipped | over


def sequence_means(
    values: Float[Array, "B T"], trained: Bool[Array, "B T"], segment_ids: Int[Array, "B T"]
) -> Float[Array, "B T"]:
    """For every token, the mean over the trained tokens of its segment; 0 if there are none."""
    count = sequence_sums(trained.astype(values.dtype), segment_ids)
    return sequence_sums(jnp.where(trained, values, 0.0), segment_ids) / jnp.maximum(count, 1.0)


def sequence_sums(values: Float[Array, "B T"], segment_ids: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """For every token, the sum over its segment, which is a run of equal ids in a row."""

    def totals(reverse: bool) -> Float[Array, "B T"]:
        """For every token, the sum over its segment up to it or, with `reverse`, from it on."""
        edge = jnp.ones_like(segment_ids[:, :1], bool)
        differs = segment_ids[:, 1:] != segment_ids[:, :-1]
        begins = jnp.concatenate([differs, edge] if reverse else [edge, differs], axis=1)
        return jax.lax.associative_scan(_join, (values, begins), reverse=reverse, axis=1)[0]

    return totals(False) + totals(True) - values


def _join(before: tuple[Array, Array], after: tuple[Array, Array]) -> tuple[Array, Array]:
    """Joins two neighbouring runs of tokens: the sum since the last start of a segment, and whether a segment starts there."""
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
    """The weight of each token in the loss of a mini-batch. The loss is sum(weight * token loss), however it is sharded.

    Args:
      masks: per sequence [T], True on trained tokens.
      kind: with N sequences that have trained tokens: "token": all trained tokens of the mini-batch have the same weight
        (DAPO). "sequence": each of the N has the weight 1 / N, shared equally by its trained tokens (GRPO's 1/|o|).
        "constant": every trained token has 1 / (constant * N), so a longer sequence weighs more (Dr. GRPO).
      constant: tokens per sequence that "constant" assumes; the other kinds ignore it.

    Returns:
      Per sequence [T], 0 on tokens that are not trained.

    Raises:
      ValueError: an unknown kind.
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
