"""A step's objective from the papers' equations, in float64, one token at a time; with its slopes, worked out by hand.

Nothing is taken from routerl_jax. Sums are those of the standard library, group statistics those of its `statistics`.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence

Numbers = Sequence[float]


def advantages(name: str, rewards: Numbers, groups: Sequence[int], std_floor: float = 0.0) -> list[float]:
    """One per attempt: GRPO (2402.03300, 4.1.2), Dr. GRPO (2503.20783), RLOO (2402.14740), REINFORCE++ (2501.03262)."""
    result = []
    for i, reward in enumerate(rewards):
        mates = [other for j, other in enumerate(rewards) if groups[j] == groups[i]]
        others = [other for j, other in enumerate(rewards) if groups[j] == groups[i] and j != i]
        above = reward - statistics.fmean(mates)
        if name == "grpo":
            result.append(above / (max(statistics.stdev(mates) if others else 0.0, std_floor) + 1e-6))
        elif name == "rloo":
            result.append(reward - statistics.fmean(others) if others else 0.0)
        elif name == "reinforce_pp":
            result.append(reward)
        else:
            result.append(above)
    if name == "batch_std":
        scale = max(statistics.pstdev(result), std_floor) + 1e-6
        result = [value / scale for value in result]
    return result


def divergence_to_go(logprobs: Numbers, reference: Numbers, trained: Sequence[bool]) -> list[float]:
    """Of each token, the k1 estimates of its own and all later trained ones of its sequence."""
    k1 = [p - q if counts else 0.0 for p, q, counts in zip(logprobs, reference, trained)]
    return [math.fsum(k1[t:]) for t in range(len(k1))]


def whitened(values: Numbers) -> list[float]:
    """REINFORCE++, eq. 5."""
    mean, variance = statistics.fmean(values), statistics.pvariance(values)
    return [(value - mean) / math.sqrt(max(variance, 1e-8)) for value in values]


def weights(kind: str, lengths: Sequence[int], constant: float) -> list[float]:
    """Of a token in each sequence, by its number of trained tokens; sequences without any do not count.

    DAPO (2503.14476, 3.3): 1 / sum |o|. GRPO (2402.03300, eq. 3): 1 / (G |o|). Dr. GRPO (2503.20783): 1 / (G L).
    """
    sequences = sum(1 for length in lengths if length)
    if kind == "token":
        return [1 / math.fsum(lengths)] * len(lengths)
    if kind == "sequence":
        return [1 / (sequences * length) if length else 0.0 for length in lengths]
    return [1 / (sequences * constant)] * len(lengths)


def policy_loss(
    kind: str, logprob: float, old: float, advantage: float, low: float, high: float, bound: float = 0.0
) -> tuple[float, float]:
    """(loss, d loss / d logprob) of one token. PPO (1707.06347, eq. 7) by cases, clip-higher: DAPO, 3.1; CISPO: MiniMax-M1
    (2506.13585, eqs. 4 and 5), whose slope is not that of its value; with a bound, dual-clip PPO (1912.09729)."""
    if kind == "reinforce":
        return -advantage * logprob, -advantage
    ratio = math.exp(logprob - old)
    if kind == "cispo":
        held = min(max(ratio, 1 - low), 1 + high)
        return -held * advantage * logprob, -held * advantage
    if bound and advantage < 0 and ratio > bound:
        return -bound * advantage, 0.0
    if advantage >= 0 and ratio > 1 + high:
        return -(1 + high) * advantage, 0.0
    if advantage < 0 and ratio < 1 - low:
        return -(1 - low) * advantage, 0.0
    return -ratio * advantage, -ratio * advantage


def divergence(kind: str, logprob: float, reference: float) -> tuple[float, float]:
    """(estimate, its slope) of one token (Schulman, Approximating KL Divergence, 2020); k3 is cut off at 10."""
    d = logprob - reference
    if kind == "k1":
        return d, 1.0
    if kind == "k2":
        return d * d / 2, d
    k3 = math.exp(-d) - 1 + d
    return (k3, 1 - math.exp(-d)) if k3 < 10 else (10.0, 0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Terms:
    """What the objective is made of."""

    kind: str = "clip"
    ratio: str = "token"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 0.0
    kl: str = "k3"
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    min_entropy: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokens:
    """A sequence: per token, log-probabilities (now, when sampled, of the reference), entropy and advantage."""

    trained: Sequence[bool]
    logprobs: Numbers
    old: Numbers
    reference: Numbers
    entropies: Numbers
    advantages: Numbers


def objective(
    terms: Terms, sequences: Sequence[Tokens], aggregation: str, constant: float
) -> tuple[float, list[list[float]], list[list[float]]]:
    """The loss of a mini-batch, and its slope in every log-probability and in every entropy."""
    per_token = weights(aggregation, [sum(s.trained) for s in sequences], constant)
    parts, by_logprob, by_entropy = [], [], []
    for sequence, weight in zip(sequences, per_token):
        by_logprob.append([0.0] * len(sequence.trained))
        by_entropy.append([0.0] * len(sequence.trained))
        tokens = [t for t, counts in enumerate(sequence.trained) if counts]
        bounds = terms.clip_low, terms.clip_high, terms.dual_clip
        if terms.ratio != "token" and tokens:
            # RouteRAG (2512.09487), eq. 5: a sequence's probability is the product of its tokens', and its term counts once.
            # GSPO (2507.18071), 4.1: the ratio's root, of the length's degree.
            root = 1 if terms.ratio == "sequence" else len(tokens)
            whole, before = (
                math.fsum(values[t] for t in tokens) / root for values in (sequence.logprobs, sequence.old)
            )
            term, its_slope = policy_loss(terms.kind, whole, before, sequence.advantages[tokens[0]], *bounds)
            its_slope *= len(tokens) / root
            parts.append(weight * len(tokens) * term)
        for t in tokens:
            logprob, entropy = sequence.logprobs[t], sequence.entropies[t]
            if terms.ratio != "token":
                loss, slope = 0.0, its_slope
            else:
                loss, slope = policy_loss(terms.kind, logprob, sequence.old[t], sequence.advantages[t], *bounds)
            if entropy < terms.min_entropy:
                loss, slope = 0.0, 0.0
            estimate, away = divergence(terms.kl, logprob, sequence.reference[t])
            parts.append(weight * (loss + terms.kl_coef * estimate - terms.entropy_coef * entropy))
            by_logprob[-1][t] = weight * (slope + terms.kl_coef * away)
            by_entropy[-1][t] = -weight * terms.entropy_coef
    return math.fsum(parts), by_logprob, by_entropy
