"""A lock that admits one process at a time to a directory, on shared file systems too.

The lock is the file DIR/.lock. The holder has it locked with `flock`, which ends with its process, and rewrites a record in it
every few seconds. Some file systems ignore `flock`, or limit it to one machine; there the record shows whether the holder is
alive. For a directory that mirrors a bucket (parallel/mirrors.py) the record is an object of the bucket.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import datetime
import os
import pathlib
import signal
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

from absl import logging

from routerl_jax.core import buckets
from routerl_jax.parallel import multihost
from routerl_jax.parallel.lock_records import FileRecord, ObjectRecord, Record

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
        for _ in range(_ATTEMPTS):
            self._holder_record = _record_of(directory)
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
                    _interrupt_main()
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


def _interrupt_main() -> None:
    """Raises KeyboardInterrupt in the main thread, even if SIGINT is ignored (as in a script's job started with `&`)."""
    if callable(signal.getsignal(signal.SIGINT)):
        _thread.interrupt_main()
    else:
        main = ctypes.c_ulong(threading.main_thread().ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(main, ctypes.py_object(KeyboardInterrupt))


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


def _record_of(directory: pathlib.Path) -> Record:
    path = buckets.url_of(directory)
    return ObjectRecord(f"{path}/.lock") if buckets.in_bucket(path) else FileRecord(directory / ".lock")
