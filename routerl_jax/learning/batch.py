"""Sequences laid out for the learner: micro-batches of equal token count, packed into rows of one of a few lengths.

Everything per token is aligned with the position that predicts it: index t of `targets`, `weights`, ... belongs to the
token at t + 1 of the sequence.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence as Seq

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from routerl_jax.core.types import Sequence
from routerl_jax.parallel.mesh import batch_sharding, batch_shards, replicated

_INTEGERS = ("tokens", "targets", "positions", "segment_ids")
_TOKEN_FIELDS = (*_INTEGERS, "weights", "advantages", "old_logprobs", "ref_logprobs")


@functools.partial(jax.tree_util.register_dataclass, data_fields=[*_TOKEN_FIELDS, "buckets", "count"], meta_fields=[])
@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """One mini-batch on the device. M micro-batches, D shards, W tokens of a shard in a micro-batch.

    `buckets[m]` says how the W tokens of micro-batch m fold into rows; the first `count` micro-batches are real.
    """

    tokens: Int[Array, "M D W"]
    targets: Int[Array, "M D W"]
    positions: Int[Array, "M D W"]
    segment_ids: Int[Array, "M D W"]  # 0 is padding
    weights: Float[Array, "M D W"]  # of each target in the loss; exactly 0 where the policy did not sample it
    advantages: Float[Array, "M D W"]
    old_logprobs: Float[Array, "M D W"]
    ref_logprobs: Float[Array, "M D W"]
    buckets: Int[np.ndarray, " M"]
    count: Int[np.ndarray, ""]


class BatchLayout:
    """Cuts sequences into micro-batches with a bounded number of shapes.

    Args:
      mesh: rows are split over its batch axes.
      buckets: row lengths. A micro-batch has rows of one length, the smallest that holds its longest sequence; several
        sequences may share a row (segment ids keep them apart).
      micro_tokens: tokens of one micro-batch (raised where the longest bucket needs more).
    """

    def __init__(self, mesh: Mesh, buckets: Seq[int], micro_tokens: int) -> None:
        self.mesh = mesh
        self.buckets = tuple(sorted(set(buckets)))
        self.shards = batch_shards(mesh)
        self.width = max(micro_tokens // self.shards, self.buckets[-1])
        self._capacity = 1  # micro-batches per compiled batch; only grows, in powers of two

    def rows(self, bucket: int) -> int:
        """Rows per shard of a micro-batch of this bucket."""
        return self.width // self.buckets[bucket]

    def build(
        self,
        sequences: Seq[Sequence],
        weights: Seq[np.ndarray],
        advantages: Seq[float | np.ndarray],
        ref_logprobs: Seq[np.ndarray] | None = None,
    ) -> tuple[Batch, BatchIndex]:
        """Lays out sequences.

        Args:
          sequences: what was fed and sampled.
          weights: per sequence, the loss weight of each of its tokens ([T], 0 on fed tokens).
          advantages: per sequence, one number or one per token.
          ref_logprobs: per sequence, the reference policy's log-probability of each token; zeros if None.

        Raises:
          ValueError: a sequence is longer than the largest bucket.
        """
        places, chunk_buckets = self._pack([len(sequence) for sequence in sequences])
        while self._capacity < len(chunk_buckets):
            self._capacity *= 2
        shape = (self._capacity, self.shards, self.width)
        arrays = {name: np.zeros(shape, np.int32 if name in _INTEGERS else np.float32) for name in _TOKEN_FIELDS}
        for i, (micro, shard, start) in enumerate(places):
            sequence, length = sequences[i], len(sequences[i])
            at = (micro, shard, slice(start, start + length))
            predicts = (micro, shard, slice(start, start + length - 1))
            arrays["tokens"][at] = sequence.tokens
            arrays["positions"][at] = sequence.positions[0]
            arrays["segment_ids"][at] = i + 1
            arrays["targets"][predicts] = sequence.tokens[1:]
            arrays["weights"][predicts] = weights[i][1:]
            advantage = np.broadcast_to(np.asarray(advantages[i], np.float32), (length,))
            arrays["advantages"][predicts] = advantage[1:]
            arrays["old_logprobs"][predicts] = sequence.logprobs[1:]
            if ref_logprobs is not None:
                arrays["ref_logprobs"][predicts] = ref_logprobs[i][1:]
        bucket_ids = np.zeros(self._capacity, np.int32)
        bucket_ids[: len(chunk_buckets)] = chunk_buckets
        sharding = batch_sharding(self.mesh, axis=1)
        placed = {
            name: jax.make_array_from_callback(shape, sharding, lambda index, array=array: array[index])
            for name, array in arrays.items()
        }
        batch = Batch(buckets=bucket_ids, count=np.asarray(len(chunk_buckets), np.int32), **placed)
        return batch, BatchIndex([len(sequence) for sequence in sequences], places)

    def abstract(self, sequences: int, length: int) -> Batch:
        """The shapes of a mini-batch of `sequences` of `length` tokens, with shardings; nothing is allocated."""
        bucket = next(b for b, size in enumerate(self.buckets) if size >= length)
        per_micro = self.rows(bucket) * (self.buckets[bucket] // length) * self.shards
        micros = 1 << (-(-sequences // per_micro) - 1).bit_length()  # as `build` grows
        shape, sharding = (micros, self.shards, self.width), batch_sharding(self.mesh, axis=1)
        fields = {
            name: jax.ShapeDtypeStruct(shape, np.int32 if name in _INTEGERS else np.float32, sharding=sharding)
            for name in _TOKEN_FIELDS
        }
        whole = replicated(self.mesh)
        return Batch(
            buckets=jax.ShapeDtypeStruct((micros,), np.int32, sharding=whole),  # type: ignore[arg-type]
            count=jax.ShapeDtypeStruct((), np.int32, sharding=whole),  # type: ignore[arg-type]
            **fields,  # type: ignore[arg-type]
        )

    def _pack(self, lengths: list[int]) -> tuple[list[tuple[int, int, int]], list[int]]:
        """(micro-batch, shard, offset) of every sequence and the bucket of every micro-batch: first fit, longest first."""
        longest = max(lengths, default=0)
        if longest > self.buckets[-1]:
            raise ValueError(
                f"sequence {lengths.index(longest)} has {longest} tokens, more than the longest bucket of "
                f"{self.buckets[-1]}: raise learner.length_buckets or lower engine.max_length"
            )
        places: list[tuple[int, int, int]] = [(0, 0, 0)] * len(lengths)
        chunk_buckets: list[int] = []
        waiting = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        while waiting:
            bucket = next(b for b, size in enumerate(self.buckets) if size >= lengths[waiting[0]])
            size = self.buckets[bucket]
            used = [0] * (self.rows(bucket) * self.shards)
            left = []
            for i in waiting:
                row = next((row for row, tokens in enumerate(used) if tokens + lengths[i] <= size), None)
                if row is None:
                    left.append(i)
                    continue
                places[i] = (len(chunk_buckets), row % self.shards, row // self.shards * size + used[row])
                used[row] += lengths[i]
            chunk_buckets.append(bucket)
            waiting = left
        return places, chunk_buckets


@dataclasses.dataclass(frozen=True)
class BatchIndex:
    """Where each sequence went, to read per-token results back."""

    lengths: list[int]
    places: list[tuple[int, int, int]]

    def split(self, values: Float[np.ndarray, "M D W"]) -> list[np.ndarray]:
        """Per sequence, the value of each of its tokens ([T]; 0 for the first, which nothing predicts)."""
        result = []
        for length, (micro, shard, start) in zip(self.lengths, self.places):
            row = np.zeros(length, np.float32)
            row[1:] = values[micro, shard, start : start + length - 1]
            result.append(row)
        return result
