"""Measures the time that parts of a run take."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping

import jax

from routerl_jax.core.progress import waiting

PART = "part"  # marks what is a part of a step in a trace


class Clock:
    """Adds up seconds by name. The bar that is shown names what is under way, and a profile has the same names."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def add(self, seconds: Mapping[str, float]) -> None:
        """Adds seconds that were measured elsewhere."""
        for name, value in seconds.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + value

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            with waiting(name.replace("_", " ")), jax.profiler.TraceAnnotation(name, **{PART: 1}):
                yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started
