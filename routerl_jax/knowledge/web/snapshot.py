"""Snapshots of the web: every search, page, summary and answer that was seen, in one directory. They can be replayed without
the web.

    DIR/snapshot.json     when it was started, and with which services
    DIR/answers.jsonl     query and k -> passages, or why there are none
    DIR/searches.jsonl    query -> results of the search engine
    DIR/pages.jsonl       URL -> title and text (thumbnails: the picture)
    DIR/summaries.jsonl   query and page -> summary

Every line is `{"key": .., "about": .., "value": ..}` or `{.., "error": ..}`; the first line of a key counts.
"""

from __future__ import annotations

import datetime
import json
import os
import pathlib
import threading
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

from filelock import FileLock

from routerl_jax.core.files import read_json, write_atomic

TABLES = ("answers", "searches", "pages", "summaries")
Mode = Literal["record", "replay", "auto"]
FORMAT = 1
MANIFEST = "snapshot.json"


class WebError(Exception):
    """A stage failed. The message says which one, where and why."""


class NotRecorded(WebError):
    """A replayed snapshot lacks an entry."""


class Record(NamedTuple):
    """An entry of a snapshot: a value, or the error."""

    value: Any = None
    error: str | None = None

    def result(self) -> Any:
        """The value. Raises WebError if it is an error."""
        if self.error is not None:
            raise WebError(self.error)
        return self.value


class Snapshot:
    """A snapshot. Safe to use from several threads; several processes may record into one directory.

    Args:
      mode: "record" starts a new snapshot; "replay" answers from it alone; "auto" answers from it if it can, and records
        missing entries.
      made_with: settings of the stages, by stage. They are stored in snapshot.json, and compared with those there.

    Raises:
      ValueError: the mode is unknown; there is no snapshot to replay, or already one where a new one is to be recorded;
        files are damaged; or the settings differ from those of the recording.
    """

    def __init__(self, directory: str | pathlib.Path, mode: Mode, made_with: Mapping[str, Mapping[str, Any]]) -> None:
        self.directory = pathlib.Path(directory).expanduser()
        self.mode = mode
        if mode not in get_args(Mode):
            raise ValueError(f"snapshot.mode={mode!r} is not one of {', '.join(get_args(Mode))}")
        manifest = self.directory / MANIFEST
        exists = manifest.is_file()
        if mode == "replay" and not exists:
            raise ValueError(f"{manifest} does not exist: there is nothing to replay. Record it first (mode='record')")
        if mode == "record" and exists:
            raise ValueError(
                f"{self.directory} holds a snapshot. Use mode='auto' to go on with it, or another directory"
            )
        self._lock = threading.Lock()
        self._ends: dict[str, int] = {}  # end of the known part of each file
        if mode != "replay":
            self.directory.mkdir(parents=True, exist_ok=True)
            self._file_lock = FileLock(self.directory / ".lock")
            with self._file_lock:
                exists = manifest.is_file()
                if not exists:
                    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
                    fields = {"format": FORMAT, "created": created, "made_with": made_with}
                    write_atomic(manifest, json.dumps(fields, indent=2, ensure_ascii=False) + "\n")
                self._tables = {name: self._open(name) for name in TABLES}
        else:
            self._tables = {name: self._open(name) for name in TABLES}
        if exists:
            self._check_manifest(manifest, made_with)

    def __len__(self) -> int:
        """Number of recorded answers."""
        return len(self._tables["answers"][1])

    def get(self, table: str, key: str, about: str) -> Record | None:
        """The entry of a key; None if there is none.

        Raises:
          NotRecorded: there is none, and the snapshot is replayed. `about` describes the missing entry.
        """
        with self._lock:
            if key in self._tables[table][1]:
                return self._read(table, key)
        if self.mode == "replay":
            raise NotRecorded(
                f"{self.directory} has no record in {table} of {about[:200]!r}: the run differs from the recorded one. "
                f"Use snapshot.mode='auto' to record what is missing"
            )
        return None

    def put(self, table: str, key: str, about: str, record: Record) -> Record:
        """Records an entry, unless there is one of the same key already, perhaps from another process.

        Returns:
          The valid entry. A replay returns it, so the recording process must use it, too.

        Raises:
          OSError: the file can't be written (as with a full disk). Earlier entries stay intact.
        """
        if self.mode == "replay":
            return record
        fields = {"key": key, "about": about}
        fields |= {"value": record.value} if record.error is None else {"error": record.error}
        line = json.dumps(fields, ensure_ascii=True).encode() + b"\n"
        with self._lock:
            file, offsets = self._tables[table]
            with self._file_lock:
                start = self._catch_up(table)
                if key in offsets:
                    return self._read(table, key)
                try:
                    _write_all(file, line)
                except OSError as error:
                    os.ftruncate(file, start)
                    path = self.directory / f"{table}.jsonl"
                    raise OSError(
                        error.errno, f"the snapshot can't be added to: {error.strerror}", str(path)
                    ) from error
            offsets[key] = (start, len(line))
            self._ends[table] = start + len(line)
        return record

    def drop_failures(self) -> int:
        """Removes failures, so that mode "auto" tries them again. Returns their number. No other process may record
        meanwhile."""
        if self.mode == "replay":
            raise ValueError("a snapshot that is replayed is not changed; open it with mode='auto'")
        dropped = 0
        with self._lock, self._file_lock:
            for name in TABLES:
                path = self.directory / f"{name}.jsonl"
                rewritten = path.with_suffix(".new")
                _end_of_lines(self._tables[name][0])
                with path.open("rb") as lines, rewritten.open("wb") as output:
                    for line in lines:
                        fields = json.loads(line)
                        value = fields.get("value")
                        # an answer in which some stage failed is a failure, too
                        problem = isinstance(value, dict) and bool(value.get("problems") or value.get("problem"))
                        failed = "error" in fields or problem
                        dropped += failed
                        output.write(b"" if failed else line)
                os.close(self._tables[name][0])
                rewritten.replace(path)
                self._tables[name] = self._open(name)
        return dropped

    def close(self) -> None:
        """Closes the files."""
        with self._lock:
            for file, _ in self._tables.values():
                os.close(file)
            self._tables = {}

    def _read(self, table: str, key: str) -> Record:
        file, offsets = self._tables[table]
        start, size = offsets[key]
        fields = json.loads(os.pread(file, size, start))
        return Record(fields.get("value"), fields.get("error"))

    def _catch_up(self, table: str) -> int:
        """Reads the lines that other processes have added. Returns the offset of the next line."""
        file, offsets = self._tables[table]
        start, end = self._ends[table], _end_of_lines(file)
        for line in os.pread(file, end - start, start).splitlines(keepends=True) if end > start else ():
            location = f"{self.directory / table}.jsonl, byte {start}"
            offsets.setdefault(_key(line, location), (start, len(line)))
            start += len(line)
        self._ends[table] = end
        return end

    def _open(self, name: str) -> tuple[int, dict[str, tuple[int, int]]]:
        """The file, and the position of each key's line. An incomplete last line of a killed process is cut off."""
        path = self.directory / f"{name}.jsonl"
        if self.mode != "replay":
            path.touch()
        elif not path.is_file():
            raise ValueError(f"{path} does not exist: the snapshot is not whole. Copy it again, or record anew")
        offsets: dict[str, tuple[int, int]] = {}
        start = 0
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.endswith(b"\n"):
                    break
                offsets.setdefault(_key(line, f"{path}, line {number}"), (start, len(line)))
                start += len(line)
        self._ends[name] = start
        if self.mode == "replay":
            return os.open(path, os.O_RDONLY), offsets
        os.truncate(path, start)
        return os.open(path, os.O_RDWR | os.O_APPEND), offsets

    def _check_manifest(self, path: pathlib.Path, made_with: Mapping[str, Mapping[str, Any]]) -> None:
        fields = read_json(path, "record anew")
        try:
            recorded = fields["made_with"]
            if fields["format"] != FORMAT:
                raise ValueError(f"format {fields['format']!r}, this version reads {FORMAT}")
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is damaged ({error!r}). Record anew") from error
        for stage, settings in json.loads(json.dumps(made_with)).items():
            before = recorded.get(stage, {})
            for key in {**settings, **before}:
                old_value, value = before.get(key), settings.get(key)
                if old_value != value:
                    raise ValueError(
                        f"{self.directory} was recorded with {stage}.{key}={old_value!r}, the configuration says {value!r}: "
                        f"change the configuration, or record anew"
                    )


def _key(line: bytes, location: str) -> str:
    """The key of a record. Raises ValueError that names its location."""
    try:
        return json.loads(line)["key"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{location}: not a record ({error!r}). Record anew") from error


def holds_records(directory: pathlib.Path) -> bool:
    """Whether anything was recorded in a directory."""
    files = (directory / f"{name}.jsonl" for name in TABLES)
    return any(file.is_file() and file.stat().st_size for file in files)


def _end_of_lines(file: int) -> int:
    """Cuts off an incomplete last line, and returns the size of the file."""
    size = end = os.lseek(file, 0, os.SEEK_END)
    while end and os.pread(file, 1, end - 1) != b"\n":
        start = max(0, end - (1 << 16))
        end = start + os.pread(file, end - start, start).rfind(b"\n") + 1
    if end < size:
        os.ftruncate(file, end)
    return end


def _write_all(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]
