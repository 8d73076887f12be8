"""The loss of a token: policy losses, estimates of the KL, and the objective that adds them up; and the weights of tokens.

The weights aggregate over a whole mini-batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from routerl_jax.core.config import NonNegative, checked
from routerl_jax.core.registry import Registry
from routerl_jax.learning.logprobs import KLDirection, Scores
from routerl_jax.models.experts import Routing, balance_loss

KLEstimate = Literal["k1", "k2", "k3"]  # from the sampled token
KLKind = KLEstimate | KLDirection
Aggregation = Literal["token", "sequence", "constant"]

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

    def join(before: tuple[Array, Array], after: tuple[Array, Array]) -> tuple[Array, Array]:
        """Two neighbouring runs of tokens: the sum since the last start of a segment, and whether a segment starts there."""
        return jnp.where(after[1], after[0], before[0] + after[0]), before[1] | after[1]

    def totals(reverse: bool) -> Float[Array, "B T"]:
        """For every token, the sum over its segment up to it or, with `reverse`, from it on."""
        edge = jnp.ones_like(segment_ids[:, :1], bool)
        differs = segment_ids[:, 1:] != segment_ids[:, :-1]
        begins = jnp.concatenate([differs, edge] if reverse else [edge, differs], axis=1)
        return jax.lax.associative_scan(join, (values, begins), reverse=reverse, axis=1)[0]

    return totals(False) + totals(True) - values


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


# --- the objective ---

ROUTING_METRICS = ("router_entropy", "expert_load", "experts_idle")  # of models with experts; see `_routing_terms`


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class LossConfig:
    """Settings of the per-token objective."""

    kind: str = "clip"  # of learning.losses.POLICY_LOSSES
    # ratio of each token's probability; of the sequence's: the product over its tokens (RouteRAG, arXiv 2512.09487, eq. 5);
    # geometric: the geometric mean over the sequence's tokens (GSPO, arXiv 2507.18071)
    ratio: Literal["token", "sequence", "geometric"] = "token"
    clip_low: NonNegative = 0.2  # the ratio counts down to 1 - this
    clip_high: NonNegative = 0.2  # above clip_low: DAPO's clip-higher
    # of kind clip: largest ratio that counts where the advantage is negative, e.g. 3; 0: any
    dual_clip: NonNegative = 0.0
    kl: KLKind = "k3"  # an estimate from the sampled tokens, or the sum over the vocabulary (forward, reverse)
    kl_coef: NonNegative = 0.0  # KL to the reference, added to the loss
    entropy_coef: float = 0.0  # entropy bonus
    # log the exact entropy (actor/entropy), from the update's own logits, without a bonus
    measure_entropy: bool = False
    # weight of the experts' load-balancing loss (models.experts.balance_loss), for models with experts
    balance_coef: NonNegative = 0.0
    # nats; tokens below this entropy only take part in the KL, not in the policy gradient (train on decisions only)
    min_entropy: NonNegative = 0.0

    def __post_init__(self) -> None:
        POLICY_LOSSES.get(self.kind)  # raises ValueError for an unknown one
        if self.ratio != "token" and self.kind == "reinforce":
            raise ValueError(
                f"loss.ratio={self.ratio!r} with loss.kind='reinforce', which has no ratio: take loss.kind='clip'"
            )
        if self.ratio == "sequence" and self.kind == "cispo":
            raise ValueError(
                "loss.ratio='sequence' with loss.kind='cispo', whose gradient is that of single tokens: take "
                "loss.ratio='geometric', or loss.kind='clip'"
            )
        if self.dual_clip and self.kind != "clip":
            raise ValueError(
                f"loss.dual_clip={self.dual_clip} bounds the loss of kind='clip', not of {self.kind!r}: set it to 0"
            )
        if self.dual_clip and self.dual_clip <= 1 + self.clip_high:
            raise ValueError(
                f"loss.dual_clip={self.dual_clip} is a ratio above 1 + loss.clip_high={1 + self.clip_high:g}, such as 3; 0: off"
            )
        if self.ratio == "sequence" and self.min_entropy:
            raise ValueError(
                f"loss.min_entropy={self.min_entropy} leaves tokens out, and loss.ratio='sequence' is one term of a whole "
                "sequence: set one of them back (min_entropy=0, or ratio='token')"
            )

    @property
    def entropies(self) -> bool:
        """Whether the entropy of every target is computed."""
        return bool(self.entropy_coef or self.min_entropy or self.measure_entropy)

    @property
    def merges(self) -> bool:
        """Whether a token's loss is a multiple of its advantage, on each side of 0. Sequences can then share trained tokens."""
        return self.ratio == "token" and self.kind in ("clip", "cispo", "reinforce")

    @property
    def exact_kl(self) -> bool:
        """Whether the KL is summed over the vocabulary; the update then needs the reference's weights."""
        return bool(self.kl_coef) and self.kl in ("forward", "reverse")


def objective(loss: LossConfig, scores: Scores, fields: dict[str, Any]) -> tuple[Array, dict[str, Array]]:
    """The weighted loss of a micro-batch and its terms.

    With `ratio="sequence"`, every token of a sequence has the sequence's ratio r. If the weights sum to 1 / N in each of N
    sequences, this gives the mean over sequences of min(r A, clip(r) A).

    With `ratio="geometric"`, the ratio of token t of sequence i is s_it = sg(s_i) p_it / sg(p_it), sg: without gradient, with
    s_i = exp(mean over i's trained tokens of log p - log p_old) (GSPO-token, arXiv 2507.18071, section 4.3). Its value is s_i,
    and its gradient that of the token. If a sequence has one advantage and equal weights, this is the gradient of GSPO itself
    (section 4.1).

    Targets of weight 0 (tokens that the policy did not sample) contribute exactly zero to value and gradient, because they are
    masked before any operation that could overflow. With `min_entropy`, only tokens at which the policy is undecided get the
    policy gradient (after arXiv 2506.01939, which takes the fifth with the highest entropy). At other tokens, sampling noise
    would move the policy without teaching it anything.

    Args:
      scores: scores of the targets, [rows, time]; with divergences if the KL is exact.
      fields: `weights`, `advantages`, `old_logprobs`, `ref_logprobs`, [rows, time] each; also `segment_ids` for ratios of
        sequences, `negative_advantages` (`Batch`) if the batch has them, and `share` (one over the number of micro-batches) for
        models with experts.

    Returns:
      The loss, and sums over tokens by name (`weight` is the sum of the weights).

    Raises:
      ValueError: the function that `kind` names does not return what a PolicyLoss must.
    """
    weights = fields["weights"]
    trained = weights > 0
    logprobs = jnp.where(trained, scores.logprobs, 0.0)
    old = jnp.where(trained, fields["old_logprobs"], 0.0)
    now, then, advantages = logprobs, old, fields["advantages"]
    if loss.ratio == "sequence":
        now, then = sequence_sums(logprobs - old, fields["segment_ids"]), jnp.zeros_like(old)
        advantages = jnp.where(trained, advantages, 0.0)  # the gradients of all tokens pass through one ratio
    if loss.ratio == "geometric":
        then = jax.lax.stop_gradient(logprobs - sequence_means(logprobs - old, trained, fields["segment_ids"]))
    per_token, clipped = _policy_loss(loss, now, then, advantages)
    if "negative_advantages" in fields:
        against, clipped_against = _policy_loss(loss, now, then, fields["negative_advantages"])
        per_token, clipped = per_token + against, clipped | clipped_against
    decided = trained & (jax.lax.stop_gradient(scores.entropies) >= loss.min_entropy) if loss.min_entropy else trained
    policy = (weights * jnp.where(decided, per_token, 0.0)).sum()
    total = policy
    metrics = {"pg_loss": policy, "clip_fraction": (weights * (clipped & decided)).sum(), "weight": weights.sum()}
    if loss.min_entropy:
        metrics["decision_share"] = (weights * decided).sum()
    if loss.kl_coef:
        if loss.kl in ("forward", "reverse"):
            divergences = scores.divergences
        else:
            divergences = kl_estimate(logprobs, jnp.where(trained, fields["ref_logprobs"], 0.0), loss.kl)
        divergence = (weights * jnp.where(trained, divergences, 0.0)).sum()
        total = total + loss.kl_coef * divergence
        metrics["kl"] = divergence
    if loss.entropies:
        entropy = (weights * jnp.where(trained, scores.entropies, 0.0)).sum()
        if loss.entropy_coef:
            total = total - loss.entropy_coef * entropy
        metrics["entropy"] = jax.lax.stop_gradient(entropy)
    if scores.routing is not None:
        total = total + _routing_terms(loss, scores.routing, fields.get("share", 1.0), metrics)
    metrics["loss"] = total
    return total, metrics


def _policy_loss(loss: LossConfig, now: Array, then: Array, advantages: Array) -> tuple[Array, Array]:
    """The loss of each token and whether it is clipped: the function that config.learner.loss.kind names, and the dual clip."""
    result = POLICY_LOSSES.get(loss.kind)(now, then, advantages, loss.clip_low, loss.clip_high)
    shapes = [jnp.shape(part) for part in result] if isinstance(result, tuple) else []
    if shapes != [now.shape] * 2 or not jnp.issubdtype(jnp.result_type(result[1]), jnp.bool_):
        raise ValueError(
            f"config.learner.loss.kind={loss.kind!r} must return two arrays of the shape of the log-probabilities: the loss of "
            "each token (a float), and whether the token is clipped (a bool)"
        )
    return dual_clip(*result, advantages, loss.dual_clip) if loss.dual_clip else result


def _routing_terms(loss: LossConfig, routing: Routing, share: Array | float, metrics: dict[str, Array]) -> Array:
    """Writes the metrics of routing, and gives the balance loss with its weight: each a mean over micro-batches.

    `router_entropy` is the mean over tokens and layers, in nats. `expert_load` is the load of a layer's busiest expert, mean
    over layers: 1 if all have equal loads, E / C if all tokens take the same C of E experts. `experts_idle` is the share of
    experts without a token.
    """
    balance = share * balance_loss(routing)
    loads = routing.load / jnp.maximum(routing.load.mean(-1, keepdims=True), 1e-9)
    metrics["balance_loss"] = balance
    metrics["router_entropy"] = share * routing.entropy.sum() / jnp.maximum(routing.tokens.sum(), 1.0)
    metrics["expert_load"] = share * loads.max(-1).mean()
    metrics["experts_idle"] = share * (routing.load == 0).mean()
    return loss.balance_coef * balance
