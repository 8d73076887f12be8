"""The time of a single query in a batch: the knowledge base's own measurement, or else an equal share of the batch's time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from routerl_jax.core.types import Passage, Query, Walk


class TimedResults(list[list[Passage]]):
    """The results of a search with the time of each query. `search` returns this if the tool measures times itself.

    Args:
      results: the passages of each query.
      seconds: the seconds of each query alone; finite and not negative.
      walks: each query's walk over a graph; () if nothing is known of walks.

    Raises:
      ValueError: `seconds` or `walks` has another length, or `seconds` other values.
    """

    def __init__(self, results: Iterable[list[Passage]], seconds: Iterable[float], walks: Iterable[Walk] = ()) -> None:
        super().__init__(results)
        self.walks = list(walks) or [Walk()] * len(self)
        if len(self.walks) != len(self):
            raise ValueError(f"walks of {len(self.walks)} queries for {len(self)} results")
        self.seconds = [float(value) for value in seconds]
        if len(self.seconds) != len(self):
            raise ValueError(f"{len(self.seconds)} times for {len(self)} results; give the seconds of each query")
        if wrong := [value for value in self.seconds if not (value >= 0 and math.isfinite(value))]:
            raise ValueError(f"a query that took {wrong[0]} s; give seconds that are not negative and not infinite")


def timed_search(search: Callable[[Any, int], Any], queries: Sequence[Query], k: int) -> tuple[Any, list[float]]:
    """The result of `search(queries, k)`, unchecked, and the seconds of each query.

    The seconds are those of the reply if it is `TimedResults`; else the time of the call in equal shares.
    """
    started = time.perf_counter()
    reply = search(queries, k)
    elapsed = time.perf_counter() - started
    if isinstance(reply, TimedResults) and len(reply.seconds) == len(queries):
        return reply, list(reply.seconds)
    return reply, [elapsed / max(len(queries), 1)] * len(queries)
