"""Corrects a step's credit for tokens that are off the policy: truncated importance, and masks of whole sequences."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Seq
from typing import Protocol

import numpy as np

from routerl_jax.core.types import Sequence
from routerl_jax.learning.advantages import log_ratio_sums, outside, truncated_importance
from routerl_jax.training.credit.assign import Credit


class Limits(Protocol):
    """The part of `config.learner` that is read here (training.learner_config)."""

    @property
    def importance_cap(self) -> float: ...
    @property
    def mask_sequence_ratio(self) -> float: ...
    @property
    def mask_mean_ratio(self) -> float: ...


def corrects(limits: Limits) -> bool:
    """Whether the learner's own log-probabilities are needed before the updates."""
    return bool(limits.importance_cap or limits.mask_sequence_ratio or limits.mask_mean_ratio)


def correct(limits: Limits, credit: Credit, sequences: Seq[Sequence], current: Seq[np.ndarray]) -> Credit:
    """Leaves out sequences that are too far off the policy, and multiplies advantages by the truncated importance of tokens.

    With r_t = p_learner / p_sampler at the |o| trained tokens of a sequence and C a bound, these are left out (as by
    `leave_out`, so they do not count in means either):
      mask_sequence_ratio: prod_t r_t outside [1 / C, C] (Liu, Li et al., When Speed Kills Stability, 2025);
      mask_mean_ratio: (prod_t r_t)^(1 / |o|) outside [1 / C, C], which does not depend on the length.
    Whitened advantages were whitened with the sequences that are left out here.

    Args:
      current: for each of `credit.keep`, the learner's log-probabilities before the step's updates, [T].

    Returns:
      The credit with metrics: `importance/mean`, `/capped_share`, of the tokens that remain; `importance/masked/sequence`,
      `/masked/mean`, shares of the sequences; `importance/masked_tokens`, the share of trained tokens that either leaves out;
      `importance/kl`, the mean over all tokens of log p_sampler - log p_learner, which estimates KL(sampler || learner).
    """
    trained = [sequences[i] for i in credit.keep]
    masks = [s.loss_mask for s in trained]
    tokens = np.asarray([mask.sum() for mask in masks], int)
    sums = log_ratio_sums(current, [s.logprobs for s in trained], masks)
    metrics = dict(credit.metrics)
    if tokens.sum():
        metrics["importance/kl"] = float(-sums.sum() / tokens.sum())
    excluded = np.zeros(len(trained), bool)
    for name, bound, log_ratios in (
        ("sequence", limits.mask_sequence_ratio, sums),
        ("mean", limits.mask_mean_ratio, sums / np.maximum(tokens, 1)),
    ):
        if bound and len(trained):
            far = outside(log_ratios, bound)
            metrics[f"importance/masked/{name}"] = float(far.mean())
            excluded |= far
    if (limits.mask_sequence_ratio or limits.mask_mean_ratio) and tokens.sum():
        metrics["importance/masked_tokens"] = float(tokens[excluded].sum() / tokens.sum())
    advantages = list(credit.advantages)
    if limits.importance_cap:
        factors = truncated_importance(current, [s.logprobs for s in trained], limits.importance_cap)
        for i, factor in zip(credit.keep, factors):
            advantages[i] = advantages[i] * factor
        metrics |= _importance(
            [factor[mask] for factor, mask, skip in zip(factors, masks, excluded) if not skip], limits.importance_cap
        )
    return dataclasses.replace(credit, advantages=advantages, keep=credit.keep[~excluded], metrics=metrics)


def _importance(factors: Seq[np.ndarray], cap: float) -> dict[str, float]:
    trained = np.concatenate([np.zeros(0, np.float32), *factors])
    if not len(trained):
        return {}
    return {"importance/mean": float(trained.mean()), "importance/capped_share": float((trained >= cap).mean())}


def with_logprobs(sequences: Seq[Sequence], keep: np.ndarray, logprobs: Seq[np.ndarray]) -> list[Sequence]:
    """The sequences, with the learner's log-probabilities in those of `keep`, so that ratios start at 1."""
    result = list(sequences)
    for i, values in zip(keep, logprobs):
        filled = np.where(sequences[i].loss_mask, values, 0.0).astype(np.float32)
        result[i] = dataclasses.replace(sequences[i], logprobs=filled)
    return result
