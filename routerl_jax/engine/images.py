"""Images of the rows that a call feeds: gathered per shard, encoded once, and looked up token by token."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int32

from routerl_jax.engine.policy import Stream
from routerl_jax.models.config import VisionConfig
from routerl_jax.models.patches import ImagePatches, VisionInputs, array_size, place_images
from routerl_jax.parallel.mesh import batch_sharding, batch_shards

MOST_PATCHES = 16_384  # of a shard in a call, unless a single conversation needs more


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncodedImages:
    """Features of images on the devices, and the index of each image's features within its shard.

    Attributes:
      values: F features of every shard.
      slots: for (shard, digest of an image), the index of the feature of each of its tokens.
    """

    values: Float[Array, "D F E"] | Float[Array, "D F N E"]
    slots: dict[tuple[int, str], Int32[np.ndarray, " tokens"]]

    def index(self, stream: Stream, start: int, stop: int) -> Int32[np.ndarray, " T"]:
        """For tokens `start` to `stop` of a conversation, the indices of their features; -1 for text."""
        assert stream.row is not None
        result = np.full(stop - start, -1, np.int32)
        for first, image in stream.ledger.images:
            slots = self.slots.get((stream.row[0], image.digest))
            if slots is None:  # its tokens are cached
                continue
            inside = np.arange(max(first, start), min(first + image.tokens, stop))
            result[inside - start] = slots[inside - first]
        return result


def pending_images(stream: Stream) -> list[ImagePatches]:
    """The images of a conversation that have tokens which are not cached yet."""
    images = cast(list[tuple[int, ImagePatches]], stream.ledger.images)
    return [image for first, image in images if first + image.tokens > stream.cached]


def in_batches(streams: Sequence[Stream]) -> Iterator[list[Stream]]:
    """Splits conversations, in order, into groups whose images fit into one call."""
    group: list[Stream] = []
    patches: dict[int, dict[str, int]] = {}  # per shard, number of patches of each image
    for stream in streams:
        assert stream.row is not None
        own = {image.digest: len(image.patches) for image in pending_images(stream)}
        together = patches.get(stream.row[0], {}) | own
        if group and sum(together.values()) > MOST_PATCHES:
            yield group
            group, patches, together = [], {}, own
        group.append(stream)
        patches[stream.row[0]] = together
    if group:
        yield group


def gather(streams: Sequence[Stream], config: VisionConfig, mesh: Mesh, dtype: Any) -> tuple[VisionInputs, dict]:
    """The images of conversations as inputs of the tower, [D, P, ...], and the slots of `EncodedImages`."""
    shards = batch_shards(mesh)
    images: list[dict[str, ImagePatches]] = [{} for _ in range(shards)]
    for stream in streams:
        assert stream.row is not None
        images[stream.row[0]] |= {image.digest: image for image in pending_images(stream)}
    slots = {}
    most = 0
    for shard, group in enumerate(images):
        start = 0
        for digest, image in group.items():
            slots[shard, digest] = image.slots + start // config.group
            start += len(image.patches)
        most = max(most, start)
    size = array_size(most, config, growth=4)
    groups = {(shard,): list(group.values()) for shard, group in enumerate(images)}
    return place_images(groups, (shards,), size, config, dtype, batch_sharding(mesh)), slots
