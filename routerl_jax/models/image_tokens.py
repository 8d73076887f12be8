"""Images among tokens, on the host: the ids that stand for them, their number, and their rotary positions."""

from __future__ import annotations

import collections
import math
import os
from collections.abc import Hashable, Sequence
from typing import Any, Protocol

import numpy as np
from jaxtyping import Bool, Int, Int32

from routerl_jax.core.types import PlacedImage
from routerl_jax.models.config import VisionLanguageConfig
from routerl_jax.models.images import ImageProcessor, ImageSource, is_data
from routerl_jax.models.patches import ImagePatches
from routerl_jax.models.regions import Size

_TEXT = -1  # an id that marks no image
_KEPT_BYTES = 2**30  # size of the cache of processed pictures, keys included; a page of four megapixels takes 100 MB


class PictureReader(Protocol):
    """How a policy sees pictures: the part of `ImageTokens` that agents use. See there for the methods."""

    @property
    def processor(self) -> ImageProcessor:
        """The image processor, which determines the size of a picture."""
        ...

    @property
    def marker(self) -> list[int]:
        """Ids that stand for a picture."""
        ...

    def process(self, source: ImageSource, name: str | None = None) -> PlacedImage:
        """A picture as the policy sees it."""
        ...

    def frame(self, source: ImageSource, name: str | None = None) -> Size:
        """(width, height) at which it sees it."""
        ...


class ImageTokens:
    """The host's processing of images for a vision-language model. `VisionLanguageModel.image_tokens` makes it.

    Args:
      config: configuration with the ids that mark images.
      processor: maps pictures to patches.
    """

    def __init__(self, config: VisionLanguageConfig, processor: ImageProcessor) -> None:
        self.config = config
        self.processor = processor
        self._processed: collections.OrderedDict[Hashable, tuple[ImageSource, ImagePatches]] = collections.OrderedDict()
        self._bytes = 0  # that they take

    @property
    def marker(self) -> list[int]:
        """The ids that stand for an image in a prompt, before `expand`."""
        return [self.config.vision_start_id, self.config.image_id, self.config.vision_end_id]

    def process(self, source: ImageSource | ImagePatches, name: str | None = None) -> ImagePatches:
        """Patches of a picture. A cache keeps the last ones. So a group of samples processes its picture only once, also if a
        knowledge base returns it repeatedly.

        The cache's key is the content of encoded pictures; path, size and modification time of files; the identity of arrays
        and PIL images. So don't change an array or PIL image that has been used; change a copy.

        Raises:
          ValueError: the picture can't be used; names it.
        """
        if isinstance(source, ImagePatches):
            return source
        key = _identity(source)
        if key not in self._processed:
            image = self.processor(source, name=name)
            self._processed[key] = source, image
            self._bytes += _size(source, image)
            while len(self._processed) > 1 and self._bytes > _KEPT_BYTES:
                self._bytes -= _size(*self._processed.popitem(last=False)[1])
        self._processed.move_to_end(key)
        return self._processed[key][1]

    def frame(self, source: ImageSource, name: str | None = None) -> Size:
        """(width, height) in pixels of the resized picture that the model sees (`models.regions`).

        Raises:
          ValueError: see `process`.
        """
        _, rows, columns = self.process(source, name).grid
        return columns * self.processor.patch_size, rows * self.processor.patch_size

    def expand(self, tokens: Sequence[int], images: Sequence[ImagePatches]) -> tuple[list[int], list[int]]:
        """Repeats the image token of each image, once per feature of the image. Gives the tokens, and where each image starts.

        If there are more image tokens than images, the images are at the first whole `marker`s, and the other image tokens are
        text. A policy, or a page that it has read, may have written such marks.

        Raises:
          ValueError: there are not enough image tokens, or nothing follows the last image.
        """
        tokens = [int(token) for token in tokens]
        indices = [index for index, token in enumerate(tokens) if token == self.config.image_id]
        description = f"{len(indices)} image tokens (id {self.config.image_id})"
        if len(indices) > len(images):
            marked = [index for index in indices if tokens[max(index - 1, 0) : index + 2] == self.marker]
            indices = marked[: len(images)]
            description = f"{len(indices)} whole image marks ({self.marker})"
        if len(indices) != len(images):
            raise ValueError(f"{description} stand for {len(images)} images; put one where each image belongs")
        if indices and indices[-1] == len(tokens) - 1:
            raise ValueError("tokens end with an image; let the token that ends images follow it")
        result: list[int] = []
        starts: list[int] = []
        consumed = 0
        for index, image in zip(indices, images):
            result += tokens[consumed:index]
            starts.append(len(result))
            result += [self.config.image_id] * image.tokens
            consumed = index + 1
        return result + tokens[consumed:], starts

    def fed(self, tokens: Sequence[int], images: Sequence[ImageSource], start: int = 0) -> dict[str, Any]:
        """Arguments of `core.ledger.Ledger.feed` for tokens with these images at their markers, from position `start`.

        Raises:
          ValueError: see `process` and `expand`.
        """
        placed = [self.process(image) for image in images]
        expanded, starts = self.expand(tokens, placed)
        positions, after = self.positions(expanded, placed, start, starts)
        return {
            "tokens": expanded,
            "positions": positions,
            "next_position": after,
            "images": list(zip(starts, placed)),
        }

    def positions(
        self,
        tokens: Sequence[int],
        images: Sequence[ImagePatches],
        start: int = 0,
        starts: Sequence[int] | None = None,
    ) -> tuple[Int32[np.ndarray, "3 T"], int]:
        """Rotary positions of expanded tokens with these images, and the position of the next token.

        Args:
          start: position of the first token.
          starts: indices where the images start. Image tokens elsewhere are text; by default there are none elsewhere.
        """
        ids = np.asarray(tokens, np.int32)
        if starts is not None:
            image_tokens = np.zeros(len(ids), bool)
            for first, image in zip(starts, images, strict=True):
                image_tokens[first : first + image.tokens] = True
            ids = np.where(image_tokens, ids, _TEXT)
        return mrope_positions(
            ids,
            [image.grid for image in images],
            image_token_id=self.config.image_id,
            merge=self.config.vision.merge,
            start=start,
        )


def _identity(source: ImageSource) -> Hashable:
    """The cache key of a picture. Equal encoded pictures have the same key, independent of their source."""
    if isinstance(source, bytes | bytearray):
        return bytes(source)
    if isinstance(source, str | os.PathLike):
        if is_data(source):
            return source
        try:
            stat = os.stat(source)
        except OSError:
            return os.fspath(source)  # whoever reads it says what is wrong
        return os.fspath(source), stat.st_size, stat.st_mtime_ns
    return id(source)  # which stays its own for as long as the picture is kept


def _size(source: ImageSource, image: ImagePatches) -> int:
    return image.patches.nbytes + (len(source) if isinstance(source, bytes | bytearray | str) else 0)


Grid = tuple[int, int, int]


def mrope_positions(
    tokens: Int[np.ndarray, " T"] | Sequence[int],
    grids: Sequence[Grid],
    *,
    image_token_id: int,
    merge: int,
    start: int = 0,
    mask: Bool[np.ndarray, " T"] | None = None,
) -> tuple[Int32[np.ndarray, "3 T"], int]:
    """Positions (time, row, column) of tokens, and the position of the token that comes next.

    M-RoPE (Qwen2-VL, arXiv 2409.12191, section 2.1); the rotation by them is in layers.py. Text advances on all three axes. The
    tokens of an image share one time; the second axis counts rows, and the third columns. The text after an image continues
    from the largest of these positions.

    A sequence may be given in pieces: pass the second result to the next call as `start`. All tokens of an image must be in one
    piece. For still images the positions are those of transformers' `get_rope_index`.

    Args:
      tokens: ids.
      grids: (frames, rows, columns) in patches of the images in `tokens`, in order.
      image_token_id: stands once for every merged patch of an image.
      merge: side of a merge group, in patches.
      start: position of the first token.
      mask: False on padding, which gets position 0 and is not counted.

    Raises:
      ValueError: image tokens and grids do not match.
    """
    tokens = np.asarray(tokens)
    if mask is not None:
        mask = np.asarray(mask, bool)
        result = np.zeros((3, len(tokens)), np.int32)
        result[:, mask], start = mrope_positions(
            tokens[mask], grids, image_token_id=image_token_id, merge=merge, start=start
        )
        return result, start
    counts = [math.prod(grid) // merge**2 for grid in grids]
    indices = np.flatnonzero(tokens == image_token_id)
    if len(indices) != sum(counts):
        raise ValueError(
            f"{len(indices)} image tokens, but the grids {list(grids)} of {len(grids)} images take {sum(counts)}; give the "
            f"grids of exactly the images in these tokens, and never cut an image's tokens"
        )
    result = np.empty((3, len(tokens)), np.int32)
    consumed = consumed_image = 0  # tokens, and image tokens among them
    for number, (grid, count) in enumerate(zip(grids, counts)):
        first = int(indices[consumed_image])
        if indices[consumed_image + count - 1] != first + count - 1:
            raise ValueError(
                f"image {number} of grid {tuple(grid)} needs {count} image tokens in a row from token {first}; "
                f"other tokens stand among them"
            )
        result[:, consumed:first] = np.arange(start, start + first - consumed)
        start += first - consumed
        frames, rows, columns = grid[0], grid[1] // merge, grid[2] // merge
        result[:, first : first + count] = start + np.indices((frames, rows, columns)).reshape(3, count)
        start += max(frames, rows, columns)
        consumed, consumed_image = first + count, consumed_image + count
    result[:, consumed:] = np.arange(start, start + len(tokens) - consumed)
    return result, start + len(tokens) - consumed
