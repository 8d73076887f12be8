"""The stream of training examples, shuffled by grain. Its position is part of the checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, cast

import grain.python as grain

from routerl_jax.core.types import Example
from routerl_jax.data.readers import ExampleSource


class ExampleStream:
    """Endless shuffled batches of distinct examples. Each pass has every example once, in its own order.

    If a pass ends within a batch, the batch is filled from the next pass. An example that would then be in the batch twice is
    deferred to the batch after it, so that it still comes once per pass. Batches may differ in size.

    Args:
      source: examples with random access.
      seed: seed of the shuffle.
    """

    def __init__(self, source: ExampleSource, seed: int) -> None:
        self._source = source
        self._order = grain.MapDataset.source(_Indices(len(source))).seed(seed).shuffle().repeat()
        self._position = 0
        self._put_off: list[int] = []  # deferred examples of the present pass

    def check(self, count: int, under_way: int = 0) -> None:
        """Checks that the source has enough examples for a batch of this size besides those that are under way.

        Raises:
          ValueError: the source has fewer examples.
        """
        if len(self._source) < count + under_way:
            beside = f" and config.rollout.partial={under_way} together" if under_way else ""
            raise ValueError(
                f"the training data has {len(self._source)} examples, fewer than config.rollout.examples={count}{beside}"
            )

    def next(self, count: int, under_way: Collection[str] = ()) -> list[Example]:
        """The next batch.

        Args:
          under_way: ids of examples of earlier batches that are still worked on; they are deferred like those that would be in
            the batch twice.

        Raises:
          ValueError: the source has fewer examples.
        """
        self.check(count, len(under_way))
        chosen: list[int] = []
        deferred, self._put_off = self._put_off, []
        order = cast(Sequence[int], self._order)  # grain's elements are only None where something is filtered out
        while deferred or len(chosen) < count:
            if deferred:
                index = deferred.pop(0)
            else:
                index = order[self._position]
                self._position += 1
            now = len(chosen) < count and index not in chosen
            if now and under_way:
                now = self._source[index].id not in under_way
            (chosen if now else self._put_off).append(index)
        return [self._source[index] for index in chosen]

    def first(self, count: int) -> Iterator[Example]:
        """The first examples of the source, at most `count`, whatever the position."""
        return (self._source[i] for i in range(min(count, len(self._source))))

    def state(self) -> dict[str, Any]:
        """The position, as JSON-serialisable data."""
        return {"position": self._position, "put_off": self._put_off}

    def restore(self, state: dict[str, Any]) -> None:
        """Moves to a saved position."""
        if "position" not in state:
            raise ValueError(
                "the checkpoint is of an earlier version of routerl_jax, whose order of questions is kept otherwise"
            )
        self._position, self._put_off = state["position"], list(state.get("put_off", []))


class _Indices:
    """0, 1, 2, ...: grain shuffles indices, and examples are fetched when their batch is due."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self._size:
            raise IndexError(index)
        return index
