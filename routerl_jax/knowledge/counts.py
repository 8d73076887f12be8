"""Counts of requests to the stages of a tool, of answers from a cache, and of failures."""

from __future__ import annotations

import collections
import threading
from collections.abc import Mapping

# Stage -> number of requests ("asked"), of answers from a cache ("hits", only for stages with a cache), of failures, and of
# documents that were no passages ("left_out", if there were any).
Counts = Mapping[str, Mapping[str, int]]

ASKED, HITS, FAILURES, LEFT_OUT = "asked", "hits", "failures", "left_out"


class StageCounts:
    """Counters of stages. Safe to use from several threads.

    Args:
      cached: stages with a cache.
      uncached: stages without a cache.
    """

    def __init__(self, *cached: str, uncached: tuple[str, ...] = ()) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, dict[str, int]] = {
            **{stage: {ASKED: 0, HITS: 0, FAILURES: 0} for stage in cached},
            **{stage: {ASKED: 0, FAILURES: 0} for stage in uncached},
        }

    def add(self, stage: str, *, asked: int = 0, hits: int = 0, failures: int = 0, left_out: int = 0) -> None:
        """Adds to the counts of a stage."""
        with self._lock:
            counts = self._counts[stage]
            counts[ASKED] += asked
            counts[FAILURES] += failures
            if hits:
                counts[HITS] += hits
            if left_out:
                counts[LEFT_OUT] = counts.get(LEFT_OUT, 0) + left_out

    def __call__(self) -> dict[str, dict[str, int]]:
        """All counts so far."""
        with self._lock:
            return {stage: dict(counts) for stage, counts in self._counts.items()}


def added(*parts: Counts) -> dict[str, dict[str, int]]:
    """The sums of several counts."""
    sums: dict[str, collections.Counter[str]] = {}
    for part in parts:
        for stage, counts in part.items():
            sums.setdefault(stage, collections.Counter()).update(counts)
    return {stage: dict(counts) for stage, counts in sums.items()}


def difference(after: Counts, before: Counts) -> dict[str, dict[str, int]]:
    """The counts after, less those before."""
    return {
        stage: {name: value - before.get(stage, {}).get(name, 0) for name, value in counts.items()}
        for stage, counts in after.items()
    }
