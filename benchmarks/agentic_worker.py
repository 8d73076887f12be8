"""One side of `benchmarks.agentic` in its own process, which waits between its turns. It may run another Python.

A worker imports, prepares, and then does its work once for every line on its standard input. Its answers are lines that begin
with a mark, because libraries print lines of their own.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_MARK = "@agentic "
_STATUS, _CLEAR = pathlib.Path("/proc/self/status"), pathlib.Path("/proc/self/clear_refs")

Prepared = Callable[[], Mapping[str, Any]]  # does the work once, and may return numbers


def serve(parts: Mapping[str, Callable[[argparse.Namespace], Prepared]]) -> None:
    """The worker's main program. Each of `parts` prepares one kind of work; its function is called once per input line.

    An answer has `seconds`, what the function returns, and `gib`: the most resident memory during the work beyond that of the
    imports.
    """
    parser = argparse.ArgumentParser()
    for name in ("part", "weights", "size"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("groups", "samples", "longest", "checkpointing"):
        parser.add_argument(f"--{name}", type=int, required=True)
    arguments = parser.parse_args()
    imported = _resident("VmRSS")
    run = parts[arguments.part](arguments)
    _say({})
    for _ in sys.stdin:
        _forget_peak()
        started = time.perf_counter()
        numbers = dict(run())
        seconds = numbers.pop("seconds", time.perf_counter() - started)
        _say({"seconds": seconds, "gib": (_resident("VmHWM") - imported) / 2**30, **numbers})


def _say(answer: Mapping[str, Any]) -> None:
    print(f"\n{_MARK}{json.dumps(answer)}", flush=True)


def _resident(kind: str) -> int:
    """Bytes of resident memory, now (VmRSS) or at most (VmHWM); 0 where the kernel does not say."""
    if not _STATUS.exists():
        return 0
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(kind))
    return 1024 * int(line.split()[1])


def _forget_peak() -> None:
    if _CLEAR.exists():
        _CLEAR.write_text("5")


class Failed(RuntimeError):
    """A side could not do its work; the message has the last lines that it printed."""


class Worker:
    """A side's process, as the benchmark sees it."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: pathlib.Path) -> None:
        self._log = log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=dict(environment)
            )

    def ready(self) -> None:
        """Waits until it is prepared. Raises Failed."""
        self._answer()

    def run(self) -> dict[str, Any]:
        """Lets it do the work once; its answer. Raises Failed."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._failed() from error
        return self._answer()

    def end(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(_MARK):
                return json.loads(line.removeprefix(_MARK))
        raise self._failed()

    def _failed(self) -> Failed:
        status = self._process.wait()
        ended = f"exit status {status}" if status >= 0 else f"killed by signal {-status}; 9 is mostly a lack of memory"
        last = [line for line in self._log.read_text().splitlines() if line.strip()][-3:]
        return Failed(" | ".join([ended, " | ".join(last)[-500:]]))
