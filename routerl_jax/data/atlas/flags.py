"""Flags: the real ones that ship with Atlas, made-up ones for invented countries, and their pictures in questions."""

from __future__ import annotations

import base64
import dataclasses
import functools
import io
import itertools
import pathlib
import zipfile
import zlib

import numpy as np
from PIL import Image, ImageDraw

FLAGS = pathlib.Path(__file__).with_name("flags.zip")  # PNGs, 100 pixels wide, by name of the country
COLOURS = {
    "red": (206, 17, 38),
    "blue": (0, 56, 147),
    "light blue": (117, 170, 219),
    "green": (0, 122, 61),
    "yellow": (252, 209, 22),
    "orange": (255, 130, 0),
    "white": (255, 255, 255),
    "black": (16, 16, 16),
}
# How often real flags have each colour, about.
OFTEN = {"red": 5, "blue": 3, "light blue": 1, "green": 3, "yellow": 3, "orange": 1, "white": 4, "black": 2}
_COUNTS = {2: "two", 3: "three", 4: "four", 5: "five"}
_SIZE = (100, 67)  # pixels


def flag(country: str) -> bytes:
    """The PNG of a real country's flag. Raises KeyError for a name without one."""
    return _flags()[country]


@functools.cache
def _flags() -> dict[str, bytes]:
    with zipfile.ZipFile(FLAGS) as archive:
        return {name.removesuffix(".png"): archive.read(name) for name in archive.namelist()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Design:
    """The design of a made-up flag: horizontal or vertical bands of colours, and perhaps a sign in the middle.

    `str(design)` describes it in words.
    """

    bands: tuple[str, ...]
    across: bool
    sign: str
    colour: str

    def __str__(self) -> str:
        lie = "horizontal" if self.across else "vertical"
        text = f"{_COUNTS[len(self.bands)]} {lie} bands of {', '.join(self.bands[:-1])} and {self.bands[-1]}"
        return f"{text} with a {self.sign} of {self.colour} in the center" if self.sign else text


def invented_design(country: str) -> Design:
    """The design of a made-up country's flag, a function of the country's name."""
    rng = np.random.default_rng([4, zlib.crc32(country.encode())])
    names = list(COLOURS)
    count = int(rng.integers(2, 6))
    across = bool(rng.random() < 0.6)
    bands = [names[i] for i in rng.integers(len(names), size=count)]
    while any(first == second for first, second in itertools.pairwise(bands)):
        bands = [names[i] for i in rng.integers(len(names), size=count)]
    sign = str(rng.choice(["", "", "disk", "square", "cross"]))
    colour = names[int(rng.integers(len(names)))] if sign else ""
    return Design(bands=tuple(bands), across=across, sign=sign, colour=colour)


def invented_flag(country: str) -> bytes:
    """The PNG of a made-up country's flag."""
    design = invented_design(country)
    picture = Image.new("RGB", _SIZE)
    draw = ImageDraw.Draw(picture)
    for i, band in enumerate(design.bands):
        edges = [round(_SIZE[design.across] * position / len(design.bands)) for position in (i, i + 1)]
        box = (0, edges[0], _SIZE[0], edges[1]) if design.across else (edges[0], 0, edges[1], _SIZE[1])
        draw.rectangle(box, fill=COLOURS[band])
    if design.sign:
        (wide, high), colour = _SIZE, COLOURS[design.colour]
        x, y, r = wide // 2, high // 2, high // 5
        if design.sign == "cross":
            draw.rectangle((0, y - r // 2, wide, y + r // 2), fill=colour)
            draw.rectangle((x - r // 2, 0, x + r // 2, high), fill=colour)
        elif design.sign == "disk":
            draw.ellipse((x - r, y - r, x + r, y + r), fill=colour)
        else:
            draw.rectangle((x - r, y - r, x + r, y + r), fill=colour)
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()


def photographed(png: bytes, key: str, pixels: int = 0) -> bytes:
    """A picture of the flag (JPEG) as somebody might take it: another size and proportion, with cut margins. `key` determines
    all of these.

    Args:
      pixels: most pixels of the picture; 0: no limit.
    """
    rng = np.random.default_rng([5, zlib.crc32(key.encode())])
    with Image.open(io.BytesIO(png)) as file:
        picture = file.convert("RGB")
    width, height = picture.size
    left, top, right, bottom = rng.uniform(0, 0.04, 4)
    box = (left * width, top * height, (1 - right) * width, (1 - bottom) * height)
    scale, stretch = rng.uniform(0.7, 1.7), rng.uniform(0.95, 1.05)
    size = (round(width * scale * stretch), round(height * scale))
    if pixels and size[0] * size[1] > pixels:
        shrink = (pixels / (size[0] * size[1])) ** 0.5
        size = (int(size[0] * shrink), int(size[1] * shrink))
    buffer = io.BytesIO()
    picture.resize(size, Image.Resampling.BICUBIC, box).save(buffer, "JPEG", quality=int(rng.integers(50, 91)))
    return buffer.getvalue()


def data_uri(png: bytes) -> str:
    """A PNG as a `data:` URI, the form of pictures in corpora and passages."""
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"
