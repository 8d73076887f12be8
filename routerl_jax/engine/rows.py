"""Assigns rows of the KV cache to conversations, and places them in the arrays of a program call."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from jax.sharding import Mesh

from routerl_jax.parallel.mesh import on_cpu

SEGMENT = 32  # decode steps of one call
MOST_DRAFTS = 15  # tokens that a step guesses
LEAVE_FRACTION = 0.5  # a call ends when at most this share of its rows is still decoding
# tokens of a shard in one call of prefill; more are not faster, and memory for scores and copied keys grows
PREFILL_TOKENS = 16_384


class HoldsRow(Protocol):
    """Anything that may hold a row, (shard, local index)."""

    @property
    def row(self) -> tuple[int, int] | None: ...


S = TypeVar("S", bound=HoldsRow)


class RowTable:
    """Hands out rows of a sharded cache; a row is (shard, local index). Deterministic: equal calls give equal rows."""

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
    """Places row holders into the [shards, active rows] arrays of a program call. Iterates over (index, holder).

    Attributes:
      shape: number of shards, and the fullest shard's number of holders, rounded up to one of `sizes`.
      rows: local row at each index; `rows_per_shard`, which is no row, at unused indices.
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
        self._slots: list[tuple[tuple[int, int], S]] = []
        for shard, group in enumerate(by_shard):
            for i, (local, holder) in enumerate(group):
                self.rows[shard, i] = local
                self._slots.append(((shard, i), holder))

    def __iter__(self) -> Iterator[tuple[tuple[int, int], S]]:
        return iter(self._slots)

    def gather(self, value: Callable[[S], Any], dtype: Any = np.int32) -> np.ndarray:
        """value(holder) at each holder's index, 0 elsewhere."""
        result = np.zeros(self.shape, dtype)
        for slot, holder in self._slots:
            result[slot] = value(holder)
        return result


def ladder(low: int, high: int, factor: int = 2) -> tuple[int, ...]:
    """Sizes low, low * factor, ... that end in exactly `high`; shapes are rounded up to these."""
    sizes = []
    size = low
    while size < high:
        sizes.append(size)
        size *= factor
    return (*sizes, high)


def rows_cost_time(mesh: Mesh) -> bool:
    """Whether a call of few rows takes less time: on a CPU. An accelerator takes about as long for one as for eight."""
    return on_cpu(mesh)


def prefill_rows(rows_per_shard: int, mesh: Mesh) -> tuple[int, ...]:
    """The numbers of rows per shard that a copy of rows, or a prefill without chunks, may have. Each is a program."""
    sizes = ladder(min(8, rows_per_shard), rows_per_shard, 4)
    small = (1, 2, 4) if rows_cost_time(mesh) else ()
    return (*(size for size in small if size < sizes[0]), *sizes)


def decode_rows(rows_per_shard: int, mesh: Mesh) -> tuple[int, ...]:
    """The numbers of rows per shard that a decode call may have."""
    return ladder(min(2 if rows_cost_time(mesh) else 8, rows_per_shard), rows_per_shard, 2)


def decode_spans(longest: int, mesh: Mesh) -> tuple[int, ...]:
    """The numbers of cached tokens of a row that a decode call may read, if it does not read each as far as it is filled."""
    sizes = ladder(min(256, longest), longest, 2)
    if not rows_cost_time(mesh):
        return sizes
    between = (3 * size // 2 for size in sizes)
    return tuple(sorted({*sizes, *(size for size in between if size < longest)}))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chunk(Generic[S]):
    """Tokens `start` to `stop` of a row, fed in one entry of a prefill call."""

    holder: S
    start: int
    stop: int

    @property
    def row(self) -> tuple[int, int] | None:
        """The holder's row."""
        return self.holder.row


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillShapes:
    """The shapes that prefill calls may have. Every combination that occurs is a program.

    Attributes:
      steps: tokens of an entry.
      sizes: entries of a shard.
      spans: cached tokens that a call reads of a row, if it does not read each as far as it is filled.
      chunked: a row may have several entries in a call, one chunk of its tokens after the other.
    """

    steps: tuple[int, ...]
    sizes: tuple[int, ...]
    spans: tuple[int, ...]
    chunked: bool

    @classmethod
    def of(cls, rows_per_shard: int, longest: int, mesh: Mesh, *, chunked: bool) -> PrefillShapes:
        """For rows of `longest` tokens; `chunked` is the cache's (KVCache.takes_chunks).

        Entries of a CPU are as small as is fast. On an accelerator the smallest call has 512 tokens of a shard: with fewer,
        reading the weights takes longer than the products.
        """
        if not chunked:
            return cls(
                steps=ladder(min(32, longest), min(512, longest), 2),
                sizes=prefill_rows(rows_per_shard, mesh),
                spans=(0, *ladder(min(512, longest), longest, 4)),
                chunked=False,
            )
        tokens, least, most = (32, 1, 32) if on_cpu(mesh) else (64, 8, PREFILL_TOKENS // 64)
        most = min(most, rows_per_shard * -(-longest // tokens))
        sizes = ladder(min(least, most), most, 2)
        return cls(steps=(min(tokens, longest),), sizes=sizes, spans=(longest,), chunked=True)

    def calls(self, missing: Sequence[Chunk[S]]) -> Iterator[tuple[int, list[Chunk[S]]]]:
        """Splits what rows miss into calls: the tokens per entry, and the entries.

        How a row is split does not depend on other rows. Without chunks, rows of about one length are in one call, padded to
        it. With chunks only a row's last one is padded, and a call has as many as fill it.
        """
        most = self.steps[-1]
        while missing and not self.chunked:
            groups: dict[int, list[Chunk[S]]] = {}
            for each in missing:
                count = min(each.stop - each.start, most)
                chunk = dataclasses.replace(each, stop=each.start + count)
                groups.setdefault(round_up(count, self.steps, "new tokens of a row in a call"), []).append(chunk)
            for width, chunks in sorted(groups.items()):
                for part in in_parts(chunks, most_rows(self.sizes, width)):
                    yield width, part
            rest = [dataclasses.replace(each, start=each.start + most) for each in missing]
            missing = [each for each in rest if each.start < each.stop]
        by_shard: dict[int, list[Chunk[S]]] = {}
        for each in missing:
            assert each.row is not None
            for start in range(each.start, each.stop, most):
                chunk = dataclasses.replace(each, start=start, stop=min(start + most, each.stop))
                by_shard.setdefault(each.row[0], []).append(chunk)
        first, total = 0, max(map(len, by_shard.values()), default=0)
        while first < total:
            size = filled_size(total - first, self.sizes)
            yield most, [chunk for chunks in by_shard.values() for chunk in chunks[first : first + size]]
            first += size


def filled_size(count: int, sizes: tuple[int, ...]) -> int:
    """The size of the next call for `count` chunks, one of `sizes`.

    It is the smallest size that holds all chunks, if at most an eighth of it (or one chunk) is empty. Else it is the largest
    size that the chunks fill, or the smallest size of all.
    """
    size = round_up(min(count, sizes[-1]), sizes, "chunks")
    if size - count <= max(1, size // 8):
        return size
    return max((each for each in sizes if each <= count), default=sizes[0])


def most_rows(sizes: tuple[int, ...], steps: int) -> int:
    """The largest of `sizes` for which rows of `steps` new tokens stay within PREFILL_TOKENS; the smallest if none does."""
    return max((size for size in sizes if size * steps <= PREFILL_TOKENS), default=sizes[0])


def cheapest_cuts(spans: Sequence[int], slots: Callable[[int, int], int], weights: float) -> list[tuple[int, int]]:
    """Cuts groups of rows, shortest first, into calls that decode a step with the least reading and multiplying.

    A call reads all weights, and `span` cached tokens of each of its rows. A row's products take about as long as reading a
    20th of the weights, on a machine with 10 FLOPs for every byte of its memory (a CPU).

    Args:
      spans: of each group, the cached tokens that a call with it reads of every row; ascending.
      slots: number of rows, padding included, of a call with the groups from the first to before the last.
      weights: size of the weights, in cached tokens of one row.

    Returns:
      First and one after the last group of each call, in order.
    """
    best: list[tuple[float, list[tuple[int, int]]]] = [(0.0, [])]
    for last in range(1, len(spans) + 1):
        costs = [best[i][0] + weights + slots(i, last) * (spans[last - 1] + weights / 20) for i in range(last)]
        best.append(min((cost, [*best[first][1], (first, last)]) for first, cost in enumerate(costs)))
    return best[-1][1]


def in_parts(holders: Sequence[S], most: int) -> list[list[S]]:
    """Splits row holders, in order, into the fewest groups with at most `most` holders of any shard."""
    counts: collections.Counter[int] = collections.Counter()
    parts: list[list[S]] = []
    for holder in holders:
        assert holder.row is not None
        part = counts[holder.row[0]] // most
        counts[holder.row[0]] += 1
        if part == len(parts):
            parts.append([])
        parts[part].append(holder)
    return parts


def round_up(value: int, sizes: tuple[int, ...], what: str) -> int:
    """The smallest of `sizes` that is at least `value`. Raises ValueError if none is; `what` names the value."""
    for size in sizes:
        if size >= value:
            return size
    raise ValueError(f"{value} {what}: programs are made for {sizes[-1]} at most")
