"""The per-token objective: the weighted sum of policy loss, KL and entropy."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from routerl_jax.core.checked import NonNegative, checked
from routerl_jax.learning.logprobs import Scores
from routerl_jax.learning.losses import POLICY_LOSSES, KLKind, Ratio, kl_estimate, sequence_sums
from routerl_jax.models.experts import Routing, balance_loss

ROUTING_METRICS = ("router_entropy", "expert_load", "experts_idle")  # of models with experts; see `_routing_terms`


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class LossConfig:
    """Settings of the per-token objective."""

    kind: str = "clip"  # of learning.losses.POLICY_LOSSES
    # ratio of each token's probability, or of the sequence's: the product over its tokens (RouteRAG, arXiv 2512.09487, eq. 5)
    ratio: Ratio = "token"
    clip_low: NonNegative = 0.2  # the ratio counts down to 1 - this
    clip_high: NonNegative = 0.2  # above clip_low: DAPO's clip-higher
    kl: KLKind = "k3"  # an estimate from the sampled tokens, or the sum over the vocabulary (forward, reverse)
    kl_coef: NonNegative = 0.0  # KL to the reference, added to the loss
    entropy_coef: float = 0.0  # entropy bonus
    # weight of the experts' load-balancing loss (models.experts.balance_loss), for models with experts
    balance_coef: NonNegative = 0.0
    # nats; tokens below this entropy only take part in the KL, not in the policy gradient (train on decisions only)
    min_entropy: NonNegative = 0.0

    def __post_init__(self) -> None:
        POLICY_LOSSES.get(self.kind)  # raises ValueError for an unknown one
        if self.ratio not in typing.get_args(Ratio):
            raise ValueError(f"loss.ratio={self.ratio!r} is neither 'token' nor 'sequence'")
        if self.ratio == "sequence" and self.kind == "reinforce":
            raise ValueError(
                "loss.ratio='sequence' with loss.kind='reinforce', which has no ratio: take loss.kind='clip'"
            )
        if self.ratio == "sequence" and self.min_entropy:
            raise ValueError(
                f"loss.min_entropy={self.min_entropy} leaves tokens out, and loss.ratio='sequence' is one term of a whole "
                "sequence: set one of them back (min_entropy=0, or ratio='token')"
            )

    @property
    def exact_kl(self) -> bool:
        """Whether the KL is summed over the vocabulary; the update then needs the reference's weights."""
        return bool(self.kl_coef) and self.kl in ("forward", "reverse")


def objective(loss: LossConfig, scores: Scores, fields: dict[str, Any]) -> tuple[Array, dict[str, Array]]:
    """The weighted loss of a micro-batch and its terms.

    With `ratio="sequence"`, every token of a sequence has the sequence's ratio r. If the weights sum to 1 / N in each of N
    sequences, this gives the mean over sequences of min(r A, clip(r) A).

    Targets of weight 0 (tokens that the policy did not sample) contribute exactly zero to value and gradient, because they are
    masked before any operation that could overflow. With `min_entropy`, only tokens at which the policy is undecided get the
    policy gradient (after arXiv 2506.01939, which takes the fifth with the highest entropy). At other tokens, sampling noise
    would move the policy without teaching it anything.

    Args:
      scores: scores of the targets, [rows, time]; with divergences if the KL is exact.
      fields: `weights`, `advantages`, `old_logprobs`, `ref_logprobs`, [rows, time] each; also `segment_ids` for the ratio of a
        sequence, and `share` (one over the number of micro-batches) for models with experts.

    Returns:
      The loss, and sums over tokens by name (`weight` is the sum of the weights).
    """
    weights = fields["weights"]
    trained = weights > 0
    logprobs = jnp.where(trained, scores.logprobs, 0.0)
    old = jnp.where(trained, fields["old_logprobs"], 0.0)
    now, then, advantages = logprobs, old, fields["advantages"]
    if loss.ratio == "sequence":
        now, then = sequence_sums(logprobs - old, fields["segment_ids"]), jnp.zeros_like(old)
        advantages = jnp.where(trained, advantages, 0.0)  # the gradients of all tokens pass through one ratio
    per_token, clipped = POLICY_LOSSES.get(loss.kind)(now, then, advantages, loss.clip_low, loss.clip_high)
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
    if loss.entropy_coef:
        entropy = (weights * jnp.where(trained, scores.entropies, 0.0)).sum()
        total = total - loss.entropy_coef * entropy
        metrics["entropy"] = entropy
    if scores.routing is not None:
        total = total + _routing_terms(loss, scores.routing, fields.get("share", 1.0), metrics)
    metrics["loss"] = total
    return total, metrics


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
