"""Files that are replaced atomically, the cache's directory, and files from which a killed job continues."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, BinaryIO

from absl import logging

from routerl_jax.core.config import first_difference

# --- atomic files ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def atomic_file(path: pathlib.Path, *, sync: bool = False, shared: bool = False) -> Iterator[BinaryIO]:
    """Opens a new file that replaces `path` when the block ends. A reader sees the old or the new content, even if the writer
    is killed. After an error, `path` has not changed.

    Args:
      sync: wait until the new file is on disk before it replaces `path`.
      shared: other processes or threads may write the same file at the same time. The last one to finish wins.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    suffix = f".{os.getpid()}-{threading.get_ident()}" if shared else ""
    unfinished = path.with_name(f".{path.name}{suffix}.part")
    try:
        with unfinished.open("wb") as file:
            yield file
            if sync:
                file.flush()
                os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def write_atomic(path: pathlib.Path, content: str | bytes, *, sync: bool = False, shared: bool = False) -> None:
    """Writes a text (UTF-8) or bytes; see `atomic_file`."""
    with atomic_file(path, sync=sync, shared=shared) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def sync(path: pathlib.Path) -> None:
    """Waits until a file, or a directory's own entries, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(directory: pathlib.Path) -> None:
    """`sync` of a directory and of all that is in it."""
    for path in [directory, *directory.rglob("*")]:
        sync(path)


_MOST_DEPTH = 100  # levels of a JSON value: Python can neither print, copy nor write one of a thousand


def parse_json(content: str | bytes) -> Any:
    """The value of a JSON text that may come from anywhere.

    Raises:
      ValueError: it is not JSON, not UTF-8, holds a number of more than 4,300 digits, or is nested too deeply.
    """
    try:
        value = json.loads(content)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    check_depth(value)
    return value


def check_depth(value: Any) -> None:
    """Raises ValueError for a JSON value that is nested more than a hundred levels deep."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(_MOST_DEPTH):
        parts = (item.values() if isinstance(item, dict) else item for item in level)
        level = [part for items in parts for part in items if isinstance(part, dict | list)]
        if not level:
            return
    raise ValueError(f"it is nested too deeply (more than {_MOST_DEPTH} levels)")


def read_json(path: pathlib.Path, fix: str = "copy or download it again") -> Any:
    """The value in a JSON file.

    Raises:
      ValueError: the file is not JSON (as after a full disk); names the file and the `fix`.
    """
    try:
        return parse_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}). {fix[:1].upper()}{fix[1:]}") from error


def read_json_lines(path: pathlib.Path) -> Iterator[Any]:
    """The values in a file with one JSON value per line, from `write_json_lines` or a program that appends lines.

    An incomplete last line (its writer was killed, or is writing it) is left out, with a warning. `core.rows` reads the data
    files of other programs.

    Raises:
      ValueError: while reading: a line is not JSON; names file and line.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                value = parse_json(line)
            except ValueError as error:
                if not line.endswith(b"\n"):
                    logging.warning(
                        "%s, line %d is cut off (its writer was killed, or is writing it): left out", path, number
                    )
                    return
                raise ValueError(f"{path}, line {number}: not JSON ({error}); delete the line") from error
            yield value


def write_json_lines(path: pathlib.Path, rows: Iterable[Any]) -> None:
    """Writes one JSON value per line; see `atomic_file`."""
    with atomic_file(path) as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")


# --- the cache's directory ---------------------------------------------------------------------------------------------
# The directory for all that can be made or fetched again: weights, knowledge bases, replies, compiled programs.


def cache_directory() -> pathlib.Path:
    """$ROUTERL_CACHE, default ~/.cache/routerl_jax."""
    return pathlib.Path(os.environ.get("ROUTERL_CACHE") or pathlib.Path.home() / ".cache" / "routerl_jax")


# --- what a killed job continues from ----------------------------------------------------------------------------------


def check_same(settings: Mapping[str, Any], path: pathlib.Path, remedy: str) -> bool:
    """Writes the settings of a new job, or compares them with those of the job that is there. True if there was a job.

    Args:
      settings: JSON-serialisable.
      path: the file of the settings.
      remedy: what the user can do if the settings differ or the file is damaged, for the message.

    Raises:
      ValueError: the job at `path` has other settings (names the first key that differs), or the file is damaged.
    """
    saved = read_json(path, remedy) if path.is_file() else None
    current = json.loads(json.dumps(settings))
    if saved is None:
        write_atomic(path, json.dumps(current, indent=2) + "\n")
        return False
    differing = [key for key in {**current, **saved} if saved.get(key) != current.get(key)]
    if differing:
        key, before, now = first_difference(saved.get(differing[0]), current.get(differing[0]), differing[0])
        raise ValueError(f"{path} was made with other settings ({key} differs: {before!r}, now {now!r}); {remedy}")
    return True


class Journal:
    """A file of JSON records, one per finished piece of a job. A record is on disk when `append` returns.

    An incomplete last record (from a kill) is cut off when the file is opened again.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b")
        self._file.seek(0)
        self._file.truncate(sum(len(line) for line in self._file if line.endswith(b"\n")))

    def append(self, record: Mapping[str, Any]) -> None:
        """Adds a record."""
        self._file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def read(self) -> Iterator[dict[str, Any]]:
        """All records. Raises ValueError that names a line that is no JSON."""
        return read_json_lines(self.path)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
