"""A lock that admits one process at a time to a directory, on shared file systems too.

The lock is the file DIR/.lock. The holder has it locked with `flock`, which ends with its process, and rewrites a record in it
every few seconds. Some file systems ignore `flock`, or limit it to one machine; there the record shows whether the holder is
alive. For a directory that mirrors a bucket (parallel/mirrors.py) the record is an object of the bucket.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
import pathlib
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from absl import logging

from routerl_jax.core import buckets, stopping
from routerl_jax.core.files import parse_json
from routerl_jax.parallel import multihost

_BEAT = 10.0  # seconds between two updates of the record
_SILENCE = 150.0  # seconds without an update after which a holder counts as dead; gcsfuse shows files up to 60 s late
_SETTLE = 2.0  # seconds in which others may claim the lock at the same time, if flock has no effect
_ATTEMPTS = 5  # at taking the lock, if its file is removed meanwhile


@contextlib.contextmanager
def directory_lock(directory: pathlib.Path) -> Iterator[None]:
    """Keeps every other process out of `directory` (made if missing) until the block ends.

    A lock left by a killed process is taken over, with a warning. If that process ran on this machine, this happens at once; if
    it ran elsewhere, after its record has not changed for two and a half minutes.

    Raises:
      ValueError: another process holds the lock (names its host and process id), or has taken it over since.
    """
    lock = _Lock(directory)
    try:
        yield
    except KeyboardInterrupt:
        if lock.successor is None:
            raise
        raise ValueError(
            f"{directory} was taken over by {_holder_name(lock.successor)}, as this process showed no sign of life for "
            f"{_SILENCE:.0f} s or its .lock was removed; this one stops here, and {directory} is the other's"
        ) from None
    finally:
        lock.release()


@contextlib.contextmanager
def job_directory_lock(directory: pathlib.Path) -> Iterator[None]:
    """`directory_lock` for a job of several processes. The main one holds the lock; a refusal is raised on all.

    A collective call.
    """
    with contextlib.ExitStack() as stack:
        multihost.on_main(lambda: stack.enter_context(directory_lock(directory)))
        yield


class _Lock:
    """The lock, held from construction to `release`. `successor`: the record of a process that has taken it over meanwhile."""

    def __init__(self, directory: pathlib.Path) -> None:
        self._directory = directory
        self._created_directory = not directory.exists()
        directory.mkdir(parents=True, exist_ok=True)
        self.successor: dict[str, Any] | None = None
        self._record = {
            "host": socket.gethostname(),
            "boot": _boot(),
            "process": os.getpid(),
            "since": _now(),
            "token": uuid.uuid4().hex,
        }
        url = buckets.url_of(directory)
        in_bucket = buckets.in_bucket(url)
        for _ in range(_ATTEMPTS):
            self._holder_record = ObjectRecord(f"{url}/.lock") if in_bucket else FileRecord(directory / ".lock")
            try:
                if self._acquire():
                    break
            except BaseException:
                self._holder_record.close()
                raise
            self._holder_record.close()
        else:
            raise ValueError(
                f"{self._holder_record.location} comes and goes: several processes want {directory}; start one of them"
            )
        self._ended = threading.Event()
        self._heart = threading.Thread(target=self._heartbeat, name=f"lock of {directory}", daemon=True)
        self._heart.start()

    def release(self) -> None:
        """Releases the lock. Removes the directory if it was made for the lock and is still empty."""
        self._ended.set()
        self._heart.join()
        with contextlib.suppress(OSError, ValueError):
            if self.successor is None and self._holder_record.is_there():
                self._holder_record.remove()
            if self._created_directory:
                self._directory.rmdir()  # fails if there is anything in it
        self._holder_record.close()

    def _acquire(self) -> bool:
        """True if this process has the lock now; False if the previous holder removed its file."""
        if not self._holder_record.claim():
            raise ValueError(self._refusal(self._holder_record.read()))
        if not self._holder_record.is_there():
            return False
        previous = self._holder_record.read()
        if previous is not None:
            if not self._holder_record.ended(previous, self._record) and not self._is_silent(previous):
                return False
            logging.warning(
                "%s was in use by %s, which ended without giving it back (last seen %s): it is taken over",
                *(self._directory, _holder_name(previous), previous.get("seen")),
            )
        self._write()
        if not self._holder_record.excludes():
            time.sleep(_SETTLE)
            record = self._holder_record.read()
            if record is not None and record.get("token") != self._record["token"]:
                raise ValueError(self._refusal(record))
        return True

    def _is_silent(self, previous: dict[str, Any]) -> bool:
        """Watches the record of another process: True if it does not change, False if it is removed.

        Raises:
          ValueError: the record changes, so that process is alive.
        """
        logging.warning(
            "%s: %s was in it, last seen %s; waiting for %.0f s, whether it is alive",
            *(self._directory, _holder_name(previous), previous.get("seen"), _SILENCE),
        )
        end = time.monotonic() + _SILENCE
        while time.monotonic() < end:
            time.sleep(_BEAT / 5)
            record = self._holder_record.read()
            if record is None:
                return False
            if record != previous:
                raise ValueError(self._refusal(record))
        return True

    def _heartbeat(self) -> None:
        warned = False
        while not self._ended.wait(_BEAT):
            try:
                record = self._holder_record.read()
                if record is not None and record.get("token") != self._record["token"]:
                    self.successor = record
                    buckets.forget(self._directory)  # its files are no longer uploaded
                    stopping.interrupt_main()
                    return
                self._write()
            except (OSError, ValueError) as error:
                if not warned:
                    logging.warning(
                        "%s can't be written (%s): others may take this process for dead",
                        self._holder_record.location,
                        error,
                    )
                warned = True

    def _write(self) -> None:
        self._holder_record.write({**self._record, "seen": _now()})

    def _refusal(self, holder: dict[str, Any] | None) -> str:
        if holder is None:
            return f"{self._directory} is in use by another process; wait for it, or give another directory"
        return (
            f"{self._directory} is in use by {_holder_name(holder)} since {holder.get('since')} "
            f"(last seen {holder.get('seen')}); wait for it, stop it "
            f"(kill {holder.get('process')}, on that host), or give another directory"
        )


def _holder_name(record: dict[str, Any]) -> str:
    return f"process {record.get('process')} on {record.get('host')}"


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(sep=" ", timespec="milliseconds").replace("+00:00", " UTC")


def _boot() -> str:
    """An id of this boot of the machine, which distinguishes it from others of the same name; "" if the system has none."""
    try:
        return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


_SIZE = 512  # bytes of a record in a file, fixed so that a new one overwrites the old one


class FileRecord:
    """The record of a lock's holder in a file, opened by a process that wants the lock. The holder has the file locked with
    `flock`, which ends with the process; some file systems ignore it.

    Attributes:
      location: path of the record, for messages.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self.location, self._path = str(path), path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)

    def claim(self) -> bool:
        """False if another process certainly holds the lock."""
        return _flock(self._file)

    def excludes(self) -> bool:
        """Whether `claim` keeps others out, so that the lock is ours already: a second `flock` on the file is refused."""
        file = os.open(self._path, os.O_RDWR)
        try:
            return not _flock(file)
        finally:
            os.close(file)

    def ended(self, holder: Mapping[str, Any], ours: Mapping[str, Any]) -> bool:
        """Whether the process that left a record has certainly ended, once `claim` was granted."""
        return self.excludes() and _same_boot(holder, ours)

    def read(self) -> dict[str, Any] | None:
        """The record; None if there is none."""
        with contextlib.suppress(OSError):
            return _parsed(self._path.read_bytes())
        return None

    def write(self, record: Mapping[str, Any]) -> None:
        """Overwrites the record. Raises OSError; for an object in a bucket, ValueError."""
        os.pwrite(self._file, json.dumps(record).ljust(_SIZE - 1).encode() + b"\n", 0)
        os.fsync(self._file)

    def is_there(self) -> bool:
        """Whether the opened record is still the one that other processes would open."""
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._file))
        except FileNotFoundError:
            return False

    def remove(self) -> None:
        """Removes the record."""
        self._path.unlink()

    def close(self) -> None:
        """Gives up the claim."""
        os.close(self._file)


class ObjectRecord:
    """A record as `FileRecord`, in an object of a bucket. Buckets have no locks: the record alone shows whether its holder is
    alive."""

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
        record = parse_json(content)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _same_boot(holder: Mapping[str, Any], ours: Mapping[str, Any]) -> bool:
    return all(holder.get(key) == ours[key] for key in ("host", "boot"))


def _is_alive(process: Any) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, TypeError):  # another user's, or no number
        pass
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
