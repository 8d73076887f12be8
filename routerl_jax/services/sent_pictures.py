"""Prepares pictures for chat models. They are resized here, so that the size that the model sees is known."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import io
from collections.abc import Sequence
from typing import Any

from PIL import Image

from routerl_jax.core.types import Failure, PlacedImage
from routerl_jax.engine.policy import TurnFailed
from routerl_jax.models.images import ImageProcessor, ImageSource, decode_image, image_digest
from routerl_jax.models.regions import Size
from routerl_jax.services import faults

_KEPT = 256  # pictures that are kept, because the same page is often shown again


class UnusablePicture(TurnFailed, ValueError):
    """A picture can't be read. In an observation, words replace it, as for every ValueError of a picture. If it is one of the
    question's pictures, the episode ends."""

    def __str__(self) -> str:
        return self.failure.message


@dataclasses.dataclass(frozen=True)
class SentPicture:
    """A picture as it is sent: a PNG of `frame` (width, height) pixels that counts as `tokens` tokens."""

    content: bytes
    frame: Size
    tokens: int
    digest: str


class SentPictures:
    """A `models.image_tokens.PictureReader` for endpoints.

    A picture gets the size that Qwen2.5-VL's processor gives it. A Qwen2.5-VL model behind the endpoint then resizes nothing,
    and the boxes that it writes are in a frame that we know. Other models may see the picture smaller; their boxes are right
    in relative coordinates only (`RegionRule.box_scale`).

    Args:
      processor: decides the size of a picture and its number of tokens.
      mark: token id that stands for a picture.
    """

    def __init__(self, processor: ImageProcessor, mark: int) -> None:
        self.processor = processor
        self._mark = mark
        self._sent: collections.OrderedDict[str, SentPicture] = collections.OrderedDict()

    @property
    def marker(self) -> list[int]:
        """The one id that stands for a picture."""
        return [self._mark]

    def process(self, source: ImageSource, name: str | None = None) -> SentPicture:
        """The picture as it is sent. Raises UnusablePicture, which names the picture."""
        try:
            key = image_digest(source)
            if key not in self._sent:
                self._sent[key] = self._encoded(source, name)
        except ValueError as error:
            raise UnusablePicture(Failure(kind=faults.PICTURE, message=str(error))) from error
        self._sent.move_to_end(key)
        if len(self._sent) > _KEPT:
            self._sent.popitem(last=False)
        return self._sent[key]

    def frame(self, source: ImageSource, name: str | None = None) -> Size:
        """(width, height) in pixels of the picture as it is sent."""
        return self.process(source, name).frame

    def fed(self, tokens: Sequence[int], images: Sequence[ImageSource]) -> dict[str, Any]:
        """The arguments of `Ledger.feed` for tokens with these pictures at their marks.

        Raises:
          UnusablePicture: a picture can't be read.
          ValueError: the number of marks differs from the number of pictures.
        """
        pictures = [self.process(image) for image in images]
        marks = [i for i, token in enumerate(tokens) if token == self._mark]
        if len(marks) != len(pictures):
            raise ValueError(
                f"{len(marks)} marks stand for {len(pictures)} pictures; put one where each picture belongs"
            )
        fed_tokens: list[int] = []
        starts: list[tuple[int, PlacedImage]] = []
        remaining = iter(pictures)
        for token in tokens:
            if token != self._mark:
                fed_tokens.append(token)
                continue
            picture = next(remaining)
            starts.append((len(fed_tokens), picture))
            fed_tokens += [token] * picture.tokens
        return {"tokens": fed_tokens, "images": starts}

    def _encoded(self, source: ImageSource, name: str | None) -> SentPicture:
        image = decode_image(source, name=name)
        processor = self.processor
        _, rows, columns = processor.grid(image.height, image.width, name=name or "image")
        frame = columns * processor.patch_size, rows * processor.patch_size
        buffer = io.BytesIO()
        resized = image if image.size == frame else image.resize(frame, Image.Resampling.BICUBIC)
        resized.save(buffer, format="PNG", compress_level=1)
        content = buffer.getvalue()
        tokens = processor.tokens(image.height, image.width)
        return SentPicture(content, frame, tokens, hashlib.sha256(content).hexdigest())
