"""The progress of a job: bars in terminals and notebooks, plain lines elsewhere, nothing with `--quiet`.

Every progress bar is a `Bar`. It also shows what the job waits for (`waiting`), and for how long. While a bar is shown in a
terminal, other output, such as warnings, is written above it.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

from absl import logging
from tqdm.auto import tqdm

LINE_SECONDS = 10.0  # least seconds between two lines of a bar that is shown as lines
SILENT_SECONDS = 60.0  # seconds without a line after which such a bar says what it waits for
_PULSE = 1.0  # seconds between two updates of a bar that does not move
_SHOW_WAITING = 2.0  # seconds of waiting from which on they are shown
_IN_NOTEBOOK = any(cls.__module__ == "tqdm.notebook" for cls in tqdm.__mro__)

_quiet = False
# The bars that are shown, oldest first. The references are weak, so that a bar that nobody holds closes itself.
_open: list[weakref.ref[Bar]] = []
_beside = contextlib.ExitStack()  # closed with the last bar: ends the thread and the streams that its bars need
_waiting: list[_Wait] = []  # innermost last
_compiling: _Wait | None = None
_lock = tqdm.get_lock()  # tqdm's own lock, as with a second one threads could wait for each other


class _Wait:
    def __init__(self, label: str) -> None:
        self.label, self.since = label, time.monotonic()


def be_quiet(quiet: bool = True) -> None:
    """Switches bars and notes off, or on again. Results and warnings are always shown."""
    global _quiet
    _quiet = quiet


def note(text: str) -> None:
    """Prints a line about the progress of a job, above the bars."""
    if not _quiet:
        print(text)


@contextlib.contextmanager
def waiting(label: str) -> Iterator[None]:
    """A context in which the bar shows what the job waits for: "rollout", "tools", "judge", ... The innermost is shown."""
    wait = _Wait(label)
    with _lock:
        _waiting.append(wait)
    try:
        yield
    finally:
        with _lock:
            _waiting[:] = [entry for entry in _waiting if entry is not wait]
        compiling(False)  # should it have failed


def compiling(now: bool) -> None:
    """Sets whether the bar shows that a program is being compiled."""
    global _compiling
    _compiling = _Wait("compiling") if now else None


class Bar(tqdm):
    """A `tqdm` bar; where standard error is no terminal, a line every `LINE_SECONDS` and one at the end."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        stream = options.get("file") or sys.stderr
        stream = stream.stream if isinstance(stream, _Above) else stream
        self._in_lines = not _IN_NOTEBOOK and not stream.isatty()
        self._last_count, self._last_time = -1, -math.inf
        disabled = bool(options.get("disable")) or _quiet
        width = {"dynamic_ncols": True} if self.in_terminal else {}
        # leave=None: the outermost is left when it ends, those within it are not
        super().__init__(*arguments, **{"leave": None, **width, **options, "file": stream, "disable": disabled})
        if not self.disable:
            _begin(self)

    def display(self, msg: str | None = None, pos: int | None = None, **options: Any) -> Any:
        """Draws the bar, or writes its line."""
        if not self._in_lines:
            return super().display(msg, pos, **options)
        if msg == "":  # to take the bar away
            return False
        self._last_count, self._last_time = self.n, time.monotonic()
        parts = self.format_dict
        pace = "{n_fmt}{unit}" if self.total is None else "{n_fmt}/{total_fmt}"
        remaining = "" if self.total is None else "<{remaining}"
        line = f"{{desc}}: {pace} [{{elapsed}}{remaining}, {{rate_fmt}}{{postfix}}]"
        self.fp.write(f"{self.format_meter(**{**parts, 'bar_format': line})}\n")
        self.fp.flush()
        return True

    def refresh(self, *arguments: Any, **options: Any) -> Any:
        """Draws the bar anew; a line only if it is time for one."""
        if self._in_lines and time.monotonic() - self._last_time < LINE_SECONDS:
            return None
        return super().refresh(*arguments, **options)

    def clear(self, *arguments: Any, **options: Any) -> None:
        """Takes the bar away for a moment; lines stay."""
        if not self._in_lines:
            super().clear(*arguments, **options)

    def close(self) -> None:
        """Ends the bar. Its last state stays visible if `leave` says so."""
        if self.disable:
            return super().close()
        _end(self)
        if self._in_lines:
            was_shown = self._last_count >= 0 or not self.delay
            if self.leave is not False and was_shown and self.n != self._last_count:
                self.display()
            self.leave = False  # the parent has no line to end
        return super().close()

    @property
    def format_dict(self) -> dict[str, Any]:
        """The parts of the drawn bar; its description says what the job waits for."""
        drawn = dict(super().format_dict)
        last = any(bar() is self for bar in _open[-1:])
        if wait := last and (_compiling or next(iter(_waiting[-1:]), None)):
            seconds = time.monotonic() - wait.since
            for_long = f" {seconds:.0f} s" if seconds >= _SHOW_WAITING else ""
            drawn["prefix"] = f"{(self.desc or '').removesuffix(': ')} ({wait.label}{for_long})".lstrip()
        return drawn

    @property
    def in_terminal(self) -> bool:
        """Whether it is drawn in a terminal."""
        return not self._in_lines and not _IN_NOTEBOOK

    def pulse(self) -> None:
        """Updates a bar that has not moved; if it is shown as lines, only after `SILENT_SECONDS`."""
        if self.in_terminal or (self._in_lines and time.monotonic() - self._last_time >= SILENT_SECONDS):
            self.refresh()


# --- the thread beside the bars ----------------------------------------------------------------------------------------


def _begin(bar: Bar) -> None:
    """Shows a bar. With the first one begin a thread that updates bars, and streams that write above them."""
    with _lock:
        _open.append(weakref.ref(bar))
        if len(_open) > 1:
            return
        if bar.in_terminal:
            for name in ("stdout", "stderr"):
                if getattr(sys, name).isatty():
                    _beside.enter_context(_above_bars(name, bar.fp))
        stopped = threading.Event()
        threading.Thread(target=_pulse, args=(stopped,), name="progress", daemon=True).start()
        _beside.callback(stopped.set)


def _end(bar: Bar) -> None:
    with _lock:
        _open[:] = [reference for reference in _open if reference() is not None and reference() is not bar]
        if not _open:
            _beside.close()


def _pulse(stopped: threading.Event) -> None:
    while not stopped.wait(_PULSE):
        last = _open[-1:]
        if last and (bar := last[0]()) is not None:
            with contextlib.suppress(ValueError):  # its stream was closed meanwhile
                bar.pulse()
        bar = None  # a bar that is forgotten lives no longer for this


class _Above:
    """A stream that writes its lines above the bars. It buffers an incomplete line."""

    def __init__(self, stream: Any, bars: Any) -> None:
        self.stream, self._bars, self._piece = stream, bars, ""

    def write(self, text: str) -> int:
        with _lock:
            lines, end, piece = text.rpartition("\n")
            if end:
                self._put(f"{self._piece}{lines}\n")
                self._piece = ""
            self._piece += piece
        return len(text)

    def _put(self, text: str) -> None:
        with tqdm.external_write_mode(file=self._bars):
            self.stream.write(text)
            self.stream.flush()

    def finish(self) -> None:
        """Writes what waits."""
        if self._piece:
            self._put(f"{self._piece}\n")
            self._piece = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextlib.contextmanager
def _above_bars(name: str, bars: Any) -> Iterator[None]:
    """Shows all output to a standard stream above the bars. absl's handler keeps the stream, so it is redirected too."""
    stream = getattr(sys, name)
    above = _Above(stream, bars)
    handler = logging.get_absl_handler().python_handler
    is_absl_stream = handler.stream is stream
    setattr(sys, name, above)
    if is_absl_stream:
        handler.stream = above
    try:
        yield
    finally:
        above.finish()
        if getattr(sys, name) is above:
            setattr(sys, name, stream)
        if is_absl_stream:
            handler.stream = stream
