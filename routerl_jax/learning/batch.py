"""Layout of sequences for the learner: micro-batches of equal token count, packed into rows of a few fixed lengths.

All values per token are aligned with the position that predicts the token: index t of `targets`, `weights`, ... belongs to
token t + 1 of the sequence.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence as Seq
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from routerl_jax.core.types import FREE, Sequence
from routerl_jax.learning.prefixes import Bundle, bundles
from routerl_jax.models.decoder import Decoder
from routerl_jax.models.patches import ImagePatches, VisionInputs, abstract_images, place_images
from routerl_jax.models.vision_language import VisionLanguageModel
from routerl_jax.parallel.mesh import batch_sharding, batch_shards, replicated

_INTEGERS = ("tokens", "targets", "positions", "segment_ids")
_FLOATS = ("weights", "advantages", "old_logprobs", "ref_logprobs")
TOKEN_FIELDS = (*_INTEGERS, *_FLOATS, "scored", "negative_advantages", "image_index", "segment_ends", "routes")
_LEAST_PATCHES = 1024


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=[*TOKEN_FIELDS, "buckets", "count", "images"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """One mini-batch on the devices, with M micro-batches, D shards, and W tokens per shard of a micro-batch.

    `buckets[m]` is the index of the row length into which the W tokens of micro-batch m fold. The first `count` micro-batches
    hold sequences; the others are padding.
    """

    tokens: Int[Array, "M D W"]
    targets: Int[Array, "M D W"]
    positions: Int[Array, "M D W"] | Int[Array, "M D W 3"]  # rotary; on three axes for vision-language models
    segment_ids: Int[Array, "M D W"]  # 0 is padding
    weights: Float[Array, "M D W"]  # weight of each target in the loss; exactly 0 if the policy did not sample it
    advantages: Float[Array, "M D W"]
    old_logprobs: Float[Array, "M D W"]
    ref_logprobs: Float[Array, "M D W"]
    scored: Bool[Array, "M D W"]  # the targets that the policy wrote or is trained on; others have no log-probability
    buckets: Int[np.ndarray, " M"]
    count: Int[np.ndarray, ""]
    # Set if several sequences may be trained on one target: `weights` are then their sums, and `advantages` and this the means,
    # by weight, of max(A, 0) and min(A, 0).
    negative_advantages: Float[Array, "M D W"] | None = None
    images: VisionInputs | None = None  # [M, D, P, ...]; None if no sequence has an image
    image_index: Int[Array, "M D W"] | None = None  # index of the token's feature among its shard's images; -1: none
    segment_ends: Int[Array, "M D W"] | None = None  # set if sequences share tokens: learning/prefixes.py
    routes: Int[Array, "M D W L C"] | None = None  # the sampler's experts of each token; None: routers choose


class BatchLayout:
    """Cuts sequences into micro-batches with a bounded number of shapes.

    Args:
      mesh: rows are split over its batch axes.
      buckets: row lengths. A micro-batch has rows of one length, the smallest that holds its longest sequence. Several
        sequences may share a row; segment ids separate them.
      micro_tokens: tokens of one micro-batch (more if the longest bucket needs it).
      model: the model of the sequences, which decides how positions and images are laid out. Default: a text model.
      share: compute common beginnings of sequences once (learning/prefixes.py).
      replay: batches hold the experts that the sampler chose (`Sequence.routes`).

    Raises:
      ValueError: `replay` is set and the model has no experts; or `share` is set and the model has layers with sliding-window
        attention. Their window counts distances in the row, which sharing changes.
    """

    def __init__(
        self,
        mesh: Mesh,
        buckets: Seq[int],
        micro_tokens: int,
        model: Decoder | None = None,
        *,
        share: bool = False,
        replay: bool = False,
    ) -> None:
        self._chosen: tuple[int, int] | None = None  # layers with experts, and experts of a token
        if replay:
            experts = None if model is None else model.config.experts
            if model is None or experts is None:
                kind = "text" if model is None else model.architecture.model_type
                raise ValueError(
                    f"config.learner.replay_routing: a {kind} model has no experts; switch replay_routing off"
                )
            self._chosen = model.config.sparse.count(True), experts.chosen
        if share and model is not None and any(window is not None for window in model.config.windows):
            raise ValueError(
                f"config.learner.share_prefixes: layers of a {model.config.model_type} model see a window of "
                f"{model.config.window} tokens, which are counted along a row; switch share_prefixes off"
            )
        self.share = share
        self.mesh = mesh
        self._vision = model.vl_config.vision if isinstance(model, VisionLanguageModel) else None
        self._dtype = None if model is None else model.compute_dtype
        self.buckets = tuple(sorted(set(buckets)))
        self.shards = batch_shards(mesh)
        self.width = max(micro_tokens // self.shards, self.buckets[-1])
        # Micro-batches per compiled batch; it only grows, in powers of two. Programs of different sizes round differently, so
        # a resumed run starts with the size that it had.
        self.capacity = 1

    def halve(self) -> str | None:
        """Makes micro-batches half as large. Returns config.learner.micro_tokens as it then is; None if a micro-batch holds
        just one row of the longest bucket on each shard."""
        if self.width == self.buckets[-1]:
            return None
        self.width = max(self.width // 2, self.buckets[-1])
        return f"config.learner.micro_tokens={self.width * self.shards}"

    def rows(self, bucket: int) -> int:
        """Rows per shard of a micro-batch of this bucket."""
        return self.width // self.buckets[bucket]

    def build(
        self,
        sequences: Seq[Sequence],
        weights: Seq[np.ndarray],
        advantages: Seq[float | np.ndarray],
        ref_logprobs: Seq[np.ndarray] | None = None,
        *,
        merge: bool = False,
    ) -> tuple[Batch, BatchIndex]:
        """Lays out sequences.

        Args:
          sequences: the sequences as they were fed and sampled.
          weights: per sequence, the loss weight of each of its tokens ([T], 0 on fed tokens).
          advantages: per sequence, one number, or one per token.
          ref_logprobs: per sequence, the reference policy's log-probability of each token; zeros if None.
          merge: sequences that share tokens may be trained on the same ones (learning/prefixes.py says when).

        Raises:
          ValueError: a sequence is longer than the largest bucket.
        """
        merge &= self.share
        longest = self.buckets[-1]
        parts = bundles(sequences, weights, longest, merge=merge) if self.share else _unshared_bundles(sequences)
        starts, chunk_buckets = self._pack([len(part) for part in parts], [part.members[0] for part in parts])
        placed = _placed(parts, starts, len(sequences))
        while self.capacity < len(chunk_buckets):
            self.capacity *= 2
        shape = (self.capacity, self.shards, self.width)
        arrays: dict[str, np.ndarray] = {name: np.zeros(shape, np.int32) for name in _INTEGERS}
        arrays |= {name: np.zeros(shape) for name in (*_FLOATS, *["negative_advantages"] * merge)}
        arrays["scored"] = np.zeros(shape, bool)
        if self._vision is not None:
            arrays["positions"] = np.zeros((*shape, 3), np.int32)
        if self._chosen is not None:
            arrays["routes"] = np.full((*shape, *self._chosen), FREE, np.int16)
        scored = [s.loss_mask | (np.asarray(weight) != 0) for s, weight in zip(sequences, weights)]
        for i, (micro, shard, slots) in enumerate(placed):
            sequence, length = sequences[i], len(sequences[i])
            at = (micro, shard, slots)
            arrays["tokens"][at] = sequence.tokens
            arrays["positions"][at] = sequence.positions[0] if self._vision is None else sequence.positions.T
            if self._chosen is not None and sequence.routes is not None:
                arrays["routes"][at] = sequence.routes
            arrays["targets"][micro, shard, slots[:-1]] = sequence.tokens[1:]
            arrays["scored"][micro, shard, slots[:-1]] |= scored[i][1:]
            # Several sequences may share a slot. Its values come from those that are trained on the token predicted there.
            trains = np.flatnonzero(np.asarray(weights[i])[1:])
            predicts = (micro, shard, slots[trains])
            weight = np.asarray(weights[i], np.float64)[1:][trains]
            gains = weight * np.broadcast_to(np.asarray(advantages[i], np.float32), (length,))[1:][trains]
            arrays["weights"][predicts] += weight
            arrays["advantages"][predicts] += np.maximum(gains, 0) if merge else gains
            if merge:
                arrays["negative_advantages"][predicts] += np.minimum(gains, 0)
            arrays["old_logprobs"][predicts] = sequence.logprobs[1:][trains]
            if ref_logprobs is not None:
                arrays["ref_logprobs"][predicts] = ref_logprobs[i][1:][trains]
        for name in (
            "advantages",
            *["negative_advantages"] * merge,
        ):  # a sum of one is the very advantage: these are doubles
            arrays[name] /= np.where(arrays["weights"] == 0, 1, arrays["weights"])
        self._number(parts, starts, arrays)
        bucket_ids = np.zeros(self.capacity, np.int32)
        bucket_ids[: len(chunk_buckets)] = chunk_buckets
        images = None
        if any(sequence.images for sequence in sequences):
            images, arrays["image_index"] = self._place_images(sequences, placed, shape)
        sharding = batch_sharding(self.mesh, axis=1)

        def on_devices(array: np.ndarray) -> jax.Array:
            array = array.astype(np.float32) if array.dtype == np.float64 else array
            return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

        batch = Batch(
            buckets=bucket_ids,
            count=np.asarray(len(chunk_buckets), np.int32),
            images=images,
            **{name: on_devices(array) for name, array in arrays.items()},
        )
        return batch, BatchIndex(placed=placed, scored=scored, tokens=sum(map(len, parts)))

    def _number(self, parts: Seq[Bundle], starts: Seq[tuple[int, int, int]], arrays: dict[str, np.ndarray]) -> None:
        """Writes segment ids and, if sequences share tokens, segment ends."""
        number = 1
        if self.share:
            arrays["segment_ends"] = np.ones_like(arrays["segment_ids"])
        for part, (micro, shard, start) in zip(parts, starts):
            at = (micro, shard, slice(start, start + len(part)))
            ids, ends, number = part.segments(number)
            arrays["segment_ids"][at] = ids
            if self.share:
                arrays["segment_ends"][at] = ends

    def _place_images(
        self, sequences: Seq[Sequence], placed: Seq[Placed], shape: tuple[int, int, int]
    ) -> tuple[VisionInputs, np.ndarray]:
        """Puts the images of every micro-batch and shard into one array, and writes which feature each token gets."""
        vision = self._vision
        if vision is None:
            raise ValueError("sequences hold images, but the batch layout is for a text model: give it the model")
        groups: dict[
            tuple[int, int], dict[str, ImagePatches]
        ] = {}  # each image once, even if several sequences show it
        image_index = np.full(shape, -1, np.int32)
        used: dict[tuple[int, int], int] = {}  # number of patches so far
        begins: dict[tuple[int, int, str], int] = {}  # index of the first patch of each image
        for sequence, (micro, shard, slots) in zip(sequences, placed):
            for first, image in cast(tuple[tuple[int, ImagePatches], ...], sequence.images):
                group = groups.setdefault((micro, shard), {})
                if image.digest not in group:
                    group[image.digest] = image
                    begins[micro, shard, image.digest] = used.get((micro, shard), 0)
                    used[micro, shard] = used.get((micro, shard), 0) + len(image.patches)
                tokens = slots[
                    first : first + image.tokens
                ]  # not contiguous if sequences that share the picture branch there
                image_index[micro, shard, tokens] = image.slots + begins[micro, shard, image.digest] // vision.group
        size = _LEAST_PATCHES
        while size < max(used.values()):
            size *= 2
        size = -(-size // vision.window_patches) * vision.window_patches
        shown = {shard_key: list(group.values()) for shard_key, group in groups.items()}
        sharding = batch_sharding(self.mesh, axis=1)
        return place_images(shown, shape[:2], size, vision, self._dtype, sharding), image_index

    def micro_batches(self, sequences: int, length: int) -> int:
        """How many micro-batches `sequences` of `length` tokens each take.

        Raises:
          ValueError: `length` is more than the largest bucket.
        """
        self._check_fits(f"a sequence of {length} tokens is", length)
        bucket = self._bucket(length)
        return -(-sequences // (self.rows(bucket) * (self.buckets[bucket] // length) * self.shards))

    def abstract(self, sequences: int, length: int) -> Batch:
        """The shapes and shardings of a mini-batch of `sequences` sequences of `length` tokens. Nothing is allocated.

        For a vision model, half of all tokens are assumed to be image tokens.

        Raises:
          ValueError: `length` is more than the largest bucket.
        """
        micros = 1 << (self.micro_batches(sequences, length) - 1).bit_length()  # as `build` grows
        shape, sharding = (micros, self.shards, self.width), batch_sharding(self.mesh, axis=1)
        fields: dict[str, Any] = {
            name: jax.ShapeDtypeStruct(shape, np.int32 if name in _INTEGERS else np.float32, sharding=sharding)
            for name in (*_INTEGERS, *_FLOATS)
        }
        fields["scored"] = jax.ShapeDtypeStruct(shape, bool, sharding=sharding)
        if self._vision is not None:
            fields["positions"] = jax.ShapeDtypeStruct((*shape, 3), np.int32, sharding=sharding)
            fields["image_index"] = jax.ShapeDtypeStruct(shape, np.int32, sharding=sharding)
            window = self._vision.window_patches
            patches = -(-self.width // 2 * self._vision.group // window) * window
            fields["images"] = abstract_images(shape[:2], patches, self._vision, self._dtype, sharding)
        if self.share:
            fields["segment_ends"] = fields["segment_ids"]
            fields["negative_advantages"] = fields["advantages"]
        if self._chosen is not None:
            fields["routes"] = jax.ShapeDtypeStruct((*shape, *self._chosen), np.int16, sharding=sharding)
        unsplit = replicated(self.mesh)
        fields["buckets"] = jax.ShapeDtypeStruct((micros,), np.int32, sharding=unsplit)
        fields["count"] = jax.ShapeDtypeStruct((), np.int32, sharding=unsplit)
        return Batch(**fields)

    def _bucket(self, length: int) -> int:
        """The smallest bucket that holds a sequence."""
        return next(b for b, size in enumerate(self.buckets) if size >= length)

    def _check_fits(self, which: str, length: int) -> None:
        if length > self.buckets[-1]:
            raise ValueError(
                f"{which} more than the longest of the buckets {self.buckets}: add a longer one to "
                "config.learner.length_buckets, or lower config.engine.max_length"
            )

    def _pack(self, lengths: list[int], names: list[int]) -> tuple[list[tuple[int, int, int]], list[int]]:
        """(micro-batch, shard, offset) of every bundle, and the bucket of every micro-batch. First fit, longest first.

        Args:
          lengths: tokens of each bundle.
          names: index of each bundle's first sequence, for errors.
        """
        longest = max(lengths, default=0)
        if lengths:
            self._check_fits(f"sequence {names[lengths.index(longest)]} has {longest} tokens,", longest)
        positions: list[tuple[int, int, int]] = [(0, 0, 0)] * len(lengths)
        chunk_buckets: list[int] = []
        waiting = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        while waiting:
            bucket = self._bucket(lengths[waiting[0]])
            size = self.buckets[bucket]
            used = [0] * (self.rows(bucket) * self.shards)
            remaining = []
            for i in waiting:
                row = next((row for row, tokens in enumerate(used) if tokens + lengths[i] <= size), None)
                if row is None:
                    remaining.append(i)
                    continue
                positions[i] = (len(chunk_buckets), row % self.shards, row // self.shards * size + used[row])
                used[row] += lengths[i]
            chunk_buckets.append(bucket)
            waiting = remaining
        return positions, chunk_buckets


Placed = tuple[int, int, np.ndarray]  # micro-batch, shard, and the slot of every token within it


def _unshared_bundles(sequences: Seq[Sequence]) -> list[Bundle]:
    """One bundle per sequence: nothing is shared."""
    parts = [Bundle() for _ in sequences]
    for i, (part, sequence) in enumerate(zip(parts, sequences)):
        part.add(i, np.full(len(sequence), np.nan))
    return parts


def _placed(parts: Seq[Bundle], starts: Seq[tuple[int, int, int]], count: int) -> list[Placed]:
    placed: list[Placed] = [(0, 0, np.zeros(0, int))] * count
    for part, (micro, shard, start) in zip(parts, starts):
        for member, slots in zip(part.members, part.slots):
            placed[member] = (micro, shard, start + slots)
    return placed


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchIndex:
    """The position of each sequence in a batch, to read results per token back.

    Attributes:
      placed: per sequence, the slots of its tokens.
      scored: per sequence, the tokens that the policy wrote or is trained on.
      tokens: number of tokens that the batch computes; shared ones count once.
    """

    placed: list[Placed]
    scored: list[Bool[np.ndarray, " T"]]
    tokens: int

    @property
    def starts(self) -> list[tuple[int, int, int]]:
        """Per sequence: micro-batch, shard, and slot of its first token. Without sharing, the other tokens follow it."""
        return [(micro, shard, int(slots[0]) if len(slots) else 0) for micro, shard, slots in self.placed]

    def split(self, values: Float[np.ndarray, "M D W"]) -> list[np.ndarray]:
        """Per sequence, the value of each token that is scored ([T], 0 for others; nothing predicts the first)."""
        result = []
        for (micro, shard, slots), scored in zip(self.placed, self.scored):
            row = np.zeros(len(slots), np.float32)
            row[1:] = np.where(scored[1:], values[micro, shard, slots[:-1]], 0.0)  # others may share its slots
            result.append(row)
        return result
