"""How long a caller waits: said once, and known to whatever works for it, on other threads and event loops, too.

So a search has one time limit, that of the rollout: a client of a server gives up within it, and says why, before the rollout
has given up on the client.
"""

from __future__ import annotations

import contextlib
import contextvars
import time
from collections.abc import Iterator

USUAL = 60.0  # seconds, where nobody has said

_ends: contextvars.ContextVar[float | None] = contextvars.ContextVar("ends", default=None)


@contextlib.contextmanager
def patience(seconds: float) -> Iterator[None]:
    """What is done in here is waited for so long, or as long as it was outside of here, where that ends sooner."""
    outer, ends = _ends.get(), time.monotonic() + seconds
    token = _ends.set(ends if outer is None else min(ends, outer))
    try:
        yield
    finally:
        _ends.reset(token)


def seconds_left(most: float | None = None) -> float:
    """Seconds until the caller gives up, at most `most`, and not negative; `most`, or else `USUAL`, where nobody has said."""
    ends = _ends.get()
    if ends is None:
        return USUAL if most is None else most
    left = max(0.0, ends - time.monotonic())
    return left if most is None else min(left, most)
