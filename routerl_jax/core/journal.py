"""Files from which a killed job continues: a journal of its finished pieces, and a record of its settings."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from routerl_jax.core.config import first_difference
from routerl_jax.core.files import read_json, read_json_lines, write_atomic


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
