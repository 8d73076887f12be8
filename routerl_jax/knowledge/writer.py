"""Writing a knowledge base so that a killed build goes on where it stopped, and a half-made one is never seen.

Everything is written into `DIR.tmp-FINGERPRINT` beside DIR, which is renamed to DIR at the very end. Finished stages
leave a marker there; a second build with the same fingerprint (same corpus, encoder, ...) finds it and skips them.
`.DIR.lock` lets one process at a time build DIR; `.DIR.replaced` is what was at DIR, in the moment of the renaming.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import pathlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from absl import logging
from filelock import FileLock, Timeout
from jaxtyping import Float32

from routerl_jax.core.types import Passage
from routerl_jax.knowledge.store import (
    BYTES,
    EMBEDDINGS,
    INDEX,
    MANIFEST,
    OFFSETS,
    Manifest,
    StoredPassages,
    create_array,
    open_array,
)

_PROGRESS = "progress"
_BYTES_SHARD, _BYTES_CHUNK = 2**24, 2**16  # 16 MiB files, 64 KiB compressed at a time
_OFFSETS_SHARD, _OFFSETS_CHUNK = 2**20, 2**12
_ROWS_CHUNK = 16  # vectors read together

Embed = Callable[[Sequence[Passage]], Float32[np.ndarray, "N D"]]


class StoreWriter:
    """Writes one knowledge base; use as a context manager, then `passages`, `embeddings`, `commit` in this order.

    Waits while another process builds at the same place, and then finds its work in `existing`.

    Args:
      directory: where the knowledge base will be; its parent is made if need be.
      fingerprint: hex digest of everything that passages and embeddings depend on.
      overwrite: replace a knowledge base that is there already (at `commit`, not before).

    Raises:
      ValueError: `directory` is not on a file system (gs://...).
    """

    def __init__(self, directory: str | pathlib.Path, fingerprint: str, *, overwrite: bool = False) -> None:
        if "://" in str(directory):
            raise ValueError(
                f"{directory}: knowledge bases are built on a file system; build in a directory, then copy it"
            )
        self.directory = pathlib.Path(directory).expanduser().resolve()
        self.overwrite = overwrite
        self.scratch = self.directory.with_name(f"{self.directory.name}.tmp-{fingerprint[:12]}")
        self._progress = self.scratch / _PROGRESS
        self._replaced = self.directory.with_name(f".{self.directory.name}.replaced")
        self._lock = FileLock(self.directory.with_name(f".{self.directory.name}.lock"))

    def __enter__(self) -> StoreWriter:
        self.directory.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            logging.warning("waiting for the process that is building %s", self.directory)
            self._lock.acquire()
        if self.existing is not None:  # otherwise it may be all that a crash in `commit` has left
            shutil.rmtree(self._replaced, ignore_errors=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self.scratch.is_dir() and not (self._progress.is_dir() and any(self._progress.iterdir())):
            shutil.rmtree(self.scratch)  # nothing was finished: nothing to come back to
        self._lock.release()

    @property
    def existing(self) -> Manifest | None:
        """The manifest of what is at `directory` already, None if there is none or it can't be read."""
        try:
            return Manifest.read(self.directory)
        except ValueError:
            return None

    @property
    def progress(self) -> pathlib.Path:
        """Where finished stages leave their markers."""
        return self._progress

    @property
    def index_directory(self) -> pathlib.Path:
        """Where the index may put its files."""
        return self.scratch / INDEX

    def passages(self, passages: Iterable[Passage]) -> int:
        """Writes all passages in one go, or finds them written; returns their number.

        Raises:
          ValueError: there is something at `directory` that may not or cannot be replaced.
        """
        self._check_target()
        for other in self.directory.parent.glob(f"{self.directory.name}.tmp-*"):
            if other != self.scratch:
                logging.warning("%s is left from a build with other settings; delete it if you don't need it", other)
        self._progress.mkdir(parents=True, exist_ok=True)
        marker = self._progress / "passages"
        if not marker.is_file():
            finish(marker, {"count": _write_passages(self.scratch, passages)})
        return json.loads(marker.read_text())["count"]

    def embeddings(self, dim: int, shard_size: int) -> Shards:
        """The matrix of embeddings, `dim` wide, `shard_size` rows a file; knows which files are still to be written."""
        return Shards(self.scratch, self._progress, dim, shard_size)

    def commit(self, manifest: Manifest) -> None:
        """Writes the manifest and moves everything into place."""
        manifest.write(self.scratch)
        self._check_target()
        if self.directory.exists():
            shutil.rmtree(self._replaced, ignore_errors=True)
            self.directory.rename(self._replaced)
        self.scratch.rename(self.directory)
        shutil.rmtree(self._replaced, ignore_errors=True)
        shutil.rmtree(self.directory / _PROGRESS)

    def _check_target(self) -> None:
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
                f"{self.directory} already holds a knowledge base, of another corpus, encoder or configuration. Load it with "
                f"load_kb, give another directory, or set config.overwrite=True to replace it"
            )


class Shards:
    """The embedding matrix while it is written, shard by shard."""

    def __init__(self, directory: pathlib.Path, progress: pathlib.Path, dim: int, size: int) -> None:
        self.passages = StoredPassages(directory, memory_limit=0, hint="")
        self.dim = dim
        self._progress = progress
        self._path = directory / EMBEDDINGS
        count = len(self.passages)
        marker = progress / "embeddings"
        if not marker.is_file():
            create_array(self._path, (count, dim), "float32", size, math.gcd(_ROWS_CHUNK, size), compress=False)
            finish(marker, {"count": count, "dim": dim})
        bounds = [(start, min(start + size, count)) for start in range(0, count, size)]
        self._todo = [bound for bound in bounds if not self._marker(bound[0]).is_file()]
        self.resumed_shards = len(bounds) - len(self._todo)
        self.resumed_rows = count - sum(stop - start for start, stop in self._todo)

    def write(self, embed: Embed) -> None:
        """Embeds what is still missing and commits each shard as soon as it is done.

        Raises:
          ValueError: `embed` gives another shape than it should, or values that are not finite.
        """
        array = open_array(self._path)
        for start, stop in self._todo:
            passages = self.passages.read(start, stop)
            vectors = np.asarray(embed(passages), np.float32)
            if vectors.shape != (stop - start, self.dim):
                raise ValueError(f"the encoder gave {vectors.shape}, expected {(stop - start, self.dim)}")
            finite = np.isfinite(vectors).all(1)
            if not finite.all():
                bad = passages[int(np.argmin(finite))].id
                raise ValueError(f"the encoder gave values that are not finite for passage {bad!r}")
            array[start:stop].write(vectors).result()
            finish(self._marker(start), {"stop": stop})

    def _marker(self, start: int) -> pathlib.Path:
        return self._progress / f"rows-{start}"


def _write_passages(directory: pathlib.Path, passages: Iterable[Passage]) -> int:
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
    """Writes a 1-D array of unknown length file by file; holds one file's worth in memory."""
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
    """Writes a marker in one step, so that it is either there and whole or not there."""
    unfinished = marker.with_suffix(".part")
    unfinished.write_text(json.dumps(content))
    unfinished.rename(marker)
