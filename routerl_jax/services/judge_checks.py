"""Checks a judge for bias: does its verdict change if the same answer has another form?"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from routerl_jax.core.types import Episode
from routerl_jax.rewards.metrics import f1
from routerl_jax.rewards.ranges import accepted_answers
from routerl_jax.rewards.verdicts import Judge

_WORDY = "After looking at all that is known about this question, my answer to it is the following: {answer}"


def longer(episode: Episode) -> Episode:
    """The same answer in a longer sentence."""
    return dataclasses.replace(episode, answer=_WORDY.format(answer=episode.answer))


def swapped(episode: Episode) -> Episode:
    """The answer and the accepted answer that is most like it (by F1) in each other's places."""
    answer = episode.answer or ""
    accepted = max(accepted_answers(episode.example, answer), key=lambda gold: f1(answer, [gold]))
    example = dataclasses.replace(episode.example, answers=(answer,), metadata={})
    return dataclasses.replace(episode, example=example, answer=accepted)


def reversed_answers(episode: Episode) -> Episode | None:
    """The accepted answers in reverse order; None if there is only one."""
    answers = accepted_answers(episode.example, episode.answer)
    if len(answers) < 2:
        return None
    example = dataclasses.replace(episode.example, answers=tuple(reversed(answers)), metadata={})
    return dataclasses.replace(episode, example=example)


CHECKS: Mapping[str, Callable[[Episode], Episode | None]] = {
    "longer": longer,
    "swapped": swapped,
    "reversed": reversed_answers,
}


def check_judge(judge: Judge, episodes: Sequence[Episode], most: int) -> dict[str, dict[str, float]]:
    """Asks a judge about changed forms of answers that it has judged.

    Args:
      episodes: with their verdicts. Those that were found right or wrong are checked, `most` of them, from the first.

    Returns:
      By the name of a check: `n`, the episodes with a second verdict of right or wrong; and of these the shares `kept` (the
      same verdict again), `wrong_to_right` and `right_to_wrong`. Checks without a second verdict are absent.
    """
    judged = [e for e in episodes if e.verdict is not None and e.verdict.kind in ("right", "wrong")][:most]
    results: dict[str, dict[str, float]] = {}
    for name, change in CHECKS.items():
        pairs = [(episode, changed) for episode in judged if (changed := change(episode)) is not None]
        verdicts = judge([changed for _, changed in pairs]) if pairs else []
        kinds = [
            (episode.verdict.kind, verdict.kind)
            for (episode, _), verdict in zip(pairs, verdicts)
            if episode.verdict is not None and verdict.kind in ("right", "wrong")
        ]
        if kinds:
            shares = {
                "kept": sum(before == after for before, after in kinds),
                "wrong_to_right": kinds.count(("wrong", "right")),
                "right_to_wrong": kinds.count(("right", "wrong")),
            }
            results[name] = {"n": len(kinds), **{key: count / len(kinds) for key, count in shares.items()}}
    return results
