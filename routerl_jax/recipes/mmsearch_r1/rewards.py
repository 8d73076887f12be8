"""MMSearch-R1's reward (arXiv 2506.20670, equation 1): the answer's score, reduced if there was a search, and the form.

    0.9 * mmsearch_r1.accuracy + 0.1 * mmsearch_r1.format

A right answer in the right form earns 1.0 without a search and 0.91 with one. In a wrong form it earns 0.9 and 0.81. The right
form alone earns 0.1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from routerl_jax.core.types import Episode, Verdict
from routerl_jax.recipes.mmsearch_r1.protocol import form
from routerl_jax.rewards.metrics import ANSWER_METRICS, accepted_answers
from routerl_jax.rewards.terms import READS_TAGS, StepTerm, counts, judge_reward

Per = Literal["episode", "search"]
Plans = Literal["within_limits", "released"]

ALPHA, PENALTY = 0.1, 0.1

# The sequences of searches before the answer that the released check accepts.
_RELEASED_PLANS = ((), ("image",), ("text",), ("image", "text"))


def accuracy(
    episode: Episode,
    metric: str = "em",
    penalty: float = PENALTY,
    per: Per = "episode",
    normalizer: str = "search_r1",
) -> float:
    """The answer's score, times (1 - penalty) if there was a search (equation 1; the paper's factor is 0.9).

    Args:
      metric: a name in `rewards.metrics.ANSWER_METRICS`; the paper uses em, its code also substring_em.
      penalty: from -1 (a bonus, with which a schedule may start) to 1.
      per: "episode": the factor applies once; "search": once per call (an option of the released code). Failed calls count,
        because the policy made them.

    Raises:
      ValueError: the metric or `per` is unknown, or the penalty is outside of [-1, 1].
    """
    if metric not in ANSWER_METRICS:
        raise ValueError(f"metric={metric!r} is not known; use one of {', '.join(ANSWER_METRICS)}")
    score = ANSWER_METRICS[metric](episode.answer, accepted_answers(episode.example, episode.answer), normalizer)
    return score * _share(episode, penalty, per)


def judged_accuracy(
    episodes: Sequence[Episode], verdicts: Sequence[Verdict], penalty: float = PENALTY, per: Per = "episode"
) -> list[float]:
    """Like `mmsearch_r1.accuracy`, with the judge's verdict as the score (the paper's table 9)."""
    scores = judge_reward(episodes, verdicts)
    return [score * _share(episode, penalty, per) for score, episode in zip(scores, episodes)]


JUDGED_ACCURACY = StepTerm(judged_accuracy, judges=counts)


def _share(episode: Episode, penalty: float, per: Per) -> float:
    """The factor of the score after the penalty for searches."""
    if per not in get_args(Per):
        raise ValueError(f"per={per!r} is not known; use one of {', '.join(get_args(Per))}")
    if not -1 <= penalty <= 1:
        raise ValueError(f"penalty={penalty} must be from -1 to 1")
    count = len(episode.calls)
    return (1 - penalty) ** (count if per == "search" else min(count, 1))


def format_kept(episode: Episode, plans: Plans = "within_limits", refusal: bool = False) -> float:
    """1 if every turn has the right form and an answer ends the episode, else 0.

    Args:
      plans: the searches allowed before the answer. "within_limits": any that the agent's limits allow; "released": none, an
        image search, a text search, or an image search and then a text search, read as the released scorer reads them, from
        the text that the policy wrote (`protocol.form`).
      refusal: a refusal in the right form also earns 1; the released checks require an answer.

    Raises:
      ValueError: `plans` is unknown.
    """
    if plans not in get_args(Plans):
        raise ValueError(f"plans={plans!r} is not known; use one of {', '.join(get_args(Plans))}")
    turns = episode.turns
    if plans == "released":
        *actions, end = [form(turn.text, released=True) for turn in turns] or [""]
        refused = refusal and bool(turns) and form(turns[-1].text) == "refusal"
        return float(tuple(actions) in _RELEASED_PLANS and (end == "answer" or refused))
    if not turns or not all(turn.well_formed and turn.action is not None for turn in turns):
        return 0.0
    *searches, last = [turn.action for turn in turns if turn.action is not None]
    if last.kind != "answer" and not (refusal and last.kind == "refusal"):
        return 0.0
    return float(all(action.kind == "search" for action in searches))


READS_TAGS["mmsearch_r1.format"] = lambda options: options.get("plans") == "released"


REWARD: Mapping[str, float | Mapping[str, Any]] = {"mmsearch_r1.accuracy": 1 - ALPHA, "mmsearch_r1.format": ALPHA}
RELEASED_REWARD: Mapping[str, float | Mapping[str, Any]] = {
    "mmsearch_r1.accuracy": 1 - ALPHA,
    "mmsearch_r1.format": {"weight": ALPHA, "plans": "released"},
}


def reward(penalty: float, metric: str = "em", per: Per = "episode") -> Mapping[str, float | Mapping[str, Any]]:
    """Equation 1 with another penalty: 0 for the ablation, or the value of a stage in a schedule of penalties."""
    return {
        "mmsearch_r1.accuracy": {"weight": 1 - ALPHA, "penalty": penalty, "metric": metric, "per": per},
        "mmsearch_r1.format": ALPHA,
    }
