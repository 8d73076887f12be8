"""A frozen web: every search, page, summary and answer that was seen, in one directory, to be replayed without the web.

    DIR/snapshot.json     when it was begun and with which services
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

from routerl_jax.knowledge.web.search import WebError

TABLES = ("answers", "searches", "pages", "summaries")
Mode = Literal["record", "replay", "auto"]
FORMAT = 1
MANIFEST = "snapshot.json"


class NotRecorded(WebError):
    """A snapshot that is replayed lacks what is asked for."""


class Record(NamedTuple):
    """What was seen: a value, or the error."""

    value: Any = None
    error: str | None = None


class Snapshot:
    """Records of what was seen. Safe to use from several threads; several processes may record into one directory.

    Args:
      mode: "record" starts a new snapshot; "replay" answers from it alone; "auto" answers from it where it can and
        records what is missing.
      made_with: settings of the stages, by stage; kept in snapshot.json, and compared with those there.

    Raises:
      ValueError: unknown mode; nothing there to replay, or something there already to record; damaged files; other
        settings than it was recorded with.
    """

    def __init__(self, directory: str | pathlib.Path, mode: Mode, made_with: Mapping[str, Mapping[str, Any]]) -> None:
        self.directory = pathlib.Path(directory).expanduser()
        self.mode = mode
        if mode not in get_args(Mode):
            raise ValueError(f"snapshot.mode={mode!r} is not one of {', '.join(get_args(Mode))}")
        manifest = self.directory / MANIFEST
        there = manifest.is_file()
        if mode == "replay" and not there:
            raise ValueError(f"{manifest} does not exist: there is nothing to replay. Record it first (mode='record')")
        if mode == "record" and there:
            raise ValueError(
                f"{self.directory} holds a snapshot. Use mode='auto' to go on with it, or another directory"
            )
        self._lock = threading.Lock()
        self._ends: dict[str, int] = {}  # of what is known of each file
        if mode != "replay":
            self.directory.mkdir(parents=True, exist_ok=True)
            self._file_lock = FileLock(self.directory / ".lock")
            with self._file_lock:
                there = manifest.is_file()
                if not there:
                    self._write_manifest(manifest, made_with)
                self._tables = {name: self._open(name) for name in TABLES}
        else:
            self._tables = {name: self._open(name) for name in TABLES}
        if there:
            self._check_manifest(manifest, made_with)

    def __len__(self) -> int:
        """Number of recorded answers."""
        return len(self._tables["answers"][1])

    def get(self, table: str, key: str, about: str) -> Record | None:
        """What was recorded under a key; None if nothing was.

        Raises:
          NotRecorded: nothing was, and the snapshot is replayed. `about` says in words what is missing.
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
        """Records something, unless there is a record of the key, perhaps another process's.

        Returns:
          The record that counts: a replay gives it, and so must who records.

        Raises:
          OSError: the file can't be written, a full disk; what was recorded before stays whole.
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
        """Forgets what failed, so that mode "auto" tries it again; returns how much that was. Nobody else may record."""
        if self.mode == "replay":
            raise ValueError("a snapshot that is replayed is not changed; open it with mode='auto'")
        dropped = 0
        with self._lock, self._file_lock:
            for name in TABLES:
                path = self.directory / f"{name}.jsonl"
                whole = path.with_suffix(".new")
                _end_of_lines(self._tables[name][0])
                with path.open("rb") as lines, whole.open("wb") as kept:
                    for line in lines:
                        failed = _failed(json.loads(line))
                        dropped += failed
                        kept.write(b"" if failed else line)
                os.close(self._tables[name][0])
                whole.replace(path)
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
        """Learns what other processes have added, and returns where the next line begins."""
        file, offsets = self._tables[table]
        start, end = self._ends[table], _end_of_lines(file)
        for line in os.pread(file, end - start, start).splitlines(keepends=True) if end > start else ():
            offsets.setdefault(json.loads(line)["key"], (start, len(line)))
            start += len(line)
        self._ends[table] = end
        return end

    def _open(self, name: str) -> tuple[int, dict[str, tuple[int, int]]]:
        """The file, and where the line of every key is in it. A last line that a killed process left half is cut off."""
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
                try:
                    key = json.loads(line)["key"]
                except (ValueError, KeyError, TypeError) as error:
                    raise ValueError(f"{path}, line {number}: not a record ({error!r}). Record anew") from error
                offsets.setdefault(key, (start, len(line)))
                start += len(line)
        self._ends[name] = start
        if self.mode == "replay":
            return os.open(path, os.O_RDONLY), offsets
        os.truncate(path, start)
        return os.open(path, os.O_RDWR | os.O_APPEND), offsets

    def _write_manifest(self, path: pathlib.Path, made_with: Mapping[str, Mapping[str, Any]]) -> None:
        created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        fields = {"format": FORMAT, "created": created, "made_with": made_with}
        new = path.with_suffix(".new")
        new.write_text(json.dumps(fields, indent=2, ensure_ascii=False) + "\n")
        new.replace(path)

    def _check_manifest(self, path: pathlib.Path, made_with: Mapping[str, Mapping[str, Any]]) -> None:
        try:
            fields = json.loads(path.read_text())
            recorded = fields["made_with"]
            if fields["format"] != FORMAT:
                raise ValueError(f"format {fields['format']!r}, this version reads {FORMAT}")
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is damaged ({error!r}). Record anew") from error
        for stage, settings in json.loads(json.dumps(made_with)).items():
            before = recorded.get(stage, {})
            for key in {**settings, **before}:
                then, value = before.get(key), settings.get(key)
                if then != value:
                    raise ValueError(
                        f"{self.directory} was recorded with {stage}.{key}={then!r}, the configuration says {value!r}: "
                        f"change the configuration, or record anew"
                    )


def holds_records(directory: pathlib.Path) -> bool:
    """Whether anything was recorded in a directory."""
    files = (directory / f"{name}.jsonl" for name in TABLES)
    return any(file.is_file() and file.stat().st_size for file in files)


def _failed(fields: Mapping[str, Any]) -> bool:
    """Records of failures, and of answers that some failure had a part in."""
    value = fields.get("value")
    return "error" in fields or (isinstance(value, dict) and bool(value.get("problems") or value.get("problem")))


def _end_of_lines(file: int) -> int:
    """Size of the file without a last line that a process left half, which is cut off."""
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
