"""Closer looks: regions of the latest picture that a conversation has shown, cut from the raw picture."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from routerl_jax.core.types import Shown
from routerl_jax.models.image_tokens import PictureReader
from routerl_jax.models.images import ImageSource, decode_image, encoded_image
from routerl_jax.models.regions import Pixels, RefusedRegion, RegionRule, Size, View, region, released_frame


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Seen:
    """A picture as it was shown: the whole of `page`, or `part` of it, in its frame."""

    page: Shown
    part: Pixels | None
    frame: Size


class Viewer:
    """What a conversation has shown so far.

    Args:
      images: the model's, None for one that sees none.
      pictures: of the prompt, in order.
    """

    def __init__(self, images: PictureReader | None, pictures: Sequence[ImageSource] = ()) -> None:
        self._images = images
        self._pages: dict[str, Shown] = {}  # whole pictures by digest
        self._latest: _Seen | None = None
        self.see(Shown(image=picture) for picture in pictures)

    def see(self, shown: Iterable[Shown]) -> None:
        """Takes note of what has been shown, in order. A crop counts as one where its parent has been shown, too."""
        for item in shown:
            if self._images is None or item.error or (isinstance(item.image, str) and not item.image):
                continue
            digest, frame = self._images.process(item.image).digest, self._images.frame(item.image)
            if item.box and item.parent in self._pages:
                left, top, right, bottom = map(int, item.box)
                self._latest = _Seen(page=self._pages[item.parent], part=(left, top, right, bottom), frame=frame)
            else:
                page = dataclasses.replace(item, digest=digest)
                self._pages[digest] = page
                self._latest = _Seen(page=page, part=None, frame=frame)

    @property
    def frame(self) -> Size | None:
        """Of the latest picture; None if there is none yet."""
        return None if self._latest is None else self._latest.frame

    def region(self, box: Sequence[float], rule: RegionRule) -> Shown:
        """A region of the latest picture, as a picture to be shown: a PNG, with its box on the raw picture, which is its parent
        however many crops lie between. Where the raw picture can't be read any more, it has `error` and no picture.

        Args:
          box: as the model writes it.
          rule: what becomes of it.

        Raises:
          RefusedRegion: no picture has been shown yet, or the box marks no region of it.
        """
        if self._latest is None or self._images is None:
            raise RefusedRegion("no picture has been shown yet to look closer at")
        seen, processor = self._latest, self._images.processor
        shown = Shown(passage=seen.page.passage, parent=seen.page.digest)
        try:
            picture = decode_image(seen.page.image)
        except ValueError as error:
            return dataclasses.replace(shown, error=str(error))
        part = seen.part or (0, 0, *picture.size)
        frame = seen.frame
        if rule.released:
            frame = released_frame((part[2] - part[0], part[3] - part[1]), processor.min_pixels, processor.max_pixels)
        cut = region(box, View(page=picture.size, part=part, frame=frame), rule)
        content, _ = encoded_image(picture.crop(cut))
        return dataclasses.replace(shown, image=content, box=cut)
