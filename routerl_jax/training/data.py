"""The stream of training examples: shuffled by grain, with a position that is part of the checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import grain.python as grain

from routerl_jax.core.types import Example
from routerl_jax.data.readers import ExampleSource


class ExampleStream:
    """Endless shuffled batches of distinct examples, pass after pass: each pass has every example once, in an order of its own.

    A batch that a pass has not enough for is filled from the next one. What would be in it twice is put off to the batch
    after it, so that it is in every pass once all the same. Batches may differ in size.

    Args:
      source: random access.
      seed: of the shuffle.
    """

    def __init__(self, source: ExampleSource, seed: int) -> None:
        self._source = source
        self._order = grain.MapDataset.source(_Indices(len(source))).seed(seed).shuffle().repeat()
        self._position = 0
        self._put_off: list[int] = []  # of the present pass, before the position

    def check(self, count: int) -> None:
        """Complains if there can't be a batch of so many.

        Raises:
          ValueError: the source has fewer examples.
        """
        if len(self._source) < count:
            raise ValueError(
                f"the training data has {len(self._source)} examples, fewer than config.rollout.examples={count}"
            )

    def next(self, count: int) -> list[Example]:
        """The next batch.

        Raises:
          ValueError: the source has fewer examples.
        """
        self.check(count)
        chosen, self._put_off = self._put_off[:count], self._put_off[count:]
        order = cast(Sequence[int], self._order)  # grain's elements may be None, but where nothing is filtered out
        while len(chosen) < count:
            index = order[self._position]
            self._position += 1
            (self._put_off if index in chosen else chosen).append(index)
        return [self._source[index] for index in chosen]

    def first(self, count: int) -> Iterator[Example]:
        """The source's first examples, at most so many, whatever the position."""
        return (self._source[i] for i in range(min(count, len(self._source))))

    def state(self) -> dict[str, Any]:
        """Where the stream is, as JSON-serialisable data."""
        return {"position": self._position, "put_off": self._put_off}

    def restore(self, state: dict[str, Any]) -> None:
        """Goes to a saved place."""
        if "position" not in state:
            raise ValueError(
                "the checkpoint is of an earlier version of routerl_jax, whose order of questions is kept otherwise"
            )
        self._position, self._put_off = state["position"], list(state.get("put_off", []))


class _Indices:
    """0, 1, 2, ...: grain shuffles positions, examples are fetched when their batch is due."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self._size:
            raise IndexError(index)
        return index
