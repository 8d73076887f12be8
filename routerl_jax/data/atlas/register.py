"""A register, as page images of nine cells with entries. Small print needs a closer look, large print does not.

Every country has three pages, about its post, its railways and its sea trade, of 252 x 252 pixels:

    nine cells     three by three, numbered from 0, row by row
    four entries   one for each fact of the topic, in cells drawn for the page
    an entry       the fact's mark (a capital letter), the number of its cell, and the fact's code (another capital letter)

A page is seen at 84 x 84, as three by three image tokens: one for each cell. In large print all signs of an entry are 11
pixels high there. In small print the code is 2 pixels high; the crop of a cell is seen at 84 x 84, with the code in a token of
its own.

Codes, cells and print are drawn for each page, and are known from nothing else. All of this is a function of country and
topic. A search finds pages only by their titles. Questions are in `register_questions`.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import io
import itertools
import pathlib
import zlib
from collections.abc import Iterator, Mapping
from typing import Literal

import numpy as np
from PIL import Image, ImageDraw

from routerl_jax.core.types import Example, Passage
from routerl_jax.data.atlas import known, world
from routerl_jax.data.atlas.pages import PAPER, Box, figure_font

Print = Literal["small", "large"]

REGISTER = "register"  # the part of Atlas that is `register_passages`
CELL = 84  # pixels of the page that are one image token of the whole page
ACROSS = 3  # cells in a row, and rows
SIZE = (CELL * ACROSS, CELL * ACROSS)
PRINTS: Mapping[Print, int] = {"small": 6, "large": 33}  # height in pixels of a code
SMALL_SHARE = 0.6  # of the pages that are in small print
TOPICS: Mapping[str, Mapping[str, str]] = {  # the facts of a topic, by their marks
    "post": {"L": "letter", "P": "parcel", "S": "stamp", "B": "box"},
    "rail": {"F": "fare", "G": "gauge", "T": "track", "Y": "yard"},
    "sea": {"D": "dock", "C": "crane", "M": "mole", "W": "wharf"},
}
MARKS: Mapping[str, str] = {mark: topic for topic, facts in TOPICS.items() for mark in facts}  # with their topics
CODES = "EHJKNQRUVXZ"  # letters that are no marks and no article, and none that looks like another
ASKED = ("code", "cell", "code", "codes")  # they take turns
WORDINGS: Mapping[str, tuple[str, str]] = {
    "code": ("What is the {noun} code of {name}?", "{name}: what is its {noun} code?"),
    "cell": ("In which cell is the {noun} code of {name}?", "{name}: in which cell is its {noun} code?"),
    "codes": ("What are the {noun} codes of {name} and {other}?", "{name} and {other}: what are their {noun} codes?"),
}
_INK = (24, 22, 18)
_SIGN = 33  # height in pixels of marks and numbers of cells
# Middles of signs within a cell. A cell is two by two patches of the whole page, and three by three tokens of a crop.
_MARK_AT, _NUMBER_AT = (21, 21), (63, 21)
_CODE_AT: Mapping[Print, tuple[int, int]] = {"small": (14, 70), "large": (21, 63)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RegisterPage:
    """The content of a page: its marks, and the cell and the code of each."""

    country: str
    topic: str
    marks: tuple[str, ...]
    cells: tuple[int, ...]
    codes: tuple[str, ...]
    print: Print

    @property
    def id(self) -> str:
        return f"{REGISTER}/{self.country}/{self.topic}"

    @property
    def title(self) -> str:
        return title(self.country, self.topic)

    @property
    def file(self) -> str:
        """A unique file name for its picture. It differs for another country, topic, or version of the drawing code."""
        return f"{REGISTER}-{_version()}/{self.country.replace(' ', '_')}-{self.topic}.png"

    def entry(self, mark: str) -> tuple[int, str]:
        """Cell and code of a mark. Raises ValueError if the page has no such mark."""
        index = self.marks.index(mark)
        return self.cells[index], self.codes[index]

    def box(self, mark: str) -> Box:
        """The cell of a mark: left, top, right, bottom in pixels of the page."""
        left, top = (CELL * index for index in grid_position(self.entry(mark)[0]))
        return left, top, left + CELL, top + CELL


def grid_position(cell: int) -> tuple[int, int]:
    """Column and row of a cell."""
    row, column = divmod(cell, ACROSS)
    return column, row


def title(country: str, topic: str) -> str:
    """The title of a page, which is also the query that finds it."""
    return f"{country}: {topic}"


@functools.lru_cache(4096)
def register_page(country: str, topic: str) -> RegisterPage:
    """The page of a country about a topic. Raises ValueError for another topic."""
    if topic not in TOPICS:
        raise ValueError(f"the register has no pages about {topic!r}; it has {', '.join(TOPICS)}")
    rng = np.random.default_rng([13, zlib.crc32(f"{country}/{topic}".encode())])
    return drawn_page(country, topic, rng)


def drawn_page(country: str, topic: str, rng: np.random.Generator) -> RegisterPage:
    """A page whose cells, codes and print are drawn. The codes of a page differ."""
    marks = tuple(TOPICS[topic])
    return RegisterPage(
        country=country,
        topic=topic,
        marks=marks,
        cells=tuple(rng.choice(ACROSS**2, len(marks), replace=False).tolist()),
        codes=tuple(CODES[i] for i in rng.choice(len(CODES), len(marks), replace=False)),
        print="small" if rng.random() < SMALL_SHARE else "large",
    )


def draw(page: RegisterPage) -> Image.Image:
    """The page as a picture, RGB, 252 x 252."""
    paper = Image.new("RGB", SIZE, PAPER)
    heights = itertools.cycle((_SIGN, _SIGN, PRINTS[page.print]))
    for (sign, middle), height in zip(middles(page), heights):
        write(paper, sign, height, middle)
    return paper


def middles(page: RegisterPage) -> Iterator[tuple[str, tuple[int, int]]]:
    """The signs of the page, mark, number and code of each entry in turn, each with its middle in pixels: (x, y)."""
    for mark, cell, code in zip(page.marks, page.cells, page.codes, strict=True):
        column, row = grid_position(cell)
        for sign, (x, y) in ((mark, _MARK_AT), (str(cell), _NUMBER_AT), (code, _CODE_AT[page.print])):
            yield sign, (column * CELL + x, row * CELL + y)


def write(paper: Image.Image, sign: str, height: int, middle: tuple[float, float]) -> None:
    """Writes a capital letter or digit of a height in pixels, centred on a point."""
    ImageDraw.Draw(paper).text(
        (middle[0], middle[1] + height / 2), sign, font=figure_font(height), fill=_INK, anchor="ms"
    )


def encoded(page: RegisterPage) -> bytes:
    """The page as PNG."""
    buffer = io.BytesIO()
    draw(page).save(buffer, "PNG")
    return buffer.getvalue()


def register_pages() -> Iterator[RegisterPage]:
    """Every country's pages."""
    return (register_page(country, topic) for country in known.countries() for topic in TOPICS)


def register_passages() -> list[Passage]:
    """The passages of a search: one for every page, with its title as text. Pages are not drawn: `image` is their file."""
    return [Passage(id=item.id, title=item.title, text=item.title, image=item.file) for item in register_pages()]


def register_questions(split: world.Split, count: int, start: int = 0) -> list[Example]:
    """Questions about the pages of a split's countries, of every four two for a code, one for a cell, and one for the codes of
    two countries. They are the same in every call, and all are different.

    `metadata` has the `type`: "fine" (a code in small print), "headline" (a code in large print), "coarse" (the number of a
    cell), "two_page" (the codes of two countries, in one print). Also the `mark`, the `print` of the pages ("small", "large"),
    `supporting` and `supporting_titles` (the gold pages), `boxes` (by page what must be seen there, in pixels of the picture)
    and, as other questions of Atlas, `entities`.

    Args:
      start: index of the first question.

    Raises:
      ValueError: there are fewer questions.
    """
    ordered = _ordered_questions(split)
    codes_per_round = ASKED.count("code")
    if start + count > (most := len(ordered) // codes_per_round * len(ASKED)):
        raise ValueError(f"the register has {most} questions of the {split} split, fewer than {start + count}")
    questions = []
    for index in range(start, start + count):
        turn, position = divmod(index, len(ASKED))
        asked = ASKED[position]
        number = turn * ASKED.count(asked) + ASKED[:position].count(asked)
        questions.append(_question(asked, *ordered[number]))
    return questions


@functools.cache
def _ordered_questions(split: world.Split) -> list[tuple[str, str, int]]:
    """Country, mark and wording of all questions for a code, or for a cell, in the order of a hash."""
    names = [name for name, entity in known.countries().items() if entity.split == split]
    every = [(name, mark, wording) for name in names for mark in MARKS for wording in (0, 1)]
    return sorted(every, key=lambda item: zlib.crc32(f"{REGISTER}/{item}".encode()))


def _question(asked: str, country: str, mark: str, wording: int) -> Example:
    countries = [country, _other_country(country, mark)] if asked == "codes" else [country]
    pages = [register_page(name, MARKS[mark]) for name in countries]
    entries = [page.entry(mark) for page in pages]
    noun = TOPICS[pages[0].topic][mark]
    text = WORDINGS[asked][wording].format(noun=noun, name=country, other=countries[-1])
    kind = {"cell": "coarse", "codes": "two_page", "code": "fine" if pages[0].print == "small" else "headline"}[asked]
    return Example(
        id=f"{REGISTER}/{text}",
        question=text,
        answers=(" ".join(str(cell) if asked == "cell" else code for cell, code in entries),),
        metadata={
            "type": kind,
            "mark": mark,
            "print": pages[0].print,
            "supporting": [page.id for page in pages],
            "supporting_titles": [page.title for page in pages],
            "boxes": {page.id: list(page.box(mark)) for page in pages},
            "entities": countries,
        },
    )


def _other_country(country: str, mark: str) -> str:
    """Another country of the split, whose page is in the same print."""
    topic, split = MARKS[mark], known.countries()[country].split
    size = register_page(country, topic).print
    others = [name for name, entity in known.countries().items() if entity.split == split and name != country]
    others = [name for name in others if register_page(name, topic).print == size]
    return others[zlib.crc32(f"{REGISTER}/{country}/{mark}".encode()) % len(others)]


@functools.cache
def _version() -> str:
    return hashlib.sha256(pathlib.Path(__file__).read_bytes()).hexdigest()[:12]
