"""Layout of sequences for the learner: micro-batches of equal token count, packed into rows of a few fixed lengths.

All values per token are aligned with the position that predicts the token: index t of `targets`, `weights`, ... belongs to
token t + 1 of the sequence.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence as Seq
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from routerl_jax.core.types import FREE, Sequence
from routerl_jax.models.decoder import Decoder
from routerl_jax.models.patches import ImagePatches, VisionInputs, abstract_images, array_size, place_images
from routerl_jax.models.vision_language import VisionLanguageModel
from routerl_jax.parallel.mesh import batch_sharding, batch_shards, replicated

_INTEGERS = ("tokens", "targets", "positions", "segment_ids")
_FLOATS = ("weights", "advantages", "old_logprobs", "ref_logprobs")
TOKEN_FIELDS = (*_INTEGERS, *_FLOATS, "scored", "negative_advantages", "image_index", "segment_ends", "routes")


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
    segment_ends: Int[Array, "M D W"] | None = None  # set if sequences share tokens (`bundles`)
    routes: Int[Array, "M D W L C"] | None = None  # the sampler's experts of each token; None: routers choose


class BatchLayout:
    """Cuts sequences into micro-batches with a bounded number of shapes.

    Args:
      mesh: rows are split over its batch axes.
      buckets: row lengths. A micro-batch has rows of one length, the smallest that holds its longest sequence. Several
        sequences may share a row; segment ids separate them.
      micro_tokens: tokens of one micro-batch (more if the longest bucket needs it).
      model: the model of the sequences, which decides how positions and images are laid out. Default: a text model.
      share: compute common beginnings of sequences once (`bundles`).
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
          merge: sequences that share tokens may be trained on the same ones (the comment above `Bundle` says when).

        Raises:
          ValueError: a sequence is longer than the largest bucket.
        """
        merge &= self.share
        longest = self.buckets[-1]
        if self.share:
            parts = bundles(sequences, weights, longest, merge=merge)
        else:
            parts = [Bundle() for _ in sequences]
            for i, (part, sequence) in enumerate(zip(parts, sequences)):
                part.add(i, np.full(len(sequence), np.nan))
        starts, chunk_buckets = self._pack([len(part) for part in parts], [part.members[0] for part in parts])
        placed: list[Placed] = [(0, 0, np.zeros(0, int))] * len(sequences)
        for part, (micro, shard, start) in zip(parts, starts):
            for member, slots in zip(part.members, part.slots):
                placed[member] = (micro, shard, start + slots)
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
        # Of a single sequence this gives the very advantage, because these are doubles.
        for name in ("advantages", *["negative_advantages"] * merge):
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
                # not contiguous if sequences that share the picture branch there
                tokens = slots[first : first + image.tokens]
                image_index[micro, shard, tokens] = image.slots + begins[micro, shard, image.digest] // vision.group
        size = array_size(max(used.values()), vision)
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


# --- shared prefixes ---------------------------------------------------------------------------------------------------
# Shared prefixes: common beginnings of sequences are computed once, with the tokens laid out as a tree in one row.
#
# The sequences of a bundle share tokens like a trie. A sequence's own slots begin at the last common token: the
# prediction after it differs between branches, so that token is computed once per branch. The index of a token in the
# row is unrelated to its rotary position, which continues along its own sequence.
#
# A token must see exactly the earlier tokens of its own sequence. For this, the segments of the tree are numbered in
# depth-first order: the numbers from a segment's `id` up to (not including) its `end` are those of the segment and of
# all segments below it. A query q sees the keys k before it with id[k] <= id[q] < end[k]. For sequences that share
# nothing, this is equality of segment ids.
#
# Two sequences may be trained on one token: rollouts of a group often write the same query, and then read the same
# passages. Their loss is then that of one token, with the sum of their weights and with the means of the positive and
# of the negative advantages (`Batch`). This needs a loss that is a multiple of the advantage on each side of 0
# (`merge`), and a token that was sampled at equal log-probabilities. Otherwise two sequences share no further than to
# the first token on which both are trained.
#
# Two tokens are the same if their id, rotary position and picture are. All tokens of pictures have one id, so pictures
# are compared by digest. Sequences share no further than to the token before the first picture that differs.

# all inputs of the model for each token: id, picture (0: none), and position on three axes
Units = Int[np.ndarray, "T 5"]

LEAST_SHARED = 8  # tokens; sharing fewer saves too little for a segment of its own
_ROUNDING = (
    1e-4  # between the log-probabilities of one token in two rows; beyond it, another policy has sampled the token
)


@dataclasses.dataclass(kw_only=True)
class Bundle:
    """Sequences that share tokens and lie together in a row.

    Attributes:
      members: indices of sequences; a parent comes before the members that share its tokens.
      parents: for each member, the position in `members` of the one whose tokens it shares; -1: none.
      starts: for each member, the first token with a slot of its own.
      slots: for each member, the slot of each of its tokens within the bundle.
      sampled: for each slot so far, the log-probability at which the token that it predicts was sampled, if a member is trained
        on that token; else NaN.
    """

    members: list[int] = dataclasses.field(default_factory=list)
    parents: list[int] = dataclasses.field(default_factory=list)
    starts: list[int] = dataclasses.field(default_factory=list)
    slots: list[Int[np.ndarray, " T"]] = dataclasses.field(default_factory=list)
    sampled: Float[np.ndarray, " S"] = dataclasses.field(default_factory=lambda: np.zeros(0))

    def __len__(self) -> int:
        return len(self.sampled)

    def add(self, index: int, sampled: Float[np.ndarray, " T"], parent: int = -1, start: int = 0) -> None:
        """Adds a sequence. It shares the slots of its first `start` tokens with the parent.

        Args:
          sampled: the log-probability of each token on which the sequence is trained; NaN for others.
        """
        while parent >= 0 and start <= self.starts[parent]:  # the parent shares all these tokens with its own parent
            parent = self.parents[parent]
        before = self.slots[parent][:start] if parent >= 0 else np.zeros(0, int)
        own = np.arange(len(self), len(self) + len(sampled) - start)
        slots = np.concatenate([before, own])
        self.members.append(index)
        self.parents.append(parent)
        self.starts.append(start)
        self.slots.append(slots)
        self.sampled = np.concatenate([self.sampled, np.full(len(own), np.nan)])
        known = self.sampled[slots[:-1]]
        self.sampled[slots[:-1]] = np.where(np.isnan(known), sampled[1:], known)

    def segments(self, first: int = 1) -> tuple[Int[np.ndarray, " S"], Int[np.ndarray, " S"], int]:
        """`id` and `end` of every slot, numbered from `first`, and the next unused number."""
        ids, ends = np.zeros(len(self), np.int32), np.zeros(len(self), np.int32)
        children: dict[int, list[int]] = {}
        for member, parent in enumerate(self.parents):
            children.setdefault(parent, []).append(member)

        def visit(member: int, number: int) -> int:
            below = children.get(member, [])
            slots, start = self.slots[member], self.starts[member]
            cuts = [start, *sorted({self.starts[child] for child in below}), len(slots)]
            for begin, stop in itertools.pairwise(cuts):
                ids[slots[begin:stop]] = number
                number += 1
                for child in below:
                    if self.starts[child] == stop:
                        number = visit(child, number)
            ends[slots[start:]] = number
            return number

        number = first
        for root in children[-1]:
            number = visit(root, number)
        return ids, ends, number


def bundles(
    sequences: Seq[Sequence], weights: Seq[np.ndarray], longest: int, least: int = LEAST_SHARED, *, merge: bool = False
) -> list[Bundle]:
    """Puts every sequence into a bundle. Sequences that share most are joined first.

    The sequences are sorted by their tokens. Each then shares most with a neighbour, so two comparisons per sequence suffice.

    Args:
      weights: per sequence, the loss weight of each of its tokens; not 0 on trained tokens.
      longest: most slots of a bundle.
      least: smallest number of tokens that are shared.
      merge: sequences may share tokens on which both are trained, if these were sampled at equal log-probabilities.
    """
    apart = _ROUNDING if merge else -1.0
    sampled = [np.where(np.asarray(weight) != 0, s.logprobs, np.nan) for s, weight in zip(sequences, weights)]
    units = _units(sequences)
    order = sorted(range(len(sequences)), key=lambda i: units[i].astype(">u4").tobytes())
    shared = [0] + [
        _shared(units[i], units[before], sampled[i], sampled[before][1:], apart)
        for before, i in itertools.pairwise(order)
    ]
    result: list[Bundle] = []
    for run in _runs([len(sequences[i]) for i in order], shared, longest, least):
        bundle = Bundle()
        for index in [order[position] for position in run]:
            start = 0
            if bundle.members:
                of_any = bundle.sampled[bundle.slots[-1][:-1]]  # of any member, not just the neighbour
                start = _shared(units[index], units[bundle.members[-1]], sampled[index], of_any, apart)
                if start < least or len(bundle) + len(sequences[index]) - start > longest:
                    result.append(bundle)
                    bundle, start = Bundle(), 0
            bundle.add(index, sampled[index], len(bundle.members) - 1, start)
        result.append(bundle)
    return result


def _runs(lengths: Seq[int], shared: Seq[int], longest: int, least: int) -> list[range]:
    """Cuts a list of sequences into runs that fit. Neighbours that share most are joined first.

    Args:
      shared: number of tokens that each sequence shares with the one before it.
    """
    first, last, size = list(range(len(lengths))), list(range(len(lengths))), list(lengths)
    for position in sorted(range(1, len(lengths)), key=lambda index: -shared[index]):
        begin, end = first[position - 1], last[position]
        together = size[begin] + size[position] - shared[position]
        if shared[position] >= least and together <= longest:
            first[end], last[begin], size[begin] = begin, end, together
    runs, begin = [], 0
    while begin < len(lengths):
        runs.append(range(begin, last[begin] + 1))
        begin = last[begin] + 1
    return runs


def _units(sequences: Seq[Sequence]) -> list[Units]:
    """Per sequence, its tokens as rows. Two rows are equal exactly if the model gets the same input."""
    numbers: dict[str, int] = {}  # number of each picture, from 1
    result = []
    for sequence in sequences:
        shown = np.zeros(len(sequence), np.int32)
        for first, image in sequence.images:
            shown[first : first + image.tokens] = numbers.setdefault(image.digest, len(numbers) + 1)
        result.append(np.column_stack([sequence.tokens, shown, sequence.positions.T]))
    return result


def _shared(units: Units, previous: Units, sampled: np.ndarray, previous_sampled: np.ndarray, apart: float) -> int:
    """How many first tokens of a sequence may share the slots of the previous one: the equal ones, except the last of these.

    Args:
      units: the sequence's tokens (`_units`).
      previous: those of the previous sequence.
      sampled: the log-probabilities of the tokens on which the sequence is trained; NaN for others.
      previous_sampled: for each slot of `previous`, that of the token that it predicts.
      apart: log-probabilities that differ by more part the sequences, if both are trained.
    """
    count = min(len(units), len(previous))
    differs = (units[:count] != previous[:count]).any(1)
    differs[1:] |= np.abs(sampled[1:count] - previous_sampled[: count - 1]) > apart
    equal = int(differs.argmax()) if differs.any() else count
    return equal - 1
