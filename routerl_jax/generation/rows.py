"""Which conversation holds which row of the KV cache."""

from __future__ import annotations

import collections


class RowTable:
    """Hands out rows of a sharded cache; a row is (shard, local index). Deterministic: same calls, same rows."""

    def __init__(self, shards: int, rows_per_shard: int) -> None:
        self.shards = shards
        self.rows_per_shard = rows_per_shard
        self._free = [collections.deque(range(rows_per_shard)) for _ in range(shards)]

    def free(self) -> int:
        """Number of free rows."""
        return sum(len(rows) for rows in self._free)

    def take(self, near: int | None = None) -> tuple[int, int] | None:
        """A free row, in shard `near` if it has one, else in the shard with most free rows; None if all are taken."""
        if near is None or not self._free[near]:
            near = max(range(self.shards), key=lambda shard: (len(self._free[shard]), -shard))
        if not self._free[near]:
            return None
        return near, self._free[near].popleft()

    def release(self, row: tuple[int, int]) -> None:
        """Gives a row back."""
        shard, local = row
        if local in self._free[shard]:
            raise ValueError(f"row {row} is free already")
        self._free[shard].append(local)


def ladder(low: int, high: int, factor: int = 2) -> tuple[int, ...]:
    """Sizes low, low * factor, ... that end in exactly `high`; shapes are rounded up to these."""
    sizes = []
    size = low
    while size < high:
        sizes.append(size)
        size *= factor
    return (*sizes, high)


def round_up(value: int, sizes: tuple[int, ...]) -> int:
    """The smallest size that holds `value`."""
    for size in sizes:
        if size >= value:
            return size
    raise ValueError(f"{value} exceeds the largest size {sizes[-1]}")
