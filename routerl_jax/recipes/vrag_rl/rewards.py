"""VRAG-RL's reward (arXiv 2505.22019, equation 12): the ranks of retrieved pages, a judge's verdict on the answer, the pattern.

    alpha * vrag_rl.ndcg + beta * judge + gamma * vrag_rl.pattern,  alpha + beta + gamma = 1

The paper gives gamma: 0 after a supervised start, 0.1 without one. It does not give alpha and beta; ours have the ratio two to
seven of the released code.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from routerl_jax.core.types import Episode, Verdict
from routerl_jax.rewards.retrieval import has_gold, retrieval
from routerl_jax.rewards.terms import READS_TAGS, StepTerm, counts, judge_reward, well_formed

Variant = Literal["paper", "released"]

_RETRIEVAL, _ANSWER = 2, 7  # alpha to beta
_WEIGHTS_SUM = 1e-6  # tolerance for a sum of 1


def ndcg(episodes: Sequence[Episode], variant: Variant = "paper", gated: bool = False) -> list[float]:
    """NDCG of the pages that searches showed, in their order (equations 7 to 9). Crops are not counted.

    A question without gold pages gives 0 for all its attempts.

    Args:
      variant: "paper": a page has the rank at which it was shown first; "released": a page that is shown again has another rank
        and gains again. They only differ for agents that show a page twice; the recipe's own does not.
      gated: give 0 if the episode does not follow the released pattern.

    Raises:
      ValueError: the variant is unknown.
    """
    _check(variant)
    values = []
    for episode in episodes:
        retrieved = retrieval(episode)
        paid = retrieved is not None and not (gated and not _released_pattern(episode))
        values.append(retrieved.ndcg(repeats=variant == "released") if retrieved is not None and paid else 0.0)
    return values


def gated_judge(episodes: Sequence[Episode], verdicts: Sequence[Verdict]) -> list[float]:
    """Like the term `judge`, but 0 if the episode does not follow the released pattern. An attempt whose verdict does not count
    gets the mean of these values over the other attempts at its question."""
    paid = [
        verdict if verdict.counts is None or _released_pattern(episode) else dataclasses.replace(verdict, counts=0.0)
        for episode, verdict in zip(episodes, verdicts, strict=True)
    ]
    return judge_reward(episodes, paid)


def pattern(episode: Episode, variant: Variant = "paper") -> float:
    """1 if the episode follows the pattern of thought, action and observation, else 0 (equation 10).

    Args:
      variant: "paper": every turn is one action in the right form, the last one is an answer that the policy wrote itself, and
        there was a search before it (section 3.3 calls an answer before retrieval invalid). The paper itself only says that
        actions are parsed. "released": there are a search and an answer in their tags anywhere, even an answer that was
        begun for the policy.

    Raises:
      ValueError: the variant is unknown.
    """
    _check(variant)
    if variant == "released":
        return float(_released_pattern(episode))
    searched = any(turn.action is not None and turn.action.kind == "search" for turn in episode.turns)
    return float(searched and well_formed(episode))


def _released_pattern(episode: Episode) -> bool:
    texts = [turn.forced + turn.text for turn in episode.turns]
    return all(any(f"</{name}>" in text.partition(f"<{name}>")[2] for text in texts) for name in ("search", "answer"))


def _check(variant: str) -> None:
    if variant not in get_args(Variant):
        raise ValueError(f"variant={variant!r} is not known; use one of {', '.join(get_args(Variant))}")


NDCG = StepTerm(ndcg, judges=has_gold)
GATED_JUDGE = StepTerm(gated_judge, judges=counts)
READS_TAGS["vrag_rl.ndcg"] = lambda options: bool(options.get("gated"))
READS_TAGS["vrag_rl.gated_judge"] = lambda options: True
READS_TAGS["vrag_rl.pattern"] = lambda options: options.get("variant") == "released"

Terms = Mapping[str, float | Mapping[str, Any]]


def reward(gamma: float, alpha: float | None = None, beta: float | None = None, outcome: str = "judge") -> Terms:
    """Equation 12 as terms of config.stages.NAME.reward. Terms of weight 0 are left out, so that no judge is asked in vain.

    Args:
      gamma: weight of the pattern.
      alpha, beta: weights of the ranks of pages and of the outcome; None: the rest in the ratio two to seven. alpha=0 is the
        ablation without the retrieval reward (table 2).
      outcome: the term for the right answer; the paper compares `judge` with `em` (section 3.3).

    Raises:
      ValueError: a weight is negative, or the weights do not sum to 1.
    """
    rest = 1 - gamma
    if alpha is None:
        alpha = rest * _RETRIEVAL / (_RETRIEVAL + _ANSWER) if beta is None else rest - beta
    beta = rest - alpha if beta is None else beta
    if min(alpha, beta, gamma) < -_WEIGHTS_SUM or abs(alpha + beta + gamma - 1) > _WEIGHTS_SUM:
        raise ValueError(
            f"alpha={alpha:.6g}, beta={beta:.6g}, gamma={gamma:.6g}: the weights of VRAG-RL's reward must be at least 0 and "
            "add up to 1"
        )
    weights = {"vrag_rl.ndcg": alpha, outcome: beta, "vrag_rl.pattern": gamma}
    return {name: weight for name, weight in weights.items() if weight > 0}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preset:
    """Settings that belong together in a run: the reward's terms, and config.learner.loss.kl_coef."""

    reward: Terms
    kl_coef: float


AFTER_SFT = Preset(reward=reward(0.0), kl_coef=0.01)
FROM_INSTRUCT = Preset(reward=reward(0.1), kl_coef=0.0)  # the paper's "cold start" (section 2.3)
RELEASED = Preset(
    reward={
        "vrag_rl.ndcg": {"weight": 0.2, "variant": "released", "gated": True},
        "vrag_rl.gated_judge": 0.7,
        "vrag_rl.pattern": {"weight": 0.1, "variant": "released"},
    },
    kl_coef=0.01,
)
