"""Records of a directory lock's holder, each in a file or in an object of a bucket."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any, Protocol

from routerl_jax.core import buckets

_SIZE = 512  # bytes of a record in a file, fixed so that a new one overwrites the old one


class Record(Protocol):
    """The record of a lock's holder, opened by a process that wants the lock.

    Attributes:
      location: path or URL of the record, for messages.
    """

    location: str

    def claim(self) -> bool:
        """False if another process certainly holds the lock."""
        ...

    def excludes(self) -> bool:
        """Whether `claim` keeps others out, so that the lock is ours already."""
        ...

    def ended(self, holder: Mapping[str, Any], ours: Mapping[str, Any]) -> bool:
        """Whether the process that left a record has certainly ended, once `claim` was granted."""
        ...

    def read(self) -> dict[str, Any] | None:
        """The record; None if there is none."""
        ...

    def write(self, record: Mapping[str, Any]) -> None:
        """Overwrites the record. Raises OSError or ValueError."""
        ...

    def is_there(self) -> bool:
        """Whether the opened record is still the one that other processes would open."""
        ...

    def remove(self) -> None:
        """Removes the record."""
        ...

    def close(self) -> None:
        """Gives up the claim."""
        ...


class FileRecord:
    """A record in a file, which its holder has locked with `flock`. That ends with the process; some file systems ignore it."""

    def __init__(self, path: pathlib.Path) -> None:
        self.location, self._path = str(path), path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)

    def claim(self) -> bool:
        return _flock(self._file)

    def excludes(self) -> bool:
        """Whether flock has an effect here: a second lock on a locked file is refused."""
        file = os.open(self._path, os.O_RDWR)
        try:
            return not _flock(file)
        finally:
            os.close(file)

    def ended(self, holder: Mapping[str, Any], ours: Mapping[str, Any]) -> bool:
        return self.excludes() and _same_boot(holder, ours)

    def read(self) -> dict[str, Any] | None:
        with contextlib.suppress(OSError):
            return _parsed(self._path.read_bytes())
        return None

    def write(self, record: Mapping[str, Any]) -> None:
        os.pwrite(self._file, json.dumps(record).ljust(_SIZE - 1).encode() + b"\n", 0)
        os.fsync(self._file)

    def is_there(self) -> bool:
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._file))
        except FileNotFoundError:
            return False

    def remove(self) -> None:
        self._path.unlink()

    def close(self) -> None:
        os.close(self._file)


class ObjectRecord:
    """A record in an object of a bucket. Buckets have no locks: the record alone shows whether its holder is alive."""

    def __init__(self, location: str) -> None:
        self.location = location

    def claim(self) -> bool:
        return True

    def excludes(self) -> bool:
        return False

    def ended(self, holder: Mapping[str, Any], ours: Mapping[str, Any]) -> bool:
        return _same_boot(holder, ours) and not _is_alive(holder.get("process"))

    def read(self) -> dict[str, Any] | None:
        content = buckets.read_object(self.location)
        return None if content is None else _parsed(content)

    def write(self, record: Mapping[str, Any]) -> None:
        buckets.write_object(self.location, json.dumps(record).encode())

    def is_there(self) -> bool:
        return True

    def remove(self) -> None:
        buckets.remove(self.location)

    def close(self) -> None:
        pass


def _parsed(content: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(content)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _same_boot(holder: Mapping[str, Any], ours: Mapping[str, Any]) -> bool:
    return all(holder.get(key) == ours[key] for key in ("host", "boot"))


def _is_alive(process: Any) -> bool:
    if not isinstance(process, int):
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _flock(file: int) -> bool:
    """False if another process holds the lock; True also if the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
