"""Regions of pictures: sizes, nesting and rounding by properties, pixels beside crops of the raw page, and what is refused."""

import contextlib
import io
import math
import re
from fractions import Fraction

import numpy as np
import pytest
from PIL import Image

from routerl_jax.models.images import decode_image, smart_resize
from routerl_jax.models.regions import (
    MOST_ASPECT,
    Pixels,
    RefusedRegion,
    RegionRule,
    Size,
    View,
    framed,
    pixels_within,
    read_box,
    region,
    released_frame,
    widened,
)

MIN_PIXELS, MAX_PIXELS = 256 * 28 * 28, 512 * 28 * 28  # VRAG-RL's
PLAIN = RegionRule()


def frame_of(part: Pixels) -> Size:
    """What Qwen's processor makes of a part."""
    high, wide = smart_resize(part[3] - part[1], part[2] - part[0], 28, MIN_PIXELS, MAX_PIXELS)
    return wide, high


def seen(page: Size, part: Pixels | None = None) -> View:
    part = part or (0, 0, *page)
    return View(page=page, part=part, frame=frame_of(part))


def drawn_page(rng: np.random.Generator) -> Size:
    wide = int(2 ** rng.uniform(6, 12))
    return wide, int(np.clip(wide * 2 ** rng.uniform(-3, 3), 30, 8000))


def drawn_box(rng: np.random.Generator, frame: Size, least: int = 28) -> tuple[float, ...]:
    """Inside the frame, whole or with fractions."""
    spans = [sorted(rng.uniform(0, side - least, 1).tolist()) for side in frame]
    starts = [span[0] for span in spans]
    ends = [rng.uniform(start + least, side) for start, side in zip(starts, frame)]
    box = (*starts, *ends)
    return (
        tuple(float(math.floor(v) if i < 2 else math.ceil(v)) for i, v in enumerate(box)) if rng.random() < 0.5 else box
    )


def inside(inner: Pixels, outer: Pixels) -> bool:
    return all(a >= b for a, b in zip(inner[:2], outer[:2])) and all(a <= b for a, b in zip(inner[2:], outer[2:]))


def exact(box: tuple[float, ...], view: View) -> list[Fraction]:
    """Equation 2 with the part's offset: a coordinate times raw size over encoder size."""
    left, top, right, bottom = view.part
    return [
        start + Fraction(value) * (end - start) / side
        for value, start, end, side in zip(box, (left, top) * 2, (right, bottom) * 2, view.frame * 2)
    ]


def test_a_region_is_the_least_one_of_whole_pixels_that_holds_the_box() -> None:
    """Over sizes and three levels of nesting; every crop lies in what was seen."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        view = seen(drawn_page(rng))
        for _ in range(3):
            box = drawn_box(rng, view.frame)
            try:
                cut = region(box, view)
            except RefusedRegion as error:
                assert "too narrow" in str(error)  # noqa: PT017 - nothing else is wrong with such a box
                break
            assert inside(cut, view.part)
            for value, wanted, sign in zip(cut, exact(box, view), (-1, -1, 1, 1)):
                assert 0 <= sign * (value - wanted) < 1
            view = seen(view.page, cut)


def test_the_whole_frame_is_the_whole_part() -> None:
    rng = np.random.default_rng(1)
    for scale in (0, 1, 999, 1000):
        for _ in range(100):
            page = drawn_page(rng)
            view = seen(page, region(drawn_box(rng, seen(page).frame), seen(page), RegionRule(least=1)))
            ends = (scale, scale) if scale else view.frame
            assert region((0, 0, *ends), view, RegionRule(box_scale=scale)) == view.part


def test_scaled_coordinates_mark_what_pixels_mark() -> None:
    """Scales that are powers of two, so that the numbers are the same ones."""
    rng = np.random.default_rng(2)
    for _ in range(200):
        view = seen(drawn_page(rng))
        wide, high = view.frame
        left, top, right, bottom = (int(value) for value in drawn_box(rng, (1024, 1024), 256))
        pixels = (left * wide / 1024, top * high / 1024, right * wide / 1024, bottom * high / 1024)
        scaled = RegionRule(box_scale=1024, least=1)
        assert region((left, top, right, bottom), view, scaled) == region(pixels, view, RegionRule(least=1))


def test_a_part_that_is_written_in_the_frame_is_found_again() -> None:
    """Whole numbers of the frame lose less than one of its pixels on each side."""
    rng = np.random.default_rng(3)
    for _ in range(300):
        view = seen(drawn_page(rng))
        view = seen(view.page, region(drawn_box(rng, view.frame), view, RegionRule(least=28)))
        left, top, right, bottom = view.part
        x, y = sorted(rng.integers(left, right + 1, 2)), sorted(rng.integers(top, bottom + 1, 2))
        if x[0] == x[1] or y[0] == y[1]:
            continue
        wanted = (int(x[0]), int(y[0]), int(x[1]), int(y[1]))
        for scale in (0, 1000):
            box = framed(wanted, view, scale)
            try:
                found = region(box, view, RegionRule(box_scale=scale, least=0))
            except RefusedRegion as error:
                assert "too narrow" in str(error)  # noqa: PT017
                continue
            assert inside(wanted, found)
            steps = ((right - left) / (scale or view.frame[0]), (bottom - top) / (scale or view.frame[1])) * 2
            assert all(abs(a - b) < step + 1 for a, b, step in zip(found, wanted, steps))


def test_a_part_that_is_too_small_is_widened() -> None:
    """About its middle, and moved into what is seen; what a model then writes of it is taken, and shows all of it."""
    view = View(page=(1000, 500), part=(200, 100, 600, 300), frame=(100, 50))  # a pixel of the frame is 4 raw ones
    assert widened((300, 150, 500, 290), view, 28) == (300, 150, 500, 290)
    assert widened((390, 190, 410, 210), view, 28) == (344, 144, 456, 256)
    assert widened((205, 110, 225, 290), view, 28) == (200, 110, 312, 290)
    assert widened((150, 110, 210, 120), view, 28) == (200, 100, 312, 212)  # a part of it is not seen
    assert widened((590, 100, 700, 300), view, 28) == (488, 100, 600, 300)
    assert widened((300, 150, 310, 160), view, 1000) == view.part
    for box, why in (((610, 110, 650, 120), "outside"), ((300, 150, 300, 160), "no area")):
        with pytest.raises(RefusedRegion, match=why):
            widened(box, view, 28)
    rng = np.random.default_rng(8)
    for _ in range(200):
        view = seen(drawn_page(rng))
        left, top = (rng.uniform(0, side - 2) for side in view.page)
        part = (left, top, rng.uniform(left + 1, view.page[0]), rng.uniform(top + 1, view.page[1]))
        grown = widened(part, view, PLAIN.least)
        assert all(a <= b for a, b in zip(grown[:2], part[:2]))
        assert all(a >= b for a, b in zip(grown[2:], part[2:]))
        box = framed(grown, view)
        assert min(box[2] - box[0], box[3] - box[1]) >= min(PLAIN.least, *view.frame)
        with contextlib.suppress(RefusedRegion):  # of a narrow page the raw region may be too narrow
            cut = region(box, view)
            assert cut[0] <= part[0]
            assert cut[3] >= part[3]


def test_padding_is_of_the_frame_and_ends_with_the_page() -> None:
    view = View(page=(1000, 2000), part=(100, 200, 500, 1000), frame=(200, 400))  # two raw pixels each
    for padding, cut in {
        0: (200, 400, 300, 600),
        10: (180, 380, 320, 620),
        50.25: (99, 299, 401, 701),  # 99.5 .. 400.5
        500: (0, 0, 1000, 1600),
    }.items():
        assert region((50, 100, 100, 200), view, RegionRule(padding=padding)) == cut


def test_pixels_are_those_of_the_raw_page() -> None:
    """A crop of a crop is cut from the page: no pixel is resampled twice. By hand: 3 raw pixels each, then 1.5."""
    pixels = np.random.default_rng(4).integers(0, 256, (600, 900, 3)).astype(np.uint8)
    page = Image.fromarray(pixels)
    first = region((100, 50, 200, 150), View(page=page.size, part=(0, 0, 900, 600), frame=(300, 200)))
    assert first == (300, 150, 600, 450)
    second = region((10.4, 20, 100, 50), View(page=page.size, part=first, frame=(200, 200)))
    assert second == (315, 180, 450, 225)
    np.testing.assert_array_equal(np.asarray(page.crop(second)), pixels[180:225, 315:450])


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_page_that_lies_on_its_side_is_cut_upright(orientation: int) -> None:
    """What is marked is what is seen, however the file stores it: here the white corner at the top right."""
    upright = np.zeros((120, 80, 3), np.uint8)
    upright[:30, 50:] = 255
    undo = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }
    stored = Image.fromarray(upright)
    if orientation in undo:
        stored = stored.transpose(undo[orientation])
    exif = Image.Exif()
    exif[0x0112] = orientation
    buffer = io.BytesIO()
    stored.save(buffer, "PNG", exif=exif)
    page = decode_image(buffer.getvalue())
    assert page.size == (80, 120)
    view = View(page=page.size, part=(0, 0, *page.size), frame=(160, 240))
    cut = region((100, 0, 160, 60), view)
    assert cut == (50, 0, 80, 30)
    assert np.asarray(page.crop(cut)).min() == 255
    assert np.asarray(page.crop((49, 0, 80, 31))).min() == 0


VIEW = View(page=(2000, 1000), part=(0, 0, 2000, 1000), frame=(400, 200))
REFUSED = {
    (300, 10, 100, 90): "no area: right must be more than left",
    (10, 90, 300, 10): "no area",
    (50, 50, 50, 90): "no area",
    (0, 0, 0, 0): "no area",
    (400, 0, 500, 100): r"outside the picture, whose coordinates end at 400 x 200",
    (10, -90, 80, -3): "outside the picture",
    (0, 0, 1e9, 1e9): "reaches far outside the picture, whose coordinates end at 400 x 200",
    (-1e9, 0, 100, 100): "reaches far outside",
    (1e9, 1e9, 2e9, 2e9): "outside the picture",
    (10, 10, 37, 90): "27 x 80 pixels is too small; it needs 28 x 28",
    (380, 10, 500, 90): "20 x 80 pixels is too small",  # after what reaches over the edge is left out
    (1, 2, 3, 4, 5): "has 5 numbers and needs four",
    (1, 2, 3): "has 3 numbers",
    (): "has 0 numbers",
    (0, 0, math.nan, 90): "four finite numbers",
    (0, 0, math.inf, 90): "four finite numbers",
    ("left", 0, 1, 1): "not four numbers",
    None: "not four numbers",
    (10**400, 0, 1, 1): "not four numbers",
}


@pytest.mark.parametrize("box", REFUSED, ids=str)
def test_boxes_that_mark_nothing(box) -> None:
    with pytest.raises(RefusedRegion, match=REFUSED[box]):
        region(box, VIEW)


def test_the_edges_of_what_is_taken() -> None:
    assert region((10, 10, 38, 38), VIEW) == (50, 50, 190, 190)
    assert region((-400, -200, 800, 400), VIEW) == (0, 0, 2000, 1000)  # as far out as the frame is wide and high
    assert region((372, 0, 800, 28), VIEW) == (1860, 0, 2000, 140)
    strip = View(page=(2000, 1000), part=(0, 500, 2000, 510), frame=(5600, 20))  # lower than what is asked for
    assert region((0, 0, 5600, 20), strip) == (0, 500, 2000, 510)
    with pytest.raises(RefusedRegion, match=r"needs 28 x 20"):
        region((0, 0, 5600, 19), strip)


def test_a_region_that_no_model_can_see_is_refused() -> None:
    view = View(page=(20_100, 1000), part=(0, 0, 20_100, 1000), frame=(20_100, 1000))
    assert region((0, 0, 20_000, 100), view, RegionRule(least=1)) == (0, 0, 20_000, 100)
    with pytest.raises(RefusedRegion, match="20001 x 100 pixels is too narrow; one side may be at most 200 times"):
        region((0, 0, 20_001, 100), view, RegionRule(least=1))
    with pytest.raises(ValueError, match="200 times"):
        smart_resize(100, 20_001, 28, MIN_PIXELS, MAX_PIXELS)
    assert MOST_ASPECT == 200


def test_a_rule_that_can_t_be() -> None:
    for name, value in (("box_scale", -1), ("least", -1), ("padding", -0.5), ("padding", math.inf)):
        with pytest.raises(ValueError, match=name):
            RegionRule(**{name: value})  # type: ignore[arg-type]


# --- what the policy writes ---


@pytest.mark.parametrize(
    ("text", "box"),
    [
        ("[1, 2, 30, 40]", (1, 2, 30, 40)),
        (" [1.5,2.,-3e1,+4]\n", (1.5, 2, -30, 4)),
        ("[0, 0, 1e9, 1e9]", (0, 0, 1e9, 1e9)),
    ],
)
def test_a_box_is_read(text: str, box: tuple[float, ...]) -> None:
    assert read_box(text) == box


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"bbox_2d": [1, 2, 30, 40], "label": "plate"}', "object of JSON"),
        ("the upper left corner", "no list in brackets"),
        ("1, 2, 30, 40", "no list in brackets"),
        ("[left, top, right, bottom]", "something else than numbers"),
        ("[[1, 2], [30, 40]]", "something else than numbers"),
        ("[1, 2, true, 40]", "something else than numbers"),
        ("[1, 2, NaN, 40]", "something else than numbers"),
        ("[1, 2, 3_0, 40]", "something else than numbers"),
        ("[1, 2, ٣٠, 40]", "something else than numbers"),
        ("[1, 2, , 40]", "something else than numbers"),
        ("[]", "something else than numbers"),
        ("", "no list in brackets"),
        ("[1, 2, 30, 40, 50]", "5 numbers"),
        ("[1, 2, 1e999, 40]", "finite"),
        ("[" * 100_000, "no list in brackets"),
        ("[" * 50_000 + "]" * 50_000, "something else than numbers"),
        (f"[{'9' * 5000}, 0, 1, 1]", "finite"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_text_that_is_no_box(text: str, why: str) -> None:
    with pytest.raises(RefusedRegion, match=why) as raised:
        read_box(text)
    assert re.search(r"write it as \[left, top, right, bottom\]$", str(raised.value))
    assert len(str(raised.value)) < 200


# --- the published rule ---

RELEASED = RegionRule(released=True)


def test_the_released_rule_by_hand() -> None:
    """Truncated, and of the whole page also after a crop; too small and unordered boxes are what a decoder makes of them."""
    page = View(page=(1700, 2200), part=(0, 0, 1700, 2200), frame=(556, 719))
    assert region((100, 100, 200, 300), page, RELEASED) == (305, 305, 611, 917)  # 305.8, 305.98, 611.5, 917.9
    crop = View(page=page.page, part=(305, 305, 611, 917), frame=(447, 895))
    assert region((100, 100, 200, 300), crop, RELEASED) == (380, 245, 760, 737)
    assert region((10, 10, 11, 13), page, RELEASED) == (30, 30, 33, 39)
    for far in (1e9, 1e306, 1.7e308):  # the pixels of the last two would be no finite numbers
        assert region((500, 700, far, far), page, RELEASED) == (1528, 2141, 1700, 2200)
        with pytest.raises(RefusedRegion, match="no area"):
            region((far / 2, 0, far, 100), page, RegionRule(released=True, padding=2000))
    for padding, cut in ((28, (220, 220, 697, 1003)), (150, (0, 0, 1070, 1376))):  # before scaling
        assert region((100, 100, 200, 300), page, RegionRule(released=True, padding=padding)) == cut
    for box, why in {
        (-1, 0, 100, 100): "negative",
        (200, 100, 100, 300): "no area",
        (100, 100, 100.05, 300): "no area",
        (600, 0, 700, 100): "no area",
        (0, 0, 500, 1): "1528 x 3 pixels is too narrow",
    }.items():
        with pytest.raises(RefusedRegion, match=why):
            region(box, View(page=(1700, 2200), part=page.part, frame=(556, 719)), RELEASED)


def test_the_released_frame_is_about_what_is_seen() -> None:
    """By hand: sqrt(401408 / 3740000) of 1700 x 2200 and 4.48 of 100 x 100, which is a little less in floats; and
    over sizes: seldom is a side an image token off, as where the processor has to enlarge what was made a little too small."""
    assert released_frame((1700, 2200), MIN_PIXELS, MAX_PIXELS) == (556, 720)
    assert released_frame((100, 100), MIN_PIXELS, MAX_PIXELS) == (447, 447)
    assert released_frame((600, 500), MIN_PIXELS, MAX_PIXELS) == (600, 500)
    rng, off = np.random.default_rng(5), []
    for _ in range(300):
        page = drawn_page(rng)
        resized = released_frame(page, MIN_PIXELS, MAX_PIXELS)
        off.append(max(abs(a - b) for a, b in zip(resized, frame_of((0, 0, *resized)))))
    assert max(off) < 2 * 28
    assert np.mean(np.asarray(off) >= 28) < 0.1
    with pytest.raises(RefusedRegion, match="20000 x 1 pixels is too narrow"):
        released_frame((20_000, 1), 1, 10_000)


def test_pixels_within_a_picture() -> None:
    assert pixels_within((2.5, 3.5, 2.75, 5.25), (64, 48)) == (2, 3, 3, 6)
    assert pixels_within((-1e9, -1e9, 1e9, 1e9), (64, 48)) == (0, 0, 64, 48)
