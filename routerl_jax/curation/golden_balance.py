"""Which of the trajectories that were accepted go into the files, so that no data set and no habit rules."""

from __future__ import annotations

import collections
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

from absl import logging

from routerl_jax.curation.golden_config import AmountConfig
from routerl_jax.data.trajectories import RouteStep, Trajectory

T = TypeVar("T")
Found = tuple[str, Trajectory]  # data set, trajectory

_ROUNDING = 1e-6  # of a share times a number


def pattern_of(trajectory: Trajectory) -> str:
    """Its retrievers in their order: "text retriever > table retriever > none"."""
    return " > ".join("+".join(step.retrievers) for step in trajectory.steps if isinstance(step, RouteStep))


def balanced(found: Sequence[Found], amount: AmountConfig) -> dict[str, list[Trajectory]]:
    """By data set, the first of each as far as `per_dataset`, `pattern_share` and `dataset_ratio` let them; what the last one
    takes away is told of."""
    by_dataset: dict[str, list[Trajectory]] = {}
    for dataset, trajectory in found:
        by_dataset.setdefault(dataset, []).append(trajectory)
    by_dataset = {
        name: within_share(items[: amount.per_dataset], amount.pattern_share, pattern_of)
        for name, items in by_dataset.items()
    }
    if amount.dataset_ratio and by_dataset:
        fewest = min(by_dataset, key=lambda name: len(by_dataset[name]))
        most = max(int(amount.dataset_ratio * len(by_dataset[fewest])), amount.at_least)
        if cut := [f"{name} {len(items):,}" for name, items in by_dataset.items() if len(items) > most]:
            logging.warning(
                "of data set %s %d were accepted, so of others only %d each go into the files (%s; "
                "config.amount.dataset_ratio=%g, at_least=%d). The rest stays in questions.jsonl: the same command with a "
                "larger ratio, or --config.amount.dataset_ratio=0 for all, takes it",
                fewest,
                len(by_dataset[fewest]),
                most,
                ", ".join(cut),
                amount.dataset_ratio,
                amount.at_least,
            )
        by_dataset = {name: items[:most] for name, items in by_dataset.items()}
    return by_dataset


def split(items: Sequence[Trajectory], validation: float) -> tuple[list[Trajectory], list[Trajectory]]:
    """(Training, validation): the last `validation` share is held out, of two or more at least one is trained on."""
    held_out = min(round(validation * len(items)), max(len(items) - 1, 0))
    return list(items[: len(items) - held_out]), list(items[len(items) - held_out :])


def within_share(items: Sequence[T], share: float, kind: Callable[[T], Hashable]) -> list[T]:
    """The first items in whose number no kind has more than `share`, or, where that is less, than its equal part."""
    counts = collections.Counter(map(kind, items))
    if len(counts) < 2:
        return list(items)
    share = max(share, 1 / len(counts))
    while (most := counts.most_common(1)[0])[1] > share * counts.total() + _ROUNDING:
        counts[most[0]] -= 1
    kept = []
    for item in items:
        if counts[kind(item)] > 0:
            counts[kind(item)] -= 1
            kept.append(item)
    return kept
