"""Which conversation holds which row of the KV cache, and its place in the arrays of a program call."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from jax.sharding import Mesh

from routerl_jax.parallel.mesh import on_cpu

SEGMENT = 32  # decode steps of one call
LEAVE_FRACTION = 0.5  # a call ends when no larger share of its rows still decodes
PREFILL_TOKENS = 16_384  # of a shard in one call: more of them are no faster, but scores and copied keys grow with them


class HoldsRow(Protocol):
    """Anything that may hold a row, (shard, local index)."""

    row: tuple[int, int] | None


S = TypeVar("S", bound=HoldsRow)


def check_sizes(*, rows: int, max_length: int, segment: int, leave_fraction: float) -> None:
    """Complains about sizes of an engine with which nothing would ever be generated.

    Raises:
      ValueError: these are such.
    """
    for name, value in (("rows", rows), ("max_length", max_length), ("segment", segment)):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    if not 0 <= leave_fraction < 1:
        raise ValueError(f"leave_fraction={leave_fraction} must be in [0, 1): with 1 no call would decode anything")


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


class Placement(Generic[S]):
    """Places row holders into the [shards, active rows] arrays of a program call; iterates over (place, holder).

    Attributes:
      shape: shards, and the fullest shard's number of holders rounded up to one of `sizes`.
      rows: local row index at each place; `rows_per_shard`, which is no row, at empty places.
    """

    def __init__(self, table: RowTable, sizes: tuple[int, ...], holders: Sequence[S]) -> None:
        by_shard: list[list[tuple[int, S]]] = [[] for _ in range(table.shards)]
        for holder in holders:
            if holder.row is None:
                raise ValueError("only holders of a row can be placed")
            shard, local = holder.row
            by_shard[shard].append((local, holder))
        self.shape = (table.shards, round_up(max(map(len, by_shard)), sizes, "rows of a shard in a call"))
        self.rows = np.full(self.shape, table.rows_per_shard, np.int32)
        self._places: list[tuple[tuple[int, int], S]] = []
        for shard, group in enumerate(by_shard):
            for i, (local, holder) in enumerate(group):
                self.rows[shard, i] = local
                self._places.append(((shard, i), holder))

    def __iter__(self) -> Iterator[tuple[tuple[int, int], S]]:
        return iter(self._places)

    def gather(self, value: Callable[[S], Any], dtype: Any = np.int32) -> np.ndarray:
        """value(holder) at each holder's place, 0 elsewhere."""
        result = np.zeros(self.shape, dtype)
        for place, holder in self._places:
            result[place] = value(holder)
        return result


def ladder(low: int, high: int, factor: int = 2) -> tuple[int, ...]:
    """Sizes low, low * factor, ... that end in exactly `high`; shapes are rounded up to these."""
    sizes = []
    size = low
    while size < high:
        sizes.append(size)
        size *= factor
    return (*sizes, high)


def prefill_rows(rows_per_shard: int, mesh: Mesh) -> tuple[int, ...]:
    """How many rows of a shard a prefill call may feed: every size is a program.

    Fewer than eight take no less time than eight on an accelerator, but on a CPU every row is paid for.
    """
    sizes = ladder(min(8, rows_per_shard), rows_per_shard, 4)
    small = (1, 2, 4) if on_cpu(mesh) else ()
    return (*(size for size in small if size < sizes[0]), *sizes)


def prefill_steps(missing: int, sizes: tuple[int, ...], mesh: Mesh) -> int:
    """How many tokens of a row, one of `sizes`, the next prefill call takes of a row that lacks `missing`.

    An accelerator takes them all at once, as far as the largest size goes. A CPU pays for padding like for tokens, and
    takes a size that it can fill wherever more than the smallest size would be padding. A row's calls don't depend on
    other rows.
    """
    steps = round_up(min(missing, sizes[-1]), sizes, "new tokens of a row in a call")
    if on_cpu(mesh) and steps - missing > sizes[0]:
        return max(size for size in sizes if size <= missing)
    return steps


def most_rows(sizes: tuple[int, ...], steps: int) -> int:
    """The largest of `sizes` for which rows of `steps` new tokens stay within PREFILL_TOKENS; the smallest if none does."""
    return max((size for size in sizes if size * steps <= PREFILL_TOKENS), default=sizes[0])


def in_parts(holders: Sequence[S], most: int) -> list[list[S]]:
    """Row holders, in order, in as few groups as have at most `most` of any shard."""
    seen: collections.Counter[int] = collections.Counter()
    parts: list[list[S]] = []
    for holder in holders:
        assert holder.row is not None
        part = seen[holder.row[0]] // most
        seen[holder.row[0]] += 1
        if part == len(parts):
            parts.append([])
        parts[part].append(holder)
    return parts


def round_up(value: int, sizes: tuple[int, ...], what: str) -> int:
    """The smallest size that holds `value`. Raises ValueError if none does; `what` is counted, for the message."""
    for size in sizes:
        if size >= value:
            return size
    raise ValueError(f"{value} {what}: programs are made for {sizes[-1]} at most")
