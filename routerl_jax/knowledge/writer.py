"""Writes a knowledge base so that a killed build can continue, and an incomplete one is never visible.

Everything is written into `DIR.tmp-FINGERPRINT` beside DIR, which is renamed to DIR at the very end. Each finished stage
leaves a marker there. Another build with the same fingerprint (same corpus, encoder, ...) finds the markers and skips these
stages. `.DIR.lock` lets one process at a time build DIR. `.DIR.replaced` is the old DIR during the renaming. After a kill at
that moment, the same build continues from there, and any other build first restores the old DIR.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import math
import os
import pathlib
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import logging
from filelock import FileLock, Timeout
from jaxtyping import Float32

from routerl_jax.core.files import atomic_file, read_json, sync, sync_tree, write_atomic
from routerl_jax.core.progress import Bar
from routerl_jax.core.types import Passage
from routerl_jax.knowledge.store import (
    BYTES,
    EMBEDDINGS,
    INDEX,
    MANIFEST,
    OFFSETS,
    PASSAGES,
    SIZES,
    Manifest,
    StoredPassages,
    create_array,
    open_array,
    rebuild_hint,
    replaced_directory,
)
from routerl_jax.parallel import multihost

LEFT_OUT = "left_out.json"  # in the knowledge base
_PROGRESS = "progress"
_BYTES_SHARD, _BYTES_CHUNK = 2**24, 2**16  # 16 MiB files, 64 KiB compressed at a time
_OFFSETS_SHARD, _OFFSETS_CHUNK = 2**20, 2**12
_ROWS_CHUNK = 16  # vectors read together
_FIRST_PIECE = 32  # rows that are embedded first, while the speed is not known
_GROWTH = 4  # how many times more may follow
SAVE_SECONDS = 60.0  # unsaved work from which on it is saved, and what one piece of a shard should take

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FULL_TEXTS = (*(os.strerror(code) for code in _FULL), "I/O error")  # the last one is ScaNN's message

Embed = Callable[[Sequence[Passage]], Float32[np.ndarray, "N D"]]


class StoreWriter:
    """Writes one knowledge base. Use as a context manager, and call `passages`, `embeddings` and `commit` in this order.

    Waits while another process builds the same directory, and then finds its result in `existing`.

    Args:
      directory: directory of the knowledge base; its parent is made if needed.
      fingerprint: hex digest of everything that passages and embeddings depend on. A function is called once no other process
        can change `directory`.
      overwrite: replace an existing knowledge base (at `commit`, not before).
      together: all processes of the job write this one, on a file system that they share. The main process locks, writes
        passages and commits; `embeddings` gives each process its share of the shards.

    Attributes:
      scratch: directory that is written, and renamed by `commit`.
      progress: directory of the markers of finished stages, in it.
      index_directory: directory for the index's files, in it.

    Raises:
      ValueError: `directory` is not on a file system (gs://...).
    """

    def __init__(
        self,
        directory: str | pathlib.Path,
        fingerprint: str | Callable[[], str],
        *,
        overwrite: bool = False,
        together: bool = False,
    ) -> None:
        if "://" in str(directory):
            raise ValueError(
                f"{directory}: knowledge bases are built on a file system; build in a directory, then copy it"
            )
        self.directory = pathlib.Path(directory).expanduser().resolve()
        self.overwrite = overwrite
        self._together = together and jax.process_count() > 1
        self._leads = not self._together or multihost.is_main()
        self._fingerprint = fingerprint
        if isinstance(fingerprint, str):
            self._name_scratch(fingerprint)
        self._replaced = replaced_directory(self.directory)
        self._lock = FileLock(self.directory.with_name(f".{self.directory.name}.lock"))

    def __enter__(self) -> StoreWriter:
        if not self._leads:  # the main process locks for all, and is the only one to tidy up
            return self
        self.directory.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            logging.warning("waiting for the process that is building %s", self.directory)
            self._lock.acquire()
        try:
            self._recover()
            if not isinstance(self._fingerprint, str):
                self._name_scratch(self._fingerprint())
        except BaseException:
            self._lock.release()
            raise
        return self

    def _name_scratch(self, fingerprint: str) -> None:
        self.scratch = self.directory.with_name(f"{self.directory.name}.tmp-{fingerprint[:12]}")
        self.progress, self.index_directory = self.scratch / _PROGRESS, self.scratch / INDEX
        process = (jax.process_index(), jax.process_count()) if self._together else (0, 1)
        self._main = Part(self.scratch, self.progress, process)

    def _recover(self) -> None:
        """Cleans up after a `commit` that was killed between its two renames, or right after them."""
        if self.existing is not None:
            shutil.rmtree(self._replaced, ignore_errors=True)
            return
        goes_on = isinstance(self._fingerprint, str) and (self.scratch / MANIFEST).is_file()
        if not goes_on and not self.directory.exists() and (self._replaced / MANIFEST).is_file():
            logging.warning("%s is put back: what was to replace it was killed at its last step", self.directory)
            self._replaced.rename(self.directory)

    def __exit__(self, *_: object) -> None:
        if not self._leads:
            return
        if self.scratch.is_dir() and not (self.progress.is_dir() and any(self.progress.iterdir())):
            shutil.rmtree(self.scratch)  # no stage was finished, so there is nothing to resume
        self._lock.release()

    @property
    def existing(self) -> Manifest | None:
        """The manifest of an existing knowledge base at `directory`; None if there is none or it can't be read."""
        try:
            return Manifest.read(self.directory)
        except ValueError:
            return None

    def passages(self, passages: Iterable[Passage], left_out: Mapping[str, str] | None = None) -> int:
        """`Part.passages` of the knowledge base itself.

        Raises:
          ValueError: `directory` exists and may not or can't be replaced.
        """
        self.check_target()
        for other in self.directory.parent.glob(f"{self.directory.name}.tmp-*"):
            if other != self.scratch:
                logging.warning("%s is left from a build with other settings; delete it if you don't need it", other)
        return self._main.passages(passages, left_out)

    def embeddings(self, dim: int, shard_size: int) -> Shards:
        """`Part.embeddings` of the knowledge base itself."""
        return self._main.embeddings(dim, shard_size)

    def part(self, name: str) -> Part:
        """A part with its own texts and vectors, in a directory of this name. Call it after `passages`."""
        return Part(self.scratch / name, self.progress / name)

    def once(self, stage: str, work: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        """Runs a kind's own stage, or finds it done. Returns the result of `work` (JSON-serialisable). Call it after
        `passages`."""
        marker = self.progress / f"stage-{stage}"
        if finished(marker) is None:
            with explained(self.scratch):
                finish(marker, work())
        return read_json(marker)

    def commit(self, manifest: Manifest, drop: Sequence[str] = ()) -> None:
        """Writes the manifest, and renames the directory to its final name.

        Args:
          drop: directories that only a killed build needs.
        """
        drop = (_PROGRESS, *drop)
        # Bytes of the files that were built. Without pictures, which are many and checked when they are decoded, and without
        # what other packages write, and may change.
        other = {*drop, MANIFEST, SIZES}
        arrays = [path.parent for path in self.scratch.rglob("zarr.json")]
        roots = [
            path for path in (*arrays, self.index_directory) if path.relative_to(self.scratch).parts[0] not in other
        ]
        loose = [path for path in self.scratch.glob("*") if path.name not in other]
        files = sorted({*loose, *(file for root in roots for file in root.rglob("*"))})
        sizes = {str(file.relative_to(self.scratch)): file.stat().st_size for file in files if file.is_file()}
        write_atomic(self.scratch / SIZES, json.dumps(sizes, indent=0) + "\n")
        manifest.write(self.scratch)
        self.check_target()
        sync_tree(self.scratch)
        if self.directory.exists():
            shutil.rmtree(self._replaced, ignore_errors=True)
            self.directory.rename(self._replaced)
        self.scratch.rename(self.directory)
        sync(self.directory.parent)  # from here on the new one survives a crash of the machine
        shutil.rmtree(self._replaced, ignore_errors=True)
        for name in drop:
            shutil.rmtree(self.directory / name)

    def check_target(self) -> None:
        """Raises ValueError if `directory` exists and may not or can't be replaced."""
        if self.directory.is_mount():
            raise ValueError(
                f"{self.directory} is a mount point, which a finished knowledge base can't be renamed to; give a "
                f"directory inside it, such as {self.directory / 'kb'}"
            )
        if not self.directory.exists() or (self.directory.is_dir() and not any(self.directory.iterdir())):
            return
        if not (self.directory / MANIFEST).is_file():
            raise ValueError(f"{self.directory} exists and is not a knowledge base; give a new or empty directory")
        if not self.overwrite:
            raise ValueError(
                f"{self.directory} already holds a knowledge base, of another corpus, encoder or configuration, or read "
                f"by the rules of an earlier version. Load it with load_kb, give another directory, or set "
                f"config.overwrite=True to replace it"
            )


class Part:
    """Texts and their vectors: those of the passages, or others that are stored in the same form (a graph's entities)."""

    def __init__(self, directory: pathlib.Path, progress: pathlib.Path, process: tuple[int, int] = (0, 1)) -> None:
        self.directory, self._progress, self._process = directory, progress, process

    def passages(self, passages: Iterable[Passage], left_out: Mapping[str, str] | None = None) -> int:
        """Writes all texts at once, or finds them written. Returns their number. Files that lost data in a crash of the machine
        are written again.

        Args:
          left_out: why parts of the corpus have no passage; complete once all passages are read. It is kept (`left_out`).
        """
        self._progress.mkdir(parents=True, exist_ok=True)
        marker, files = self._progress / "passages", self.directory / PASSAGES
        written = finished(marker)
        if written is not None and written.get("bytes") != size_on_disk(files):
            logging.warning("%s is not what was written there: the passages are written again", files)
            written = None
        if written is None:
            with explained(self.directory):
                count = write_passages(self.directory, passages)
                if left_out:
                    text = json.dumps(left_out, indent=2, ensure_ascii=False) + "\n"
                    write_atomic(self.directory / LEFT_OUT, text)
                written = {"count": count, "bytes": size_on_disk(files)}
                finish(marker, written)
        return written["count"]

    def embeddings(self, dim: int, shard_size: int) -> Shards:
        """The matrix of embeddings, `dim` wide, with `shard_size` rows per file. It knows which files are missing."""
        return Shards(self.directory, self._progress, dim, shard_size, self._process)


class Shards:
    """The embedding matrix while it is written, shard by shard. With several processes, each writes its share.

    A shard that takes long is saved piece by piece, as fast as its rows are made: a killed build loses two minutes or so,
    whatever the encoder and the size of a shard. The pieces make no difference to the values, because a row's vector depends on
    nothing but its text.
    """

    def __init__(
        self, directory: pathlib.Path, progress: pathlib.Path, dim: int, size: int, process: tuple[int, int]
    ) -> None:
        self.passages = StoredPassages(directory)
        self.dim = dim
        self._progress = progress
        self._path = directory / EMBEDDINGS
        count = len(self.passages)
        marker = progress / "embeddings"
        if not marker.is_file():
            create_array(self._path, (count, dim), "float32", size, math.gcd(_ROWS_CHUNK, size), compress=False)
            finish(marker, {"count": count, "dim": dim})
        self._size = size
        bounds = [(start, min(start + size, count)) for start in range(0, count, size)]
        bounds = bounds[process[0] :: process[1]]
        self.rows = sum(stop - start for start, stop in bounds)
        self.todo = [bound for bound in bounds if not self._is_written(bound[0])]
        self._piece = _FIRST_PIECE
        self._saved = {int(file.stem.split("-")[1]): file for file in progress.glob("piece-*.npy")}
        reached = {start: max(map(_end, self._pieces(start)), default=start) for start, _ in self.todo}
        self.resumed_rows = self.rows - sum(stop - reached[start] for start, stop in self.todo)

    def bar(self, desc: str, unit: str, progress: bool) -> Bar:
        """A bar of the rows, on which those of an earlier run are done. `progress`: whether it is shown."""
        done = self.resumed_rows
        return Bar(total=self.rows, initial=done, desc=desc, unit=unit, disable=not progress, smoothing=0.05)

    def write(self, embed: Embed) -> None:
        """Embeds the missing shards, and commits each as soon as it is done; see `write_rows`."""
        self.write_rows(lambda start, stop: embed(self.passages.read(start, stop)))

    def write_rows(self, vectors: Callable[[int, int], Float32[np.ndarray, "N D"]]) -> None:
        """Like `write`, with a function that returns the vectors of rows start..stop, a shard or a piece of one. Any may be
        missing, so `vectors` must rely on `start`, not on earlier calls.

        Raises:
          ValueError: `vectors` returns a wrong shape, or values that are not finite.
        """
        array = open_array(self._path)
        for start, stop in self.todo:
            with explained(self._path, f"{start:,} of {len(self.passages):,} vectors are kept"):
                array[start:stop].write(self._made(vectors, start, stop)).result()
                finish(self._marker(start), {"stop": stop, "bytes": self._file(start).stat().st_size})
                for piece in self._pieces(start):
                    piece.unlink()

    def _made(
        self, vectors: Callable[[int, int], Float32[np.ndarray, "N D"]], start: int, stop: int
    ) -> Float32[np.ndarray, "N D"]:
        """The vectors of a shard: the saved pieces, and new ones, which are saved if they take long."""
        parts = [np.load(piece) for piece in self._pieces(start)]
        row = saved = start + sum(map(len, parts))
        since = time.monotonic()
        while row < stop:
            end, began = min(row + self._piece, stop), time.monotonic()
            parts.append(self._checked(vectors(row, end), row, end))
            now = time.monotonic()
            in_time = int((end - row) * SAVE_SECONDS / max(now - began, 1e-6))
            self._piece = max(1, min(_GROWTH * max(end - row, self._piece), in_time))
            row = end
            if now - since >= SAVE_SECONDS and row < stop:
                new = np.concatenate(parts)[saved - row :]
                self._saved[saved] = self._progress / f"piece-{saved}-{row}.npy"
                with atomic_file(self._saved[saved], sync=True) as file:
                    np.save(file, new)
                saved, since = row, now
        return np.concatenate(parts)

    def _pieces(self, start: int) -> list[pathlib.Path]:
        """The saved pieces of a shard, in order, without gaps."""
        files, row = [], start
        while row < start + self._size and row in self._saved:
            files.append(self._saved[row])
            row = _end(files[-1])
        return files

    def _checked(self, values: Float32[np.ndarray, "N D"], start: int, stop: int) -> Float32[np.ndarray, "N D"]:
        vectors = np.asarray(values, np.float32)
        if vectors.shape != (stop - start, self.dim):
            raise ValueError(f"the encoder gave {vectors.shape}, expected {(stop - start, self.dim)}")
        finite = np.isfinite(vectors).all(1)
        if not finite.all():
            (bad,) = self.passages.take([start + int(np.argmin(finite))])
            raise ValueError(f"the encoder gave values that are not finite for passage {bad.id!r}")
        return vectors

    def _is_written(self, start: int) -> bool:
        """Whether a shard is complete. One with a marker whose file lost data in a crash of the machine is written again."""
        content = finished(self._marker(start))
        if content is None:
            return False
        try:
            complete = content["bytes"] == self._file(start).stat().st_size
        except (OSError, KeyError):
            complete = False
        if not complete:
            logging.warning("%s is not what was written there: its rows are embedded again", self._file(start))
        return complete

    def _file(self, start: int) -> pathlib.Path:
        return self._path / "c" / str(start // self._size) / "0"

    def _marker(self, start: int) -> pathlib.Path:
        return self._progress / f"rows-{start}"


def _end(piece: pathlib.Path) -> int:
    """The row after the last of a saved piece."""
    return int(piece.stem.rpartition("-")[2])


def left_out(directory: pathlib.Path) -> dict[str, str]:
    """Why parts of a knowledge base's corpus have no passage, by the names of files, or of their pages."""
    path = directory / LEFT_OUT
    return read_json(path, rebuild_hint(directory)) if path.is_file() else {}


def size_on_disk(directory: pathlib.Path) -> int:
    """Bytes of all files below a directory."""
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


@contextlib.contextmanager
def explained(path: pathlib.Path, saved: str = "") -> Iterator[None]:
    """Turns errors of a full disk (from Python and tensorstore) into one that says what to do. `saved`: what is saved."""
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:
        matches = [text for text in _FULL_TEXTS if text in str(error)]
        if getattr(error, "errno", None) not in _FULL and not matches:
            raise
        free = shutil.disk_usage(next(parent for parent in path.parents if parent.exists())).free
        raise ValueError(
            f"{path}: no room to write ({matches[0] if matches else error}; {free / 1e9:.1f} GB are free there). "
            f"{saved + '. ' if saved else ''}Make room, or raise the limit on files, and run the same command again: it goes "
            f"on where it stopped"
        ) from error


def write_passages(directory: pathlib.Path, passages: Iterable[Passage]) -> int:
    """Writes DIRECTORY/passages. Returns their number. Holds 16 MiB of them in memory."""
    count, position = 0, 0
    with (
        _appender(directory / BYTES, "uint8", _BYTES_SHARD, _BYTES_CHUNK) as append_bytes,
        _appender(directory / OFFSETS, "int64", _OFFSETS_SHARD, _OFFSETS_CHUNK) as append_offsets,
    ):
        for passage in passages:
            parts = [passage.id.encode(), passage.title.encode(), passage.text.encode()]
            *starts, position = itertools.accumulate(map(len, parts), initial=position)
            append_offsets(np.asarray(starts, np.int64))
            append_bytes(np.frombuffer(b"".join(parts), np.uint8))
            count += 1
        append_offsets(np.asarray([position], np.int64))
    return count


@contextlib.contextmanager
def _appender(path: pathlib.Path, dtype: str, shard: int, chunk: int) -> Iterator[Callable[[np.ndarray], None]]:
    """Writes a 1-D array of unknown length file by file. Holds one file in memory."""
    array = create_array(path, (0,), dtype, shard, chunk, compress=True)
    buffer = np.empty(shard, dtype)
    written = filled = 0

    def flush() -> None:
        nonlocal array, written, filled
        array = array.resize(exclusive_max=[written + filled]).result()
        array[written : written + filled].write(buffer[:filled]).result()
        written, filled = written + filled, 0

    def append(values: np.ndarray) -> None:
        nonlocal filled
        while len(values):
            part = values[: shard - filled]
            buffer[filled : filled + len(part)] = part
            filled += len(part)
            values = values[len(part) :]
            if filled == shard:
                flush()

    yield append
    if filled:
        flush()


def finish(marker: pathlib.Path, content: Mapping[str, Any]) -> None:
    """Writes a marker atomically."""
    write_atomic(marker, json.dumps(content))


def finished(marker: pathlib.Path) -> dict[str, Any] | None:
    """The content of a marker; None if its part is not finished.

    A marker that lost data in a crash of the machine is removed with a warning, so its part is done again."""
    if not marker.is_file():
        return None
    try:
        content = read_json(marker, "what it stands for is done again")
        if not isinstance(content, dict):
            raise ValueError(f"{marker} holds no object; what it stands for is done again")
    except ValueError as error:
        logging.warning("%s", error)
        marker.unlink()
        return None
    return content
