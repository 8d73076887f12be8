"""The time limit of a caller. It is set once, and all code that works for the caller can read it, also on other threads.

So all steps of a search share the time limit of the rollout. A client of a server gives up before that limit and says why,
before the rollout gives up on the client.
"""

from __future__ import annotations

import contextlib
import contextvars
import time
from collections.abc import Iterator

DEFAULT_SECONDS = 60.0  # seconds, where no limit is set

_ends: contextvars.ContextVar[float | None] = contextvars.ContextVar("ends", default=None)


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Sets the time limit of its block to `seconds`, or leaves the outer limit if that ends sooner."""
    outer, ends = _ends.get(), time.monotonic() + seconds
    token = _ends.set(ends if outer is None else min(ends, outer))
    try:
        yield
    finally:
        _ends.reset(token)


def seconds_left(most: float | None = None) -> float:
    """Seconds until the caller gives up: at least 0, at most `most`. Without a limit: `most`, or `DEFAULT_SECONDS` if that is
    None."""
    ends = _ends.get()
    if ends is None:
        return DEFAULT_SECONDS if most is None else most
    seconds = max(0.0, ends - time.monotonic())
    return seconds if most is None else min(seconds, most)
