"""What parts of a run take."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import jax

PART = "part"  # marks what is a part of a step in a trace


class Clock:
    """Adds up seconds by name; a profile shows them by these names, too."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            with jax.profiler.TraceAnnotation(name, **{PART: 1}):
                yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started
