"""A file with all model replies of a job, written as soon as they arrive.

A job that continues after a kill repeats no request, not even those of questions that were in progress.
"""

from __future__ import annotations

import pathlib
import threading
from collections.abc import Mapping, Sequence

from routerl_jax.core.files import Journal
from routerl_jax.services.cache import Cache, Entry


class ReplyFile(Cache):
    """A cache for `services.load.CachedModel` that is a journal: nothing is ever removed.

    After `close`, the file opens again when there is something to write. Values are texts in UTF-8, and all of them are held in
    memory.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self.name = str(path)
        self._path = path
        self._journal: Journal | None = Journal(path)
        self._values = {record["key"]: record["value"] for record in self._journal.read()}
        self._lock = threading.Lock()

    def entries(self, keys: Sequence[str]) -> dict[str, Entry]:
        """The entries of those keys that the file has."""
        with self._lock:
            return {key: Entry(self._values[key].encode(), None) for key in keys if key in self._values}

    def set_many(self, items: Mapping[str, bytes], ttl: float | None = None) -> None:
        """Writes items. Raises ValueError if `ttl` is set, because the file keeps everything."""
        if ttl is not None:
            raise ValueError(f"{self.name} keeps everything for good, so ttl={ttl} can't be")
        with self._lock:
            self._journal = self._journal or Journal(self._path)
            for key, value in items.items():
                self._values[key] = value.decode()
                self._journal.append({"key": key, "value": self._values[key]})

    def close(self) -> None:
        """Closes the file."""
        with self._lock:
            if self._journal is not None:
                self._journal.close()
            self._journal = None
