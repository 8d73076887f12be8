"""A circuit breaker: after many failures in a row, a server gets no requests for a while, and then a single trial request."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

State = Literal["closed", "open", "half_open"]


class CircuitBreaker:
    """Closed: requests pass. Open: no request passes for `cool_down` seconds. Half open: one request passes as a trial.

    Each failed trial doubles the time until the next one, up to `longest`. Not thread-safe: one event loop uses it.

    Args:
      threshold: number of failures in a row that open it.
      clock: returns seconds; for tests.
    """

    def __init__(
        self,
        *,
        threshold: int = 5,
        cool_down: float = 2.0,
        longest: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if threshold < 1 or not 0 < cool_down <= longest:
            raise ValueError(
                f"threshold={threshold} must be at least 1, and 0 < cool_down={cool_down} <= longest={longest}"
            )
        self._threshold, self._cool_down, self._longest, self._clock = threshold, cool_down, longest, clock
        self._failures = 0
        self._pause = cool_down
        self._until: float | None = None  # open until this time; None: closed
        self._trial = False

    @property
    def state(self) -> State:
        """The present state."""
        if self._until is None:
            return "closed"
        return "half_open" if self._clock() >= self._until else "open"

    @property
    def wait(self) -> float:
        """Seconds until a request may pass; 0 if no waiting time is left."""
        return 0.0 if self._until is None else max(0.0, self._until - self._clock())

    @property
    def passes(self) -> bool:
        """Whether a request may pass now. Call `begin` when it is sent."""
        return self.state == "closed" or (self.state == "half_open" and not self._trial)

    def begin(self) -> None:
        """Reports that a request is sent."""
        if self.state == "half_open":
            self._trial = True

    def succeeded(self) -> None:
        """Reports that the request was answered. Closes the breaker."""
        self._failures, self._pause, self._until, self._trial = 0, self._cool_down, None, False

    def failed(self) -> None:
        """Reports that the request failed."""
        if self._trial:
            self._pause = min(2 * self._pause, self._longest)
        self._failures += 1
        if self._trial or self._failures >= self._threshold:
            self._until = self._clock() + self._pause
        self._trial = False

    def dropped(self) -> None:
        """Reports that the request was cancelled before its outcome was known."""
        self._trial = False
