"""Regions of pictures: from the box that a model writes to pixels of the raw picture. No other file computes this.

A model sees a picture in its frame: the size to which the picture was resized (`models.images.smart_resize`). It writes a box
in this frame, or in parts of `box_scale` of each side. The region is cut from the raw picture, so that it is seen at a higher
resolution. A region may be looked into again: its box is then in the frame of that crop, and still cut from the raw picture.

Boxes and pixels are (left, top, right, bottom), sizes (width, height). Raw pictures stand upright
(`models.images.decode_image` applies the EXIF orientation). VRAG-RL (arXiv 2505.22019, section 2.2, equation 2) scales by raw
and encoder size alike, and leaves open what is done with edges, small boxes and rounding.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from fractions import Fraction

from routerl_jax.core.config import Count, NonNegative, checked

Size = tuple[int, int]
Pixels = tuple[int, int, int, int]
Box = tuple[float, float, float, float]

MOST_ASPECT = 200  # of the longer side to the shorter one, in Qwen's smart_resize
_NUMBER = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?([eE][-+]?[0-9]+)?")
_FORM = "write it as [left, top, right, bottom]"


class RefusedRegion(ValueError):
    """A box marks no region that can be looked at. The message says why, in words for who wrote the box."""


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class RegionRule:
    """How a box becomes pixels.

    Attributes:
      box_scale: coordinates run from 0 to this over each side, whatever the picture's size; 0: they are pixels of the frame.
      least: smallest width and height of a region, in pixels of the frame. In a smaller frame it is the frame's own side.
      padding: pixels of the frame that are added on every side, as far as the raw picture reaches.
      released: cut regions as VRAG-RL's published training code does (`released_region`).
    """

    box_scale: NonNegative = 0
    least: Count = 28
    padding: NonNegative = 0
    released: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class View:
    """A raw picture, or a part of it, as a model sees it.

    Attributes:
      page: size of the raw picture.
      part: the pixels of it that are seen.
      frame: the size that the part was resized to.
    """

    page: Size
    part: Pixels
    frame: Size


def read_box(text: str) -> Box:
    """The box in a text, `[left, top, right, bottom]`.

    Raises:
      RefusedRegion: it is anything else.
    """
    text = text.strip()
    if text.startswith("{"):
        raise RefusedRegion(f"the box is an object of JSON; {_FORM}")
    if not (text.startswith("[") and text.endswith("]")):
        raise RefusedRegion(f"the box is no list in brackets; {_FORM}")
    parts = [part.strip() for part in text[1:-1].split(",")]
    if not all(_NUMBER.fullmatch(part) for part in parts):
        raise RefusedRegion(f"the box holds something else than numbers; {_FORM}")
    return _checked_box([float(part) for part in parts])


def region(box: Sequence[float], view: View, rule: RegionRule = RegionRule()) -> Pixels:
    """The pixels of the raw picture that a box in a view marks.

    In this order: the box must be four finite numbers with right > left and bottom > top, and overlap the frame. No corner may
    lie farther outside than the frame is wide or high. What reaches over the edge is left out. The rest must have `rule.least`
    pixels on each side. Then it is mapped to the raw picture exactly, padded as far as that reaches, and rounded outwards. The
    longer side may be at most 200 times the shorter one.

    Raises:
      RefusedRegion: one of these does not hold.
    """
    if rule.released:
        return released_region(box, view, rule)
    width, height = view.frame
    scale = tuple(Fraction(rule.box_scale) or Fraction(side) for side in view.frame)
    corners = _checked_box(box)
    _check_overlap(corners, scale)
    for low, up, side in ((corners[0], corners[2], scale[0]), (corners[1], corners[3], scale[1])):
        if low < -side or up > 2 * side:
            raise RefusedRegion(
                f"the box reaches far outside the picture, whose coordinates end at {_size_text(scale)}; keep it inside"
            )
    # in pixels of the frame, exactly
    left, right = (_clamped(Fraction(x) * width / scale[0], width) for x in (corners[0], corners[2]))
    top, bottom = (_clamped(Fraction(y) * height / scale[1], height) for y in (corners[1], corners[3]))
    if right - left < min(rule.least, width) or bottom - top < min(rule.least, height):
        raise RefusedRegion(
            f"the region of {float(right - left):g} x {float(bottom - top):g} pixels is too small; it needs "
            f"{min(rule.least, width)} x {min(rule.least, height)} of the picture's {width} x {height}"
        )
    pad = Fraction(rule.padding)
    first, above, last, below = view.part
    across, down = Fraction(last - first, width), Fraction(below - above, height)
    cut = _rounded(
        (
            first + (left - pad) * across,
            above + (top - pad) * down,
            first + (right + pad) * across,
            above + (bottom + pad) * down,
        ),
        view.page,
    )
    _check_aspect(cut)
    return cut


def released_region(box: Sequence[float], view: View, rule: RegionRule) -> Pixels:
    """The pixels that VRAG-RL's published training code cuts: of the whole raw picture, also where the latest view is a crop.

    Coordinates are pixels of `view.frame` (`released_frame`, a size before smart-resize) and may not be negative. The padding
    (0 in its training, 28 in its validation) comes first, then scaling, truncation towards zero, and the clamp to the raw
    picture.
    Order and least size are not asked for; a box without any pixel fails there, too.

    Raises:
      RefusedRegion: there are negative numbers, no pixels are left, or one side is over 200 times the other.
    """
    corners = _checked_box(box)
    if min(corners) < 0:
        raise RefusedRegion("the box has negative numbers; keep it inside the picture")
    pads = (-rule.padding, -rule.padding, rule.padding, rule.padding)
    # farther out is outside as well, and its pixels would be no finite numbers
    far = [2 * (side + rule.padding) for side in view.frame * 2]
    left, top, right, bottom = (
        math.trunc(raw * (min(value, most) + pad) / side)
        for value, most, pad, raw, side in zip(corners, far, pads, view.page * 2, view.frame * 2)
    )
    cut = max(0, left), max(0, top), min(view.page[0], right), min(view.page[1], bottom)
    if cut[2] <= cut[0] or cut[3] <= cut[1]:
        raise RefusedRegion(f"the box has no area in the picture of {_size_text(view.frame)} pixels; {_FORM}")
    _check_aspect(cut)
    return cut


def released_frame(size: Size, min_pixels: int, max_pixels: int) -> Size:
    """The size to which VRAG-RL's published code resizes a picture before its processor does: the area within bounds, sides
    truncated. The processor's own frame is up to about an image token wider, narrower, higher or lower.

    Raises:
      RefusedRegion: a side would have no pixel left.
    """
    width, height = size
    for wanted, outside in ((max_pixels, width * height > max_pixels), (min_pixels, width * height < min_pixels)):
        if outside:
            factor = math.sqrt(wanted / (width * height))
            width, height = int(width * factor), int(height * factor)
            if not width or not height:
                raise RefusedRegion(f"the picture of {_size_text(size)} pixels is too narrow")
    return width, height


def framed(pixels: Sequence[float], view: View, box_scale: float = 0) -> Pixels:
    """How a model writes the box of a part of the raw picture: in whole numbers of the view's frame, rounded outwards; `region`
    then gives a part that holds it.

    Args:
      box_scale: see `RegionRule`.

    Raises:
      RefusedRegion: the part has no area, or does not overlap the view.
    """
    left, top, right, bottom = _checked_box(pixels)
    first, above, last, below = view.part
    width, height = (Fraction(box_scale) or side for side in view.frame)
    across, down = Fraction(width) / (last - first), Fraction(height) / (below - above)
    box = (
        (Fraction(left) - first) * across,
        (Fraction(top) - above) * down,
        (Fraction(right) - first) * across,
        (Fraction(bottom) - above) * down,
    )
    _check_overlap(box, (Fraction(width), Fraction(height)))
    return _rounded(box, (math.floor(width), math.floor(height)))


def widened(pixels: Sequence[float], view: View, least: int) -> Box:
    """A part of the raw picture, widened to at least `least` pixels of the view's frame on each side.

    It grows about its middle, and is moved into the view where it would reach beyond. It is never larger than the view.

    Raises:
      RefusedRegion: the part has no area, or does not overlap the view.
    """
    corners = _checked_box(pixels)
    _check_overlap(
        [value - view.part[i % 2] for i, value in enumerate(corners)],
        [view.part[axis + 2] - view.part[axis] for axis in range(2)],
    )
    grown = list(corners)
    for axis in range(2):
        first, last = view.part[axis], view.part[axis + 2]
        needed = min(least * (last - first) / view.frame[axis], last - first)
        low, high = max(corners[axis], first), min(corners[axis + 2], last)
        if high - low < needed:
            low = min(max((low + high - needed) / 2, first), last - needed)
            grown[axis], grown[axis + 2] = low, low + needed
    left, top, right, bottom = grown
    return left, top, right, bottom


def reframed(box: Sequence[float], page: Size, written: Size, frame: Size, rule: RegionRule = RegionRule()) -> Box:
    """A box on a whole picture that was written in one frame, as it is written in another: rounded outwards, and widened to
    `rule.least`, as far as the picture reaches.

    Args:
      page: size of the raw picture.
      written, frame: the sizes at which it was seen, and is seen.

    Raises:
      RefusedRegion: the box marks no region in the frame in which it was written.
    """
    whole = (0, 0, *page)
    part = region(box, View(page=page, part=whole, frame=written), RegionRule(least=0))
    page_view = View(page=page, part=whole, frame=frame)
    return framed(widened(part, page_view, rule.least), page_view, rule.box_scale)


def pixels_within(box: Sequence[float], size: Size) -> Pixels:
    """The pixels of a picture that a box in the picture's own pixels covers.

    The box is clamped to the picture, and fractions are rounded outwards. So every box with an area has at least one pixel.

    Raises:
      RefusedRegion: not four finite numbers, no area (corners swapped, say), or no overlap with the picture.
    """
    corners = _checked_box(box)
    _check_overlap(corners, size)
    return _rounded(corners, size)


def iou(first: Sequence[float], second: Sequence[float]) -> float:
    """Intersection over union of two boxes with areas, in [0, 1]."""
    width, height = (min(first[axis + 2], second[axis + 2]) - max(first[axis], second[axis]) for axis in (0, 1))
    shared = max(width, 0) * max(height, 0)
    return shared / (sum((box[2] - box[0]) * (box[3] - box[1]) for box in (first, second)) - shared)


def _checked_box(box: Sequence[float]) -> Box:
    try:
        numbers = [float(value) for value in box]
    except (TypeError, ValueError, OverflowError) as error:
        raise RefusedRegion(f"the box is not four numbers; {_FORM}") from error
    if len(numbers) != 4:
        raise RefusedRegion(f"the box has {len(numbers)} numbers and needs four numbers; {_FORM}")
    if not all(map(math.isfinite, numbers)):
        raise RefusedRegion(f"the box needs four finite numbers; {_FORM}")
    left, top, right, bottom = numbers
    return left, top, right, bottom


def _check_overlap(box: Sequence[float | Fraction], size: Sequence[float | Fraction]) -> None:
    left, top, right, bottom = box
    if right <= left or bottom <= top:
        raise RefusedRegion(f"the box has no area: right must be more than left, and bottom more than top; {_FORM}")
    if left >= size[0] or top >= size[1] or right <= 0 or bottom <= 0:
        raise RefusedRegion(f"the box lies outside the picture, whose coordinates end at {_size_text(size)}")


def _check_aspect(cut: Pixels) -> None:
    width, height = cut[2] - cut[0], cut[3] - cut[1]
    if max(width, height) > MOST_ASPECT * min(width, height):
        raise RefusedRegion(
            f"the region of {width} x {height} pixels is too narrow; one side may be at most {MOST_ASPECT} times the other"
        )


def _clamped(value: Fraction, side: int) -> Fraction:
    return min(max(value, Fraction(0)), Fraction(side))


def _rounded(box: Sequence[float | Fraction], size: Size) -> Pixels:
    """Outwards, and no farther than the picture."""
    left, top, right, bottom = box
    width, height = size
    return (
        math.floor(max(left, 0)),
        math.floor(max(top, 0)),
        math.ceil(min(right, width)),
        math.ceil(min(bottom, height)),
    )


def _size_text(size: Sequence[float | Fraction]) -> str:
    return " x ".join(f"{float(side):g}" for side in size)
