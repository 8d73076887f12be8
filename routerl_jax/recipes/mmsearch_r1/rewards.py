"""MMSearch-R1's reward (arXiv 2506.20670, equation 1): the answer, less where something was searched for, and the form.

    0.9 * mmsearch_r1.accuracy + 0.1 * mmsearch_r1.format

gives 1.0 for a right answer in the right form without a search, 0.91 with one, 0.9 and 0.81 without the form, 0.1 for the form
alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from routerl_jax.core.types import Episode, Verdict
from routerl_jax.rewards.metrics import ANSWER_METRICS
from routerl_jax.rewards.ranges import accepted_answers
from routerl_jax.rewards.terms import REWARD_TERMS, StepTerm
from routerl_jax.rewards.verdicts import counts, judge_reward

Per = Literal["episode", "search"]
Plans = Literal["within_limits", "released"]

ALPHA, PENALTY = 0.1, 0.1

# What the released check pays form for, by kinds of search; the answer follows.
_RELEASED_PLANS = ((), ("image",), ("text",), ("image", "text"))


@REWARD_TERMS.register("mmsearch_r1.accuracy")
def accuracy(
    episode: Episode,
    metric: str = "em",
    penalty: float = PENALTY,
    per: Per = "episode",
    normalizer: str = "search_r1",
) -> float:
    """The answer's score, less a share of it if anything was searched for (equation 1; the paper multiplies it by 0.9 once).

    Args:
      metric: a name in `rewards.metrics.ANSWER_METRICS`; the paper has em, its code substring_em as well.
      penalty: the share, from -1 (a bonus, where a schedule begins) to 1.
      per: "episode": once; "search": for every call, (1 - penalty) to the power of their number (an option of the released
        code). Failed calls count, as the policy asked for them.

    Raises:
      ValueError: an unknown metric or `per`, or a penalty outside of [-1, 1].
    """
    if metric not in ANSWER_METRICS:
        raise ValueError(f"metric={metric!r} is not known; use one of {', '.join(ANSWER_METRICS)}")
    score = ANSWER_METRICS[metric](episode.answer, accepted_answers(episode.example, episode.answer), normalizer)
    return score * _share(episode, penalty, per)


def judged_accuracy(
    episodes: Sequence[Episode], verdicts: Sequence[Verdict], penalty: float = PENALTY, per: Per = "episode"
) -> list[float]:
    """As `mmsearch_r1.accuracy`, with the judge's verdict as the score (the paper's table 9)."""
    scores = judge_reward(episodes, verdicts)
    return [score * _share(episode, penalty, per) for score, episode in zip(scores, episodes)]


REWARD_TERMS.register("mmsearch_r1.judged_accuracy")(StepTerm(judged_accuracy, judges=counts))


def _share(episode: Episode, penalty: float, per: Per) -> float:
    """What is left of the score after the penalty for searching."""
    if per not in get_args(Per):
        raise ValueError(f"per={per!r} is not known; use one of {', '.join(get_args(Per))}")
    if not -1 <= penalty <= 1:
        raise ValueError(f"penalty={penalty} must be from -1 to 1")
    made = len(episode.calls)
    return (1 - penalty) ** (made if per == "search" else min(made, 1))


@REWARD_TERMS.register("mmsearch_r1.format")
def format_kept(episode: Episode, plans: Plans = "within_limits", refusal: bool = False) -> float:
    """1 if every turn keeps the form and an answer ends the episode, else 0.

    Args:
      plans: which searches may come before the answer. "within_limits": any that the agent's limits let through; "released":
        none, by the picture, in words, or by the picture and then in words.
      refusal: pay for a refusal in good form, too; the released checks want an answer.

    Raises:
      ValueError: unknown plans.
    """
    if plans not in get_args(Plans):
        raise ValueError(f"plans={plans!r} is not known; use one of {', '.join(get_args(Plans))}")
    turns = episode.turns
    if not turns or not all(turn.well_formed and turn.action is not None for turn in turns):
        return 0.0
    *searches, last = [turn.action for turn in turns if turn.action is not None]
    if last.kind != "answer" and not (refusal and last.kind == "refusal"):
        return 0.0
    if any(action.kind != "search" for action in searches):
        return 0.0
    made = tuple("text" if action.query else "image" for action in searches)
    return float(plans == "within_limits" or made in _RELEASED_PLANS)


REWARD: Mapping[str, float | Mapping[str, Any]] = {"mmsearch_r1.accuracy": 1 - ALPHA, "mmsearch_r1.format": ALPHA}
RELEASED_REWARD: Mapping[str, float | Mapping[str, Any]] = {
    "mmsearch_r1.accuracy": 1 - ALPHA,
    "mmsearch_r1.format": {"weight": ALPHA, "plans": "released"},
}


def reward(penalty: float, metric: str = "em", per: Per = "episode") -> Mapping[str, float | Mapping[str, Any]]:
    """Equation 1 with another penalty: 0 for the ablation without one, or one of a schedule's (a stage for each)."""
    return {
        "mmsearch_r1.accuracy": {"weight": 1 - ALPHA, "penalty": penalty, "metric": metric, "per": per},
        "mmsearch_r1.format": ALPHA,
    }
