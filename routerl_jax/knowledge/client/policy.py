"""Time limits and retries of a client, and its exceptions."""

from __future__ import annotations

import dataclasses
import random

from routerl_jax.core.config import NonNegative, Positive, Size, checked


class Unavailable(RuntimeError):
    """No replica answered. The message says what was tried, and has the last error."""


class RequestRefused(ValueError):
    """The server understood the request and refused it (4xx). Another attempt would not help."""


class Failed(Exception):
    """One attempt failed in a way that another may not.

    Attributes:
      retry_after: seconds for which the server asked for no requests; 0 if it did not.
      overload: the server works, but is overloaded.
    """

    def __init__(self, message: str, *, retry_after: float = 0.0, overload: bool = False) -> None:
        super().__init__(message)
        self.retry_after, self.overload = retry_after, overload


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class Timeouts:
    """Seconds: to connect, between two pieces of a reply, and for a whole call with all its attempts. A call never takes longer
    than its caller waits (core.time_limit)."""

    connect: Positive = 5.0
    read: Positive = 30.0
    total: Positive | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class Retries:
    """Attempts, and the pauses between them: uniform in [0, min(cap, base 2^n)] ("full jitter", AWS Architecture Blog 2015).

    Attributes:
      attempts: number of attempts, the first included.
      base, cap: seconds.
      seed: seed of the jitter, for tests.
    """

    attempts: Size = 5
    base: NonNegative = 0.1
    cap: NonNegative = 5.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.cap < self.base:
            raise ValueError(f"retries need base <= cap: {self}")

    def pause(self, failures: int, rng: random.Random) -> float:
        """Seconds to wait after this number of failures."""
        return rng.uniform(0, min(self.cap, self.base * 2 ** min(failures, 30)))
