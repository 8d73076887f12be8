"""What a set of episodes amounts to: answer quality, behaviour, routing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from routerl_jax.core.types import Episode
from routerl_jax.evaluation.routing import routing_accuracy
from routerl_jax.rewards.metrics import ANSWER_METRICS
from routerl_jax.rewards.scoring import bootstrap_intervals

_ANSWER = ("em", "f1", "cover_em", "f1_recall")


def summarize(episodes: Sequence[Episode], normalizer: str = "search_r1") -> dict[str, Any]:
    """Metrics of finished episodes.

    Returns:
      `em`, `f1`, `cover_em`, `f1_recall` in [0, 1], each with its `_interval` (95 %, bootstrap), `searches_per_question`,
      `valid_search_share` (of episodes: at least one search that was written to the letter of the protocol and succeeded),
      `invalid_action_rate` (of turns), `answered_rate`, `truncated_rate`, `tool_error_rate` (of calls),
      `tokens_per_question` (sampled), `retrieval_cost` (of all calls of a question, in units of a dense search), `kb_share`
      (share of calls per knowledge base; `mode_usage` is the same under the name that RouteRAG's readers look for), `n`, and
      `routing_accuracy` where gold paths are known.

    Raises:
      ValueError: no episodes.
    """
    if not episodes:
        raise ValueError("there are no episodes to summarise")
    scores = np.asarray(
        [[ANSWER_METRICS[name](e.answer, e.example.answers, normalizer) for name in _ANSWER] for e in episodes]
    )
    intervals = bootstrap_intervals(scores)
    turns = max(sum(len(e.turns) for e in episodes), 1)
    calls = [call for episode in episodes for call in episode.calls]
    names = sorted({call.tool for call in calls})
    share = {name: sum(call.tool == name for call in calls) / len(calls) for name in names}
    result: dict[str, Any] = {
        **{name: float(mean) for name, mean in zip(_ANSWER, scores.mean(axis=0))},
        **{f"{name}_interval": intervals[:, i].tolist() for i, name in enumerate(_ANSWER)},
        "searches_per_question": len(calls) / len(episodes),
        "valid_search_share": float(np.mean([_searched_validly(e) for e in episodes])),
        "invalid_action_rate": sum(e.invalid_actions for e in episodes) / turns,
        "answered_rate": float(np.mean([e.answer is not None for e in episodes])),
        "truncated_rate": float(np.mean([e.truncated for e in episodes])),
        "tool_error_rate": sum(call.error is not None for call in calls) / max(len(calls), 1),
        "tokens_per_question": sum(e.sampled_tokens for e in episodes) / len(episodes),
        "retrieval_cost": sum(call.cost for call in calls) / len(episodes),
        "kb_share": share,
        "mode_usage": share,
        "n": len(episodes),
    }
    accuracy = routing_accuracy(list(episodes))
    if accuracy is not None:
        result["routing_accuracy"] = accuracy
    return result


def _searched_validly(episode: Episode) -> bool:
    return any(turn.well_formed and any(call.error is None for call in turn.calls) for turn in episode.turns)
