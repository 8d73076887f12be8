"""Measurements of a build: seconds per stage, bytes on disk and in memory."""

from __future__ import annotations

import pathlib
import resource
import sys
import time


class Clock:
    """Seconds per stage."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, stage: str) -> None:
        """Ends a stage, which began at the end of the last one."""
        now = time.perf_counter()
        self.laps[stage], self._last = now - self._last, now


def size_on_disk(directory: pathlib.Path) -> int:
    """Bytes of all files below a directory."""
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


def peak_rss() -> int:
    """Peak resident memory of this process, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
