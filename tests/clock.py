"""A clock that tests turn, in place of the machine's: no test compares wall-clock times."""

from __future__ import annotations

import asyncio
import threading
import types
from typing import Any

import pytest


class Clock:
    """Stands in for `time`, and for `asyncio.sleep`, in given modules. Sleeping turns it, and is remembered in `slept`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *modules: types.ModuleType) -> None:
        self.now, self.slept = 1000.0, []
        self._lock = threading.Lock()
        for module in modules:
            for name, stand_in in (("time", self._time()), ("asyncio", _Asyncio(self))):
                if hasattr(module, name):
                    monkeypatch.setattr(module, name, stand_in)

    def sleep(self, seconds: float) -> None:
        """Turns the clock."""
        with self._lock:
            self.slept.append(seconds)
            self.now += seconds

    def _time(self) -> types.SimpleNamespace:
        def read() -> float:
            return self.now

        return types.SimpleNamespace(time=read, monotonic=read, perf_counter=read, sleep=self.sleep)


class _Asyncio:
    """The module, but for `sleep`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, seconds: float) -> None:
        self._clock.sleep(seconds)
        await asyncio.sleep(0)
