"""Closer looks: regions of the latest picture in a conversation, cut from the raw picture."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterable, Sequence

from routerl_jax.core.types import Shown
from routerl_jax.models.image_tokens import PictureReader
from routerl_jax.models.images import ImageSource, decode_image, encoded_image
from routerl_jax.models.regions import (
    Pixels,
    RefusedRegion,
    RegionRule,
    Size,
    View,
    framed,
    reframed,
    region,
    released_frame,
    widened,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Seen:
    """A picture as it was shown: all of `page`, or the pixels `part` of it, at the size `frame`."""

    page: Shown
    part: Pixels | None
    frame: Size


class Viewer:
    """The pictures that a conversation has shown so far.

    Args:
      images: the model's image reader; None if the model sees no images.
      pictures: the pictures of the prompt, in order.
    """

    def __init__(self, images: PictureReader | None, pictures: Sequence[ImageSource] = ()) -> None:
        self._images = images
        self._pages: dict[str, Shown] = {}  # whole pictures by digest
        self._latest: _Seen | None = None
        self.see(Shown(image=picture) for picture in pictures)

    def copy(self) -> Viewer:
        """One that has seen the same so far."""
        copied = copy.copy(self)
        copied._pages = dict(self._pages)
        return copied

    def see(self, shown: Iterable[Shown]) -> None:
        """Records pictures that have been shown, in order. A crop counts as a crop only if its parent was shown too."""
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
        """(width, height) at which the model sees the latest picture; None if there is none yet."""
        return None if self._latest is None else self._latest.frame

    def reframed(self, box: Sequence[float], written: Size, rule: RegionRule) -> Sequence[float]:
        """A box on the latest picture (a whole one) that was written in another frame, converted to the model's frame.

        A box that is already valid in the model's frame is returned unchanged.

        Args:
          box: the box as it was written.
          written: (width, height) of the frame in which it was written.
          rule: how the model's boxes are read.

        Raises:
          RefusedRegion: no picture has been shown yet, or the box marks no region of it.
          ValueError: the picture can't be read any more.
        """
        if self._latest is None:
            raise RefusedRegion("no picture has been shown yet to look closer at")
        assert self._latest.part is None, "a box in another frame on a crop"
        if written == self._latest.frame and not rule.box_scale:
            with contextlib.suppress(RefusedRegion):
                region(box, self.view(), rule)
                return box
        return reframed(box, decode_image(self._latest.page.image).size, written, self._latest.frame, rule)

    def region(self, box: Sequence[float], rule: RegionRule) -> Shown:
        """A region of the latest picture as a picture to show: a PNG, with its box on the raw picture.

        The raw picture is the parent, however many crops lie between. If it can't be read any more, the result has `error` and
        no picture.

        Args:
          box: the box as the model writes it.
          rule: how boxes are read.

        Raises:
          RefusedRegion: no picture has been shown yet, or the box marks no region of it.
        """
        seen = self._latest_view
        shown = Shown(passage=seen.page.passage, parent=seen.page.digest)
        try:
            picture = decode_image(seen.page.image)
        except ValueError as error:
            return dataclasses.replace(shown, error=str(error))
        cut = region(box, self._box_view(picture.size, rule), rule)
        content, _ = encoded_image(picture.crop(cut))
        return dataclasses.replace(shown, image=content, box=cut)

    def view(self) -> View:
        """The latest picture: the size of its page, the part of the page that it shows, and its frame.

        Raises:
          RefusedRegion: no picture has been shown yet.
          ValueError: the page can't be read any more.
        """
        seen = self._latest_view
        page = decode_image(seen.page.image).size
        return View(page=page, part=seen.part or (0, 0, *page), frame=seen.frame)

    def written(self, pixels: Sequence[float], rule: RegionRule) -> tuple[int, int, int, int]:
        """The box that the model must write so that `region` shows these pixels of the raw page.

        The pixels are clipped to the latest picture, widened to the smallest region that the rule takes (the released rule
        takes any), and rounded outwards.

        Raises:
          RefusedRegion: the part has no area, or is not in the latest picture.
          ValueError: the page can't be read any more.
        """
        view = self._box_view(self.view().page, rule)
        return framed(widened(pixels, view, 0 if rule.released else rule.least), view, rule.box_scale)

    @property
    def _latest_view(self) -> _Seen:
        if self._latest is None or self._images is None:
            raise RefusedRegion("no picture has been shown yet to look closer at")
        return self._latest

    def _box_view(self, page: Size, rule: RegionRule) -> View:
        """The view to which boxes refer under a rule. Under the released rule it is the whole page, in a frame of its own."""
        seen = self._latest_view
        whole = (0, 0, *page)
        part = seen.part or whole
        if not rule.released:
            return View(page=page, part=part, frame=seen.frame)
        assert self._images is not None
        processor, size = self._images.processor, (part[2] - part[0], part[3] - part[1])
        return View(page=page, part=whole, frame=released_frame(size, processor.min_pixels, processor.max_pixels))
