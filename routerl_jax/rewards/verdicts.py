"""What a judge's verdicts are worth: who gives them, and the reward that they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from routerl_jax.core.types import Episode, Verdict


class Judge(Protocol):
    """Says of each episode's answer whether it is right (`llms.judge.ModelJudge` asks a language model)."""

    def __call__(self, episodes: Sequence[Episode]) -> list[Verdict]:
        """One verdict per episode, in order, the same on every process (a collective call)."""
        ...


def judge_reward(episodes: Sequence[Episode], verdicts: Sequence[Verdict]) -> list[float]:
    """1 for an answer that the judge finds right, else 0; what a verdict that failed counts is the judge's to say.

    An episode whose verdict does not count (`Verdict.counts` is None) has the mean of those that do at its question, 0 where
    there are none. So it moves no other attempt's advantage but by the group's standard deviation; itself it is left out of
    the loss (learning.masks.unjudged).
    """
    known: dict[str, list[float]] = {}
    for episode, verdict in zip(episodes, verdicts, strict=True):
        if verdict.counts is not None:
            known.setdefault(episode.example.id, []).append(verdict.counts)
    means = {question: float(np.mean(values)) for question, values in known.items()}
    return [
        means.get(episode.example.id, 0.0) if verdict.counts is None else verdict.counts
        for episode, verdict in zip(episodes, verdicts)
    ]


def counts(episode: Episode) -> bool:
    """Whether an episode is one of those that a judge decided on: none was asked, or its verdict counts."""
    return episode.verdict is None or episode.verdict.counts is not None
