"""Pages about countries, as pictures. Large things can be read in a small view; small print needs a closer look.

Every country has three pages, about its people, land and economy, 1344 x 1008 pixels on grey paper:

    a title             the country and the topic; a search finds pages only by it
    a flag              of a country whose flag a policy may know (`known`), never the page's own
    six bars            one in each colour, of six lengths, with the name of the colour's fact
    six coloured plates one in each colour; on it, in small print, the value of the colour's fact

Values are Atlas's own or computed from them. A plate has room for four characters, one every 28 pixels. So a crop of it is four
image tokens with one character each. Flag, bars and positions of the plates are random: knowledge about the country doesn't
help to guess them. All of this is a function of country, topic and print size. Some questions (`page_questions`) need a small
view of a page, some a closer look, some two pages.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import io
import itertools
import pathlib
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from routerl_jax.core.types import Example, Passage
from routerl_jax.data.atlas import flags, known, world

Topic = Literal["people", "land", "economy"]
TOPICS: tuple[Topic, ...] = ("people", "land", "economy")
Box = tuple[int, int, int, int]  # left, top, right, bottom; pixels of the page

PAGES = "pages"  # the part of Atlas that is `page_passages`
PAPER = (122, 117, 104)  # nearly zero for a vision tower, which subtracts the mean colour
SIZE = (1344, 1008)
PRINT = 12  # height in pixels of a digit on a plate; it is 1.3 pixels in a view of 20 image tokens (140 x 112)
PLACES = 4  # characters on a plate
COLOURS = {
    "red": (186, 24, 36),
    "blue": (24, 62, 168),
    "green": (0, 104, 56),
    "orange": (212, 104, 0),
    "purple": (112, 36, 148),
    "black": (20, 20, 20),
}
_TOKEN = 28  # side of an image token, in pixels
_INK, _DARK = (250, 248, 240), (34, 32, 28)
_MARGIN, _HEAD = 48, 112  # pixels; the head holds the title
_HALF = (560, 392)  # width and height of the fields of flag and bars, one above the other
_BARS = 6
_UNITS = {"thousand": 1e3, "million": 1e6, "billion": 1e9}

# Questions: their types, and wordings.
Type = Literal["coarse", "fine", "two_page"]
Make = Callable[[int], Example]

TYPES: tuple[Type, ...] = ("coarse", "fine", "two_page")
FLAG = (
    "Whose flag is on the page about the {topic} of {name}?",
    "{name}, {topic}: which country's flag is shown there?",
)
BAR = (
    "Which colour is the longest bar on the page about the {topic} of {name}?",
    "{name}, {topic}: what is the colour of the longest bar?",
)
VALUE = ("What is the {noun} of {name}?", "{name}: what is its {noun}?")
MORE = ("Which has the greater {noun}, {one} or {other}?", "{one} or {other}: whose {noun} is greater?")
_PAIRS = 4  # for every fact, the number of countries that each country is compared with


@dataclasses.dataclass(frozen=True)
class Fact:
    """The fact that a colour stands for on the pages of a topic.

    Attributes:
      noun: its name in questions and beside the bars.
      whole: a year, day or rank, which is printed without rounding. Of other facts, questions can ask which of two countries
        has more.
    """

    key: str
    noun: str
    topic: Topic
    colour: str
    whole: bool = False


FACTS: Mapping[str, Fact] = {
    fact.key: fact
    for fact in (
        Fact("population", "population", "people", "red"),
        Fact("median_age", "median age", "people", "blue"),
        Fact("life_expectancy", "life expectancy", "people", "green"),
        Fact("density", "number of people per sq km", "people", "orange"),
        Fact("population_rank", "rank by population", "people", "purple", whole=True),
        Fact("life_rank", "rank by life expectancy", "people", "black", whole=True),
        Fact("area", "area in sq km", "land", "red"),
        Fact("independence", "year of independence", "land", "blue", whole=True),
        Fact("area_rank", "rank by area", "land", "green", whole=True),
        Fact("land_share", "land per person in sq m", "land", "orange"),
        Fact("density_rank", "rank by people per sq km", "land", "purple", whole=True),
        Fact("holiday", "day of the month of the national holiday", "land", "black", whole=True),
        Fact("income", "income per person in dollars", "economy", "red"),
        Fact("daily_income", "income per person and day in dollars", "economy", "blue"),
        Fact("income_rank", "rank by income per person", "economy", "green", whole=True),
        Fact("earned", "income of all people in dollars", "economy", "orange"),
        Fact("earned_rank", "rank by income of all people", "economy", "purple", whole=True),
        Fact("earned_on", "income per sq km in dollars", "economy", "black"),
    )
}
_RANKED = {"life_rank": "life_expectancy"} | {  # ranks, and what they are of
    f"{fact}_rank": fact for fact in ("population", "area", "density", "income", "earned")
}


def number(country: str, fact: str) -> float | None:
    """A country's number of a fact; None if Atlas doesn't have it. Raises KeyError for an unknown country."""
    return _numbers()[country].get(fact)


@functools.cache
def _numbers() -> dict[str, dict[str, float]]:
    """The numbers of every country's facts. A rank is 1 for the largest value, and equal values have equal ranks."""
    numbers: dict[str, dict[str, float]] = {}
    for name, entity in known.countries().items():
        found = numbers[name] = {}
        for key in ("population", "median_age", "life_expectancy", "area", "income"):  # such as "32.6 million sq km"
            match = re.match(r"\$?([\d,.]+)(?: (thousand|million|billion))?\b", entity.facts.get(key, ""))
            if match:
                found[key] = float(match[1].replace(",", "")) * _UNITS.get(match[2], 1.0)
        if {"population", "area"} <= found.keys():
            found["density"] = found["population"] / found["area"]
            found["land_share"] = found["area"] / found["population"] * 1e6
        if "income" in found:
            found["daily_income"] = found["income"] * (1 / 365)
        if {"population", "income"} <= found.keys():
            found["earned"] = found["income"] * found["population"]
        if {"earned", "area"} <= found.keys():
            found["earned_on"] = found["earned"] / found["area"]
        if year := re.search(r"(\d{4})$", entity.facts.get("independence", "")):
            found["independence"] = float(year[1])
        if day := re.match(r"\d+", entity.facts.get("holiday_date", "")):
            found["holiday"] = float(day[0])
    for rank, fact in _RANKED.items():
        values = {name: found[fact] for name, found in numbers.items() if fact in found}
        for name, value in values.items():
            numbers[name][rank] = 1 + sum(other > value for other in values.values())
    return numbers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plate:
    """A coloured plate: the fact of its colour, the value on it ("" if there is none), and its box."""

    fact: str
    colour: str
    text: str
    box: Box


@dataclasses.dataclass(frozen=True, kw_only=True)
class Page:
    """The content of a page.

    Attributes:
      print_size: height of the digits on plates, pixels.
      flag: the country whose flag is shown, at `flag_box`.
      bars: colours, from the longest bar to the shortest; all are within `bars_box`.
    """

    country: str
    topic: Topic
    print_size: int
    plates: tuple[Plate, ...]
    flag: str
    flag_box: Box
    bars: tuple[str, ...]
    bars_box: Box

    @property
    def id(self) -> str:
        return page_name(self.country, self.topic)

    @property
    def title(self) -> str:
        return f"{self.country}: {self.topic}"

    @property
    def file(self) -> str:
        """A unique file name for its picture. It differs for another country, topic, print size, or version of the drawing
        code."""
        folder = f"{PAGES}-{self.print_size}-{_version()}"
        return f"{folder}/{self.country.replace(' ', '_')}-{self.topic}.jpg"

    def plate(self, fact: str) -> Plate:
        """The plate with a fact's value. Raises StopIteration for a fact of another topic."""
        return next(plate for plate in self.plates if plate.fact == fact)


def page_name(country: str, topic: str) -> str:
    """The id of a page, which is independent of the print size."""
    return f"{PAGES}/{country}/{topic}"


def printed(country: str, fact: str) -> str:
    """A country's value of a fact, rounded to fit a plate; "" if Atlas has none.

    It has three digits without a unit ("58.1", "5.23", "468"), and two or three with a unit ("33M", "1.9K", "652K").
    """
    value, whole = number(country, fact), FACTS[fact].whole
    if value is None:
        return ""
    if whole:
        return f"{value:.0f}"
    if value < 999.5:
        return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}"
    for unit in "KMBT":
        value /= 1000
        if value < 999.5:
            return f"{value:.{1 if value < 9.95 else 0}f}{unit}"
    raise ValueError(f"{value:g}T is more than a plate has room for")


@functools.lru_cache(4096)
def page(country: str, topic: Topic, print_size: int = PRINT) -> Page:
    """The content of the page of a country about a topic.

    Args:
      print_size: height of the digits on plates, pixels, 8 to 96. A character has 28 x 28 pixels, and more if digits are higher
        than 20 pixels.

    Raises:
      KeyError: no such country.
      ValueError: no such topic, or the print size is out of range.
    """
    if topic not in TOPICS:
        raise ValueError(f"Atlas has no pages about {topic!r}; it has {', '.join(TOPICS)}")
    if not 8 <= print_size <= 96:
        raise ValueError(f"print of {print_size} pixels does not fit a page; take 8 to 96")
    rng = np.random.default_rng([11, zlib.crc32(page_name(country, topic).encode())])
    width, height = SIZE
    pictures_left, flag_above = bool(rng.random() < 0.5), bool(rng.random() < 0.5)
    others = [name for name in known.known_countries() if name != country]
    flag = others[int(rng.integers(len(others)))]
    bars = tuple(list(COLOURS)[i] for i in rng.permutation(_BARS))
    left = _MARGIN if pictures_left else width - _MARGIN - _HALF[0]
    halves = [(left, top, left + _HALF[0], top + _HALF[1]) for top in (_HEAD, height - _MARGIN - _HALF[1])]
    flag_box, bars_box = halves if flag_above else halves[::-1]
    first = _MARGIN + _HALF[0] + _MARGIN if pictures_left else _MARGIN
    field = (first, _HEAD, first + width - _HALF[0] - 3 * _MARGIN, height - _MARGIN)
    facts = [fact for fact in FACTS.values() if fact.topic == topic]
    boxes = _plate_boxes(field, plate_size(print_size), rng)
    return Page(
        country=country,
        topic=topic,
        print_size=print_size,
        plates=tuple(
            Plate(fact=fact.key, colour=fact.colour, text=printed(country, fact.key), box=box)
            for fact, box in zip(facts, boxes, strict=True)
        ),
        flag=flag,
        flag_box=_flag_box(flag, flag_box),
        bars=bars,
        bars_box=bars_box,
    )


def plate_size(print_size: int) -> tuple[int, int]:
    """Width and height of a plate with print of this height: 112 x 28 up to 20 pixels."""
    side = max(_TOKEN, print_size + 8)
    return PLACES * side, side


def _plate_boxes(field: Box, size: tuple[int, int], rng: np.random.Generator) -> list[Box]:
    """Boxes of the plates: random positions in randomly drawn cells of the field."""
    left, top, right, bottom = field
    across = 2 if size[0] <= (right - left) // 2 - _TOKEN else 1
    wide, high = (right - left) // across, (bottom - top) // _BARS
    boxes = []
    for cell in rng.permutation(across * _BARS)[:_BARS].tolist():
        x, y = left + wide * (cell % across), top + high * (cell // across)
        gap = min(12, (high - size[1]) // 2)
        x += int(rng.integers(gap, wide - size[0] - gap + 1))
        y += int(rng.integers(gap, high - size[1] - gap + 1))
        boxes.append((x, y, x + size[0], y + size[1]))
    return boxes


def _flag_box(country: str, half: Box) -> Box:
    """The box of a flag, as large as fits into the middle of a field."""
    with Image.open(io.BytesIO(flags.flag(country))) as picture:
        width, height = picture.size
    scale = min(_HALF[0] / width, _HALF[1] / height)
    width, height = int(width * scale), int(height * scale)
    left, top = (half[0] + half[2] - width) // 2, (half[1] + half[3] - height) // 2
    return left, top, left + width, top + height


def bar_box(page: Page, colour: str) -> Box:
    """The box of the bar of a colour. Bars are in the order of `COLOURS`, from top to bottom."""
    left, top, _, bottom = page.bars_box
    row = (bottom - top) / _BARS
    length = round(_HALF[0] * (_BARS - page.bars.index(colour)) / _BARS)
    start = round(top + row * list(COLOURS).index(colour))
    return left, start + 22, left + length, round(start + row) - 4


def draw(page: Page) -> Image.Image:
    """The page as a picture, RGB, 1344 x 1008."""
    paper = Image.new("RGB", SIZE, PAPER)
    pen = ImageDraw.Draw(paper)
    pen.text((_MARGIN, 30), page.title, font=_font(46), fill=_DARK)
    pen.line((_MARGIN, 92, SIZE[0] - _MARGIN, 92), fill=_DARK, width=3)
    left, top, right, bottom = page.flag_box
    paper.paste(_flag_picture(page.flag, (right - left, bottom - top)), (left, top))
    pen.rectangle((left - 2, top - 2, right + 1, bottom + 1), outline=_DARK, width=2)
    nouns = {plate.colour: FACTS[plate.fact].noun for plate in page.plates}
    for colour, fill in COLOURS.items():
        box = bar_box(page, colour)
        pen.rectangle(_inclusive(box), fill=fill)
        pen.text((box[0], box[1] - 20), nouns[colour], font=_font(16), fill=_DARK)
    font = figure_font(page.print_size)
    for plate in page.plates:
        pen.rectangle(_inclusive(plate.box), fill=COLOURS[plate.colour])
        side, line = plate.box[3] - plate.box[1], (plate.box[1] + plate.box[3] + page.print_size) / 2
        for position, character in enumerate(plate.text):
            pen.text((plate.box[0] + side * (position + 0.5), line), character, font=font, fill=_INK, anchor="ms")
    return paper


def encoded(page: Page) -> bytes:
    """The page as JPEG. Colours have full resolution, so that small print stays sharp."""
    buffer = io.BytesIO()
    draw(page).save(buffer, "JPEG", quality=90, subsampling=0)
    return buffer.getvalue()


def all_pages(print_size: int = PRINT) -> Iterator[Page]:
    """Every country's pages."""
    return (page(country, topic, print_size) for country in known.countries() for topic in TOPICS)


def page_passages(print_size: int = PRINT) -> list[Passage]:
    """The passages of a search: one for every page, with its title as text. Pages are not drawn: `image` is `Page.file`."""
    return [Passage(id=item.id, title=item.title, text=item.title, image=item.file) for item in all_pages(print_size)]


@functools.cache
def _version() -> str:
    code = b"".join(pathlib.Path(path).read_bytes() for path in (__file__, world.FACTS, flags.FLAGS, known.__file__))
    return hashlib.sha256(code).hexdigest()[:12]


def _inclusive(box: Box) -> Box:
    """A box in Pillow's convention, which includes the last pixels."""
    return box[0], box[1], box[2] - 1, box[3] - 1


@functools.lru_cache(64)
def _flag_picture(country: str, size: tuple[int, int]) -> Image.Image:
    with Image.open(io.BytesIO(flags.flag(country))) as picture:
        return picture.convert("RGB").resize(size, Image.Resampling.BICUBIC)


@functools.cache
def _font(size: float) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size=size)


@functools.cache
def figure_font(height: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """The font whose digits have this height."""
    _, top, _, bottom = ImageDraw.Draw(Image.new("L", (1, 1))).textbbox((0, 0), "8", font=_font(1000))
    return _font(1000 * height / (bottom - top))


def page_questions(split: world.Split, count: int, start: int = 0, print_size: int = PRINT) -> list[Example]:
    """Questions about the countries of a split of Atlas. Three types take turns:

      coarse    whose flag a page shows, or which of its bars is the longest
      fine      a value in small print
      two_page  which of two countries has more of something: two searches, and two values in small print

    Each names the page by its country and topic, or by a fact on it, because a search finds only titles. The questions are the
    same in every call, and all are different.

    `metadata` has the `type`, the `topic`, the `relation` (key of the fact, "flag" or "bar"), `supporting` and
    `supporting_titles` (the gold pages), `boxes` (by page what must be seen there: left, top, right, bottom in
    pixels of the picture), `print` (`print_size`) and, as other questions of Atlas, `entities`.

    Args:
      start: index of the first question.
      print_size: print size of the pages (`pages.page`). It moves the plates, and changes nothing else.

    Raises:
      ValueError: `count` or `start` is no multiple of three, or there are fewer questions.
    """
    each = len(TYPES)
    if count % each or start % each:
        wrong = f"{count} questions, the first at {start}, are no {each} equal types"
        raise ValueError(f"{wrong}; ask for multiples of {each}")
    indices = range(start // each, (start + count) // each)
    makers = _makers(split)
    most = min(map(len, makers.values()))
    if indices.stop > most:
        raise ValueError(f"Atlas's {split} split has {each * most} questions about pages, fewer than {start + count}")
    return [makers[kind][index](print_size) for index in indices for kind in TYPES]


@functools.cache
def _makers(split: world.Split) -> dict[Type, list[Make]]:
    """All questions of each type, in the order of a hash. Every second coarse question is about a flag."""
    names = [name for name, entity in known.countries().items() if entity.split == split]
    about = list(itertools.product(names, TOPICS, (0, 1)))
    flags = [functools.partial(_flag, *arguments) for arguments in about]
    bars = [functools.partial(_bar, *arguments) for arguments in about]
    values = [
        functools.partial(_value, name, fact, wording)
        for name in names
        for fact in FACTS.values()
        for wording in (0, 1)
        if _is_unique(name, fact)
    ]
    pairs = [
        functools.partial(_more, *arguments)
        for fact in FACTS.values()
        if not fact.whole
        for arguments in _pairs(names, fact)
    ]
    coarse = itertools.chain.from_iterable(zip(_shuffled(flags), _shuffled(bars), strict=True))
    return {"coarse": list(coarse), "fine": _shuffled(values), "two_page": _shuffled(pairs)}


def _shuffled(makers: Sequence[functools.partial[Example]]) -> list[Make]:
    def turn(make: functools.partial[Example]) -> int:
        names = (part.key if isinstance(part, Fact) else str(part) for part in make.args)
        return zlib.crc32("/".join(("pages", make.func.__name__, *names)).encode())

    return sorted(makers, key=turn)


def _is_unique(country: str, fact: Fact) -> bool:
    """Whether the fact's plate has a value that no other plate of the page has."""
    texts = [plate.text for plate in page(country, fact.topic).plates]
    return texts.count(value := printed(country, fact.key)) == 1 and bool(value)


def _pairs(names: Sequence[str], fact: Fact) -> list[tuple[str, str, Fact, int]]:
    """Pairs of countries with different values, in the order of a hash. Their ranks are a tenth to a third of all countries
    apart."""
    ordered = sorted(
        (name for name in names if _is_unique(name, fact)), key=lambda name: (number(name, fact.key) or 0.0, name)
    )
    pairs = []
    for rank, low in enumerate(ordered):
        rng = np.random.default_rng([12, zlib.crc32(f"{fact.key}/{low}".encode())])
        apart = range(max(1, len(ordered) // 10), len(ordered) // 3 + 1)
        for step in sorted(rng.permutation(apart)[:_PAIRS].tolist()):
            if rank + step < len(ordered) and printed(low, fact.key) != printed(high := ordered[rank + step], fact.key):
                first, second = (low, high) if rng.random() < 0.5 else (high, low)
                pairs.append((first, second, fact, int(rng.integers(2))))
    return pairs


def _flag(country: str, topic: Topic, wording: int, print_size: int) -> Example:
    shown = page(country, topic, print_size)
    text = FLAG[wording].format(topic=topic, name=country)
    return _question("coarse", "flag", text, shown.flag, [(shown, shown.flag_box)])


def _bar(country: str, topic: Topic, wording: int, print_size: int) -> Example:
    shown = page(country, topic, print_size)
    text = BAR[wording].format(topic=topic, name=country)
    return _question("coarse", "bar", text, shown.bars[0], [(shown, shown.bars_box)])


def _value(country: str, fact: Fact, wording: int, print_size: int) -> Example:
    shown = page(country, fact.topic, print_size)
    plate = shown.plate(fact.key)
    return _question(
        "fine", fact.key, VALUE[wording].format(noun=fact.noun, name=country), plate.text, [(shown, plate.box)]
    )


def _more(first: str, second: str, fact: Fact, wording: int, print_size: int) -> Example:
    pages = [page(name, fact.topic, print_size) for name in (first, second)]
    text = MORE[wording].format(noun=fact.noun, one=first, other=second)
    answer = max(first, second, key=lambda name: number(name, fact.key) or 0.0)
    return _question("two_page", fact.key, text, answer, [(item, item.plate(fact.key).box) for item in pages])


def _question(kind: Type, relation: str, text: str, answer: str, gold: Sequence[tuple[Page, Box]]) -> Example:
    return Example(
        id=f"pages/{text}",
        question=text,
        answers=(answer,),
        metadata={
            "type": kind,
            "topic": gold[0][0].topic,
            "relation": relation,
            "supporting": [gold_page.id for gold_page, _ in gold],
            "supporting_titles": [gold_page.title for gold_page, _ in gold],
            "boxes": {gold_page.id: list(box) for gold_page, box in gold},
            "print": gold[0][0].print_size,
            "entities": [gold_page.country for gold_page, _ in gold],
        },
    )
