"""Balances the accepted trajectories, so that no data set and no sequence of retrievers dominates the files."""

from __future__ import annotations

import collections
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

from absl import logging

from routerl_jax.data.trajectories import RouteStep, Trajectory
from routerl_jax.extras.curation.golden_config import AmountConfig

T = TypeVar("T")
Found = tuple[str, Trajectory]  # data set, trajectory

_ROUNDING = 1e-6  # tolerance for the rounding of a share times a number


def pattern_of(trajectory: Trajectory) -> str:
    """The retrievers of a trajectory in order, such as "text retriever > table retriever > none"."""
    return " > ".join("+".join(step.retrievers) for step in trajectory.steps if isinstance(step, RouteStep))


def balanced(trajectories: Sequence[Found], amount: AmountConfig) -> dict[str, list[Trajectory]]:
    """The trajectories that `per_dataset`, `pattern_share` and `dataset_ratio` allow, by data set; the first ones of each.

    What `dataset_ratio` removes is logged as a warning.
    """
    by_dataset: dict[str, list[Trajectory]] = {}
    for dataset, trajectory in trajectories:
        by_dataset.setdefault(dataset, []).append(trajectory)
    by_dataset = {
        name: within_share(items[: amount.per_dataset], amount.pattern_share, pattern_of)
        for name, items in by_dataset.items()
    }
    if amount.dataset_ratio and by_dataset:
        fewest = min(by_dataset, key=lambda name: len(by_dataset[name]))
        limit = max(int(amount.dataset_ratio * len(by_dataset[fewest])), amount.at_least)
        if reduced := [f"{name} {len(items):,}" for name, items in by_dataset.items() if len(items) > limit]:
            logging.warning(
                "of data set %s %d were accepted, so of others only %d each go into the files (%s; "
                "config.amount.dataset_ratio=%g, at_least=%d). The rest stays in questions.jsonl: the same command with a "
                "larger ratio, or --config.amount.dataset_ratio=0 for all, takes it",
                fewest,
                len(by_dataset[fewest]),
                limit,
                ", ".join(reduced),
                amount.dataset_ratio,
                amount.at_least,
            )
        by_dataset = {name: items[:limit] for name, items in by_dataset.items()}
    return by_dataset


def split(items: Sequence[Trajectory], validation: float) -> tuple[list[Trajectory], list[Trajectory]]:
    """(training, validation). The last `validation` share is held out; at least one of the items stays for training."""
    held_out = min(round(validation * len(items)), max(len(items) - 1, 0))
    return list(items[: len(items) - held_out]), list(items[len(items) - held_out :])


def within_share(items: Sequence[T], share: float, kind: Callable[[T], Hashable]) -> list[T]:
    """The first items such that no kind has more than `share` of them, or an equal part if that is larger."""
    counts = collections.Counter(map(kind, items))
    if len(counts) < 2:
        return list(items)
    share = max(share, 1 / len(counts))
    while (largest := counts.most_common(1)[0])[1] > share * counts.total() + _ROUNDING:
        counts[largest[0]] -= 1
    selected = []
    for item in items:
        if counts[kind(item)] > 0:
            counts[kind(item)] -= 1
            selected.append(item)
    return selected
