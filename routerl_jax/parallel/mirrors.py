"""Local directories that mirror directories of buckets while a program runs.

The files in the bucket are copied here first. Files that the program writes are uploaded while it runs (`send`) and when it
ends. So the program works on files of a disk. A killed program leaves the files of its last upload in the bucket.

Checkpoints are last: a run that is resumed finds the metrics and episodes that belong to its newest checkpoint. Under gs://
orbax reads and writes them in the bucket itself (`learning/checkpoints.py`), and they are not copied.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import tempfile
import threading
from collections.abc import Iterable, Iterator

from absl import logging

from routerl_jax.core import buckets
from routerl_jax.core.files import cache_directory
from routerl_jax.parallel import multihost

CHECKPOINTS = "checkpoints"
MARK = "_CHECKPOINT_METADATA"  # the file of a checkpoint that is uploaded last, and removed first
_LAST = (MARK, "config.json", "kb.json", "results.json")  # these files say that the files beside them are complete
_EVERY = 30.0  # seconds between two uploads of new files
_MIRRORS: dict[pathlib.Path, _Mirror] = {}


@contextlib.contextmanager
def mirrored(location: str) -> Iterator[pathlib.Path]:
    """The path at which a program works on a file or directory: `location` itself, or the mirror of a location in a bucket.

    Raises:
      ValueError: the bucket can't be read; or, at the end, not written (names the directory that is kept).
    """
    if not buckets.in_bucket(location):
        yield pathlib.Path(location).expanduser()
        return
    (cache_directory() / "mirrors").mkdir(parents=True, exist_ok=True)
    scratch = pathlib.Path(tempfile.mkdtemp(dir=cache_directory() / "mirrors"))
    try:
        mirror = _Mirror(location.rstrip("/"), scratch)
        _MIRRORS[mirror.path] = mirror
        try:
            yield mirror.path
        finally:
            try:
                mirror.close()
            finally:
                del _MIRRORS[mirror.path]
                buckets.forget(mirror.path)
    except buckets.NotWritten as error:
        raise ValueError(f"{error}. What is missing there is kept in {scratch}") from error
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    shutil.rmtree(scratch, ignore_errors=True)


def send(path: pathlib.Path) -> None:
    """Uploads new files below the mirror of a bucket, now and every half minute from now on.

    Only the main process of a job does. Nothing happens for other paths.

    Raises:
      ValueError: the bucket can't be written.
    """
    for parent in (path.resolve(), *path.resolve().parents):
        if mirror := _MIRRORS.get(parent):
            if mirror.is_ours and multihost.is_main():
                mirror.start()
                mirror.send()
            return


class _Mirror:
    """A location in a bucket, and the local path that mirrors it. The path exists if there is something in the bucket."""

    def __init__(self, location: str, scratch: pathlib.Path) -> None:
        self._location = location
        self.path = scratch.resolve() / location.rpartition("/")[2]
        names = _complete(name for name in buckets.listing(location) if self._is_copied(name))
        if names:
            buckets.download(location, names, self.path)
        buckets.stand_in(self.path, location)
        self._sent = self._files()
        self._sending, self._ended = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def is_ours(self) -> bool:
        """False once another process has taken over the location (`parallel/workdir.py`)."""
        return buckets.url_of(self.path) == self._location

    def start(self) -> None:
        """Begins to upload in the background."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._upload_repeatedly, name=f"upload to {self._location}", daemon=True
            )
            self._thread.start()

    def send(self) -> None:
        """Uploads changed files, and removes deleted ones, since the last time."""
        with self._sending:
            # Checkpoints are listed first: other files of a checkpoint that exists by now are found by the second listing.
            checkpoint_files = {name: state for name, state in self._files().items() if _is_checkpoint(name)}
            files = {name: state for name, state in self._files().items() if not _is_checkpoint(name)}
            deleted = sorted(self._sent.keys() - checkpoint_files.keys() - files.keys(), key=_marks_first)
            self._remove(name for name in deleted if not _is_checkpoint(name))
            self._upload(files)
            self._upload(checkpoint_files)
            self._remove(name for name in deleted if _is_checkpoint(name))

    def close(self) -> None:
        """The last upload."""
        self._ended.set()
        if self._thread:
            self._thread.join()
        if self.is_ours and self._files() != self._sent and multihost.is_main():
            self.send()

    def _upload_repeatedly(self) -> None:
        warned = False
        while not self._ended.wait(_EVERY):
            if not self.is_ours:
                return
            try:
                self.send()
                warned = False
            except ValueError as error:
                if not warned:
                    logging.warning("%s; trying again every %.0f s", error, _EVERY)
                warned = True

    def _upload(self, states: dict[str, tuple[int, int]]) -> None:
        changed = [name for name, state in states.items() if self._sent.get(name) != state]
        for name in sorted(changed, key=_marks_first, reverse=True):
            try:
                buckets.upload(self.path / name, self._remote_location(name))
            except buckets.NotWritten:
                if (self.path / name).is_file():
                    raise
                continue  # removed or replaced meanwhile
            self._sent[name] = states[name]

    def _remove(self, names: Iterable[str]) -> None:
        for name in list(names):
            buckets.remove(self._remote_location(name))
            del self._sent[name]

    def _remote_location(self, name: str) -> str:
        return f"{self._location}/{name}" if name else self._location

    def _files(self) -> dict[str, tuple[int, int]]:
        """The files to upload: name -> size and time of the last change in ns. No hidden or unfinished files."""
        if self.path.is_file():
            status = self.path.stat()
            return {"": (status.st_size, status.st_mtime_ns)}
        files = {}
        for folder, below, names in os.walk(self.path):
            below[:] = [name for name in below if not name.startswith(".")]
            for path in (pathlib.Path(folder, name) for name in names if not name.startswith(".")):
                name = path.relative_to(self.path).as_posix()
                if self._is_copied(name):
                    with contextlib.suppress(FileNotFoundError):  # replaced meanwhile
                        status = path.stat()
                        files[name] = (status.st_size, status.st_mtime_ns)
        return files

    def _is_copied(self, name: str) -> bool:
        """False for checkpoints that orbax keeps in the bucket, and for those that it has not finished."""
        parts = name.split("/")
        if CHECKPOINTS not in parts[:-1]:
            return True
        return self._location.startswith("s3://") and parts[parts.index(CHECKPOINTS) + 1].isdecimal()


def _is_checkpoint(name: str) -> bool:
    return CHECKPOINTS in name.split("/")[:-1]


def _marks_first(name: str) -> tuple[bool, str]:
    return name.rpartition("/")[2] not in _LAST, name


def _complete(names: Iterable[str]) -> list[str]:
    """Names without those of checkpoints that were uploaded or removed only in part."""
    listed = list(names)
    marked = {name.removesuffix(MARK) for name in listed if name.endswith(f"/{MARK}")}
    return [name for name in listed if not _is_checkpoint(name) or any(name.startswith(step) for step in marked)]
