"""The stream of training examples: grain, with a position that is part of the checkpoint."""

from __future__ import annotations

from typing import Any

import grain.python as grain

from routerl_jax.core.types import Example
from routerl_jax.data.readers import ExampleSource


class ExampleStream:
    """Endless shuffled batches of distinct examples; each epoch has an order of its own.

    Args:
      source: random access.
      batch: examples per step.
      seed: of the shuffle.

    Raises:
      ValueError: the source has fewer examples than a batch.
    """

    def __init__(self, source: ExampleSource, batch: int, seed: int) -> None:
        if len(source) < batch:
            raise ValueError(
                f"the training data has {len(source)} examples, fewer than config.rollout.examples={batch}"
            )
        # Whole batches within an epoch, so that no batch holds an example twice.
        usable = len(source) // batch * batch
        dataset = grain.MapDataset.source(_Indices(len(source))).seed(seed).shuffle().slice(slice(0, usable))
        dataset = dataset.repeat().batch(batch)
        self._source = source
        self._iterator = iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)))

    def next(self) -> list[Example]:
        """The next batch."""
        return [self._source[int(i)] for i in next(self._iterator)]

    def state(self) -> dict[str, Any]:
        """Where the stream is, as JSON-serialisable data."""
        return self._iterator.get_state()

    def restore(self, state: dict[str, Any]) -> None:
        """Goes to a saved position."""
        self._iterator.set_state(state)


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
