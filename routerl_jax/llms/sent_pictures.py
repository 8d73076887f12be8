"""Pictures on their way to a chat model: brought to a size here, so that everybody knows what the model sees."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import io
from collections.abc import Sequence
from typing import Any

from PIL import Image

from routerl_jax.core.types import Failure, PlacedImage
from routerl_jax.generation.policy import TurnFailed
from routerl_jax.llms import faults
from routerl_jax.models.images import ImageProcessor, ImageSource, decode_image, image_digest
from routerl_jax.models.regions import Size

_KEPT = 256  # pictures; those of a page are shown again and again


class UnusablePicture(TurnFailed, ValueError):
    """A picture can't be read. In an observation words stand in its place, as for every ValueError of a picture; one that the
    question is about ends the episode."""

    def __str__(self) -> str:
        return self.failure.message


@dataclasses.dataclass(frozen=True)
class SentPicture:
    """A picture as it is sent: a PNG of `frame` (width, height) pixels, counted as `tokens`."""

    content: bytes
    frame: Size
    tokens: int
    digest: str


class SentPictures:
    """A `models.image_tokens.PictureReader` for endpoints.

    A picture gets the size that Qwen2.5-VL's processor gives it, so that such a model behind the endpoint resizes nothing, and
    boxes that it writes are in the frame that we know. Other models may see it smaller: of those, boxes are right in relative
    coordinates alone (`RegionRule.box_scale`).

    Args:
      processor: whose sizes, and tokens by area, these are.
      mark: id that stands for a picture.
    """

    def __init__(self, processor: ImageProcessor, mark: int) -> None:
        self.processor = processor
        self._mark = mark
        self._sent: collections.OrderedDict[str, SentPicture] = collections.OrderedDict()

    @property
    def marker(self) -> list[int]:
        """One id."""
        return [self._mark]

    def process(self, source: ImageSource, name: str | None = None) -> SentPicture:
        """The picture as it is sent. Raises UnusablePicture that names it."""
        try:
            key = image_digest(source)
            if key not in self._sent:
                self._sent[key] = self._made(source, name)
        except ValueError as error:
            raise UnusablePicture(Failure(kind=faults.PICTURE, message=str(error))) from error
        self._sent.move_to_end(key)
        if len(self._sent) > _KEPT:
            self._sent.popitem(last=False)
        return self._sent[key]

    def frame(self, source: ImageSource, name: str | None = None) -> Size:
        """(width, height) in pixels of the picture that is sent."""
        return self.process(source, name).frame

    def fed(self, tokens: Sequence[int], images: Sequence[ImageSource]) -> dict[str, Any]:
        """What `Ledger.feed` takes for tokens with these pictures at their marks.

        Raises:
          UnusablePicture: a picture can't be read.
          ValueError: there are not as many marks.
        """
        placed = [self.process(image) for image in images]
        marks = [i for i, token in enumerate(tokens) if token == self._mark]
        if len(marks) != len(placed):
            raise ValueError(f"{len(marks)} marks stand for {len(placed)} pictures; put one where each picture belongs")
        result: list[int] = []
        starts: list[tuple[int, PlacedImage]] = []
        waiting = iter(placed)
        for token in tokens:
            if token != self._mark:
                result.append(token)
                continue
            picture = next(waiting)
            starts.append((len(result), picture))
            result += [token] * picture.tokens
        return {"tokens": result, "images": starts}

    def _made(self, source: ImageSource, name: str | None) -> SentPicture:
        image = decode_image(source, name=name)
        processor = self.processor
        _, rows, columns = processor.grid(image.height, image.width, name=name or "image")
        frame = columns * processor.patch_size, rows * processor.patch_size
        out = io.BytesIO()
        resized = image if image.size == frame else image.resize(frame, Image.Resampling.BICUBIC)
        resized.save(out, format="PNG", compress_level=1)
        content = out.getvalue()
        tokens = processor.tokens(image.height, image.width)
        return SentPicture(content, frame, tokens, hashlib.sha256(content).hexdigest())
