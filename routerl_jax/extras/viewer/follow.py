"""Fills the index from the files of the runs, and follows the files as they grow."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import orjson
from absl import logging

from routerl_jax.extras.viewer.index import Index, Location, Summary, summarise
from routerl_jax.extras.viewer.runs import Run, controls_of

_BATCH = 256  # records that are added at a time
_PAUSE = 1.0  # seconds between two looks at the files


@dataclasses.dataclass
class _File:
    """How far a file was read, in bytes and lines, and its inode and time of change then."""

    inode: int
    changed: int
    offset: int = 0
    lines: int = 0


class Follower:
    """A thread that reads the files of the runs, and looks every second for new records.

    A file that has grown is read from where it ended; an incomplete last line is left for later. A file that was replaced is
    read again from its beginning. Controls that a run begins meanwhile are added to `runs`.

    Attributes:
      skipped: for each file, the number of its lines that are no episode records.
      settled: whether the first look at all files is done.
    """

    def __init__(self, runs: list[Run], index: Index) -> None:
        self._runs, self._index = runs, index
        self._files: dict[pathlib.Path, _File] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="viewer index", daemon=True)
        self.skipped: dict[str, int] = {}
        self.settled = False

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread, after the batch that it is at."""
        self._ended.set()
        self._thread.join()

    def look(self) -> None:
        """One look at all files of all runs."""
        seen: set[pathlib.Path] = set()
        known_paths = {run.path for run in self._runs}
        self._runs += [new for run in list(self._runs) for new in controls_of(run) if new.path not in known_paths]
        for number, run in enumerate(self._runs):
            for path, source in run.record_files():
                if self._ended.is_set():
                    return
                seen.add(path)
                try:
                    self._read(number, run, path, source)
                except OSError as error:  # it may be back at the next look
                    logging.warning("%s: %s", path, error)
        for path in self._files.keys() - seen:
            del self._files[path]
            self._index.forget(path)
        self.settled = True

    def _follow(self) -> None:
        while not self._ended.is_set():
            try:
                self.look()
            except Exception:  # the page goes on with the current index
                logging.exception("the index could not be brought up to date; next try in %g s", _PAUSE)
            self._ended.wait(_PAUSE)

    def _read(self, number: int, run: Run, path: pathlib.Path, source: str) -> None:
        status = os.stat(path)
        progress = self._files.get(path)
        if progress is not None and (progress.inode != status.st_ino or status.st_size < progress.offset):
            self._index.forget(path)
            progress = None
        if progress is None:
            progress = self._files[path] = _File(status.st_ino, 0)
            self.skipped.pop(str(path), None)
        if progress.changed == status.st_mtime_ns and progress.offset == status.st_size:
            return
        progress.changed = status.st_mtime_ns
        batch: list[tuple[Location, Summary, str | None]] = []
        with path.open("rb") as file:
            for line, offset, content in _whole_lines(file, progress):
                record = _record(content)
                try:
                    summary = summarise(record, run.normalizer)
                    location = Location(number, source, path, line, offset, len(content))
                    batch.append((location, summary, record["prediction"]))
                except (KeyError, TypeError, AttributeError, ValueError):
                    self.skipped[str(path)] = self.skipped.get(str(path), 0) + 1
                if len(batch) == _BATCH:
                    self._index.add(batch)
                    batch = []
                    if self._ended.is_set():
                        return
                    time.sleep(0)  # let requests in
        if batch:
            self._index.add(batch)


def _whole_lines(file: Any, progress: _File) -> Iterator[tuple[int, int, bytes]]:
    """(number from 0, first byte, content) of each line from where the file was read to. Advances `progress`."""
    file.seek(progress.offset)
    for content in file:
        if not content.endswith(b"\n"):
            return
        line, offset = progress.lines, progress.offset
        progress.lines, progress.offset = line + 1, offset + len(content)
        if content.strip():
            yield line, offset, content


def _record(content: bytes) -> Any:
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError:  # it knows no NaN, which the numbers of a run that goes wrong may be
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(content)
        return None


def read_record(location: Location) -> dict[str, Any]:
    """The record at a location. Raises ValueError if it is no longer there."""
    try:
        with location.path.open("rb") as file:
            file.seek(location.offset)
            record = _record(file.read(location.size))
    except OSError as error:
        raise ValueError(f"{location.path}: can't be read ({error.strerror}); reload the page") from error
    if not isinstance(record, dict):
        raise ValueError(
            f"{location.path}, line {location.line + 1}: the record has changed meanwhile; reload the page"
        )
    return record
