"""The interface of judges, and the reward that their verdicts give."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from routerl_jax.core.types import Episode, Verdict


class Judge(Protocol):
    """Decides for each episode whether its answer is right (`llms.judge.ModelJudge` asks a language model)."""

    def __call__(self, episodes: Sequence[Episode]) -> list[Verdict]:
        """One verdict per episode, in order, the same on every process (a collective call)."""
        ...


def judge_reward(episodes: Sequence[Episode], verdicts: Sequence[Verdict]) -> list[float]:
    """1 for an answer that the judge finds right, else 0. The judge decides what a failed verdict counts.

    An episode whose verdict does not count (`Verdict.counts` is None) gets the mean of the counting ones at its question, or 0
    if there are none. So it only changes the advantages of other attempts through the group's standard deviation. It is itself
    left out of the loss (learning.masks.unjudged).
    """
    counted: dict[str, list[float]] = {}
    for episode, verdict in zip(episodes, verdicts, strict=True):
        if verdict.counts is not None:
            counted.setdefault(episode.example.id, []).append(verdict.counts)
    means = {question: float(np.mean(values)) for question, values in counted.items()}
    return [
        means.get(episode.example.id, 0.0) if verdict.counts is None else verdict.counts
        for episode, verdict in zip(episodes, verdicts)
    ]


def counts(episode: Episode) -> bool:
    """Whether an episode counts in the means of a judged term: no judge was asked, or its verdict counts."""
    return episode.verdict is None or episode.verdict.counts is not None
