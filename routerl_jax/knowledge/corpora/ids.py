"""Checks that tens of millions of ids are distinct, with 12 bytes of memory per id."""

from __future__ import annotations

import hashlib

import numpy as np

from routerl_jax.core.rows import RowLocation

_RECENT = 2**20  # number of latest ids that are kept as text; older ones become 64-bit hashes


class DistinctIds:
    """Refuses an id that was used before.

    An id is compared with the latest million ids at once. Older ids are kept as 64-bit hashes; each further million is compared
    with them when it is full, and the last ids in `finish`. So an error may come later than its row, but names the row. Two
    different ids collide in one of 13,000 corpora of 52 million passages.
    """

    def __init__(self, recent: int = _RECENT) -> None:
        self._most = recent
        self._recent: dict[str, RowLocation] = {}
        self._runs: list[tuple[np.ndarray, np.ndarray]] = []  # sorted hashes, and the rows they came from
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, row_id: str, location: RowLocation) -> str:
        """Returns the id. Raises ValueError if it is empty or was used before."""
        if not row_id.strip():
            raise location.error("key 'id' is empty. Give every row an id of its own")
        if row_id in self._recent:
            raise self._repeated(row_id, location, self._recent[row_id])
        self._recent[row_id] = location
        self._count += 1
        if len(self._recent) == self._most:
            self.finish()
        return row_id

    def finish(self) -> None:
        """Compares the last ids with all before them."""
        if not self._recent:
            return
        ids = list(self._recent)
        hashes = np.array([_hash(row_id) for row_id in ids], np.uint64)
        for before, numbers in self._runs:
            positions = np.minimum(np.searchsorted(before, hashes), len(before) - 1)
            hits = np.flatnonzero(before[positions] == hashes)
            if len(hits):
                second = self._recent[ids[hits[0]]]
                raise self._repeated(ids[hits[0]], second, second._replace(number=int(numbers[positions[hits[0]]])))
        order = np.argsort(hashes)
        rows = np.array([self._recent[ids[i]].number for i in order], np.uint32)
        self._runs.append((hashes[order], rows))
        if len(self._runs) > 1 and len(self._runs[-1][0]) >= len(self._runs[-2][0]):
            self._merge()
        self._recent = {}

    def _merge(self) -> None:
        """Merges the last runs while they have about the same size, so that there are few."""
        while len(self._runs) > 1 and len(self._runs[-1][0]) >= len(self._runs[-2][0]):
            (hashes, rows), (other_hashes, other_rows) = self._runs.pop(), self._runs.pop()
            joined = np.concatenate([hashes, other_hashes])
            order = np.argsort(joined, kind="stable")
            self._runs.append((joined[order], np.concatenate([rows, other_rows])[order]))

    def _repeated(self, row_id: str, location: RowLocation, first: RowLocation) -> ValueError:
        file = "" if first.path == location.path else f"{first.path}, "
        return location.error(
            f"key 'id': {row_id!r} was used in {file}{first.unit} {first.number} already. Make ids distinct"
        )


def _hash(row_id: str) -> int:
    return int.from_bytes(hashlib.blake2b(row_id.encode(), digest_size=8).digest(), "little")
