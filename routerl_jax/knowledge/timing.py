"""How long a query takes, whatever shares its batch: the knowledge base's own measure, else its part of the batch's time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from routerl_jax.core.types import Passage, Query


class TimedResults(list[list[Passage]]):
    """The results of a search, each with the time that it took: what `search` returns where a tool measures that itself.

    Args:
      results: for each query its passages.
      seconds: of each query alone, as many, neither negative nor infinite.

    Raises:
      ValueError: `seconds` are something else.
    """

    def __init__(self, results: Iterable[list[Passage]], seconds: Iterable[float]) -> None:
        super().__init__(results)
        self.seconds = [float(value) for value in seconds]
        if len(self.seconds) != len(self):
            raise ValueError(f"{len(self.seconds)} times for {len(self)} results; give the seconds of each query")
        if wrong := [value for value in self.seconds if not (value >= 0 and math.isfinite(value))]:
            raise ValueError(f"a query that took {wrong[0]} s; give seconds that are not negative and not infinite")


def timed_search(search: Callable[[Any, int], Any], queries: Sequence[Query], k: int) -> tuple[Any, list[float]]:
    """What `search(queries, k)` gives, unchecked, and the seconds of each query.

    They are the reply's own where it is `TimedResults`; else the time of the call in equal parts.
    """
    started = time.perf_counter()
    reply = search(queries, k)
    elapsed = time.perf_counter() - started
    if isinstance(reply, TimedResults) and len(reply.seconds) == len(queries):
        return reply, list(reply.seconds)
    return reply, [elapsed / max(len(queries), 1)] * len(queries)
