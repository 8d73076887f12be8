"""What a small policy is taught about the register: to find a mark on a page, to read small print, and plans by chance.

Pages in lessons have real titles and are otherwise drawn anew, so nothing on them can be remembered.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import io

import numpy as np
from PIL import Image

from routerl_jax.core.types import Demonstration, DemonstrationStep, Example, Passage
from routerl_jax.data.atlas import known
from routerl_jax.data.atlas.invented import invented_world
from routerl_jax.data.atlas.register import (
    ACROSS,
    CELL,
    CODE,
    CODES,
    MARKS,
    PLACE,
    TOPICS,
    RegisterPage,
    draw,
    drawn_page,
    place_of,
    title,
)

SMALL, PAPER = "?", "."  # the signs for a code in small print, and for a token on which no sign can be read
SIGNS = "".join(map(str, range(ACROSS**2))) + "".join(MARKS) + CODES + SMALL + PAPER
Box = tuple[int, int, int, int]
_INVENTED = 1000  # countries that are made up, so that names are copied and not remembered
_CODE_TOKEN = 6  # of the nine tokens of a crop, the one with a code in small print


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shares:
    """How plans are drawn.

    Attributes:
      titled: the query is the page's title. Else it is the country, which finds any of its pages.
      again: a wrong page is followed by a search for the right one. Else by an answer at random.
      looks: the right page is followed by a closer look. Else by an answer.
      tight: the box is the cell of the entry. Else it is the whole row, or (`astray`) another cell.
      coarse: questions for a cell.
    """

    titled: float = 0.45
    again: float = 0.5
    looks: float = 0.45
    tight: float = 0.5
    astray: float = 0.2
    coarse: float = 1 / 3


def seen(page: RegisterPage, mark: str) -> str:
    """What a view of the whole page shows of a mark: "W5=K", "W5=?" in small print, "no W"."""
    if mark not in page.marks:
        return f"no {mark}"
    cell, code = page.entry(mark)
    return f"{mark}{cell}={code if page.print == 'large' else SMALL}"


def sheet(rng: np.random.Generator) -> tuple[Image.Image, list[str]]:
    """A page as it is seen, or the crop of a cell in small print, with the signs on each of its nine image tokens.

    Of a crop, only the code is a sign: the rest is in parts that are larger than a token.
    """
    page = _any_page(rng)
    if page.print == "large" or rng.random() < 0.5:
        signs = [PAPER] * ACROSS**2
        for mark, cell, code in zip(page.marks, page.cells, page.codes):
            signs[cell] = f"{mark}{cell}{code if page.print == 'large' else SMALL}"
        return draw(page), signs
    mark = _any(page.marks, rng)
    signs = [PAPER] * ACROSS**2
    signs[_CODE_TOKEN] = page.entry(mark)[1]
    return crop(page, page.entry(mark)[0]), signs


def crop(page: RegisterPage, cell: int) -> Image.Image:
    """A cell, cut from the page."""
    left, top = (CELL * at for at in place_of(cell))
    return draw(page).crop((left, top, left + CELL, top + CELL))


def finding(rng: np.random.Generator) -> tuple[Example, str]:
    """A page with one to four entries and a mark, and the thought that says what is seen of it."""
    page = _any_page(rng)
    kept = rng.permutation(len(page.marks))[: int(rng.integers(1, len(page.marks) + 1))]
    marks, cells, codes = (tuple(part[i] for i in kept) for part in (page.marks, page.cells, page.codes))
    page = dataclasses.replace(page, marks=marks, cells=cells, codes=codes)
    mark = _any(page.marks if rng.random() < 0.75 else list(MARKS), rng)
    return _bare(f"Find:{mark}\n", draw(page)), f"<think>{seen(page, mark)}</think>\n"


def reading(rng: np.random.Generator) -> tuple[Example, str]:
    """The crop of an entry in small print, and the answer that says its code."""
    page = dataclasses.replace(_any_page(rng), print="small")
    cell, code = page.entry(_any(page.marks, rng))
    return _bare("Read:\n", crop(page, cell)), f"<answer>{code}</answer>"


def plan(rng: np.random.Generator, tool: str, shares: Shares = Shares()) -> Demonstration:
    """A worked question. What is done is mostly drawn by chance; what is said and answered is what was shown, or a guess."""
    country, mark = _any(_names(), rng), _any(list(MARKS), rng)
    topic, coarse = MARKS[mark], bool(rng.random() < shares.coarse)
    page = drawn_page(country, topic, rng)
    steps: list[DemonstrationStep] = []
    thought, found = f"{mark} {topic}", page
    if rng.random() >= shares.titled:
        found = drawn_page(country, _any(list(TOPICS), rng), rng)
        steps.append(_search(thought, country, tool, found))
        thought = seen(found, mark)
        if found.topic != topic and rng.random() >= shares.again:
            return _done(country, mark, coarse, steps, thought, _guess(coarse, rng))
    if found.topic != topic or not steps:
        found = page
        steps.append(_search(thought, title(country, topic), tool, found))
        thought = seen(found, mark)
    cell, code = found.entry(mark)
    answer = str(cell) if coarse else code if found.print == "large" else _guess(coarse, rng)
    if rng.random() < shares.looks:
        chance, at = rng.random(), cell
        if chance < shares.astray:
            at = int(rng.choice([other for other in found.cells if other != cell]))
        wide = shares.astray <= chance < 1 - shares.tight
        steps.append(DemonstrationStep(thought=thought, box=row_box(at) if wide else cell_box(at)))
        thought = ""
        if not coarse and found.print == "small" and not wide:
            answer = found.codes[found.cells.index(at)]
    return _done(country, mark, coarse, steps, thought, answer)


def cell_box(cell: int) -> Box:
    """The box of a cell, on a scale of 0 to 3 over the page."""
    column, row = place_of(cell)
    return column, row, column + 1, row + 1


def row_box(cell: int) -> Box:
    """The box of the row of a cell."""
    row = place_of(cell)[1]
    return 0, row, ACROSS, row + 1


def _search(thought: str, query: str, tool: str, found: RegisterPage) -> DemonstrationStep:
    buffer = io.BytesIO()
    draw(found).save(buffer, "PNG", compress_level=1)
    image = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    passage = Passage(id=found.id, title=found.title, text=found.title, image=image)
    return DemonstrationStep(thought=thought, query=query, tool=tool, passages=(passage,))


def _done(
    country: str, mark: str, coarse: bool, steps: list[DemonstrationStep], thought: str, answer: str
) -> Demonstration:
    wordings = PLACE if coarse else CODE
    # as many wordings as there are; which one is of no interest, so it follows from the mark
    text = wordings[(len(country) + ord(mark)) % len(wordings)].format(noun=TOPICS[MARKS[mark]][mark], name=country)
    example = Example(id=f"lesson/{text}", question=text, answers=(answer,))
    return Demonstration(example=example, steps=tuple(steps), thought=thought, answer=answer)


def _guess(coarse: bool, rng: np.random.Generator) -> str:
    return str(int(rng.integers(ACROSS**2))) if coarse else CODES[int(rng.integers(len(CODES)))]


def _bare(question: str, picture: Image.Image) -> Example:
    return Example(id=f"lesson/{question.strip()}", question=question, answers=(), images=(np.asarray(picture),))


def _any_page(rng: np.random.Generator) -> RegisterPage:
    return drawn_page("", _any(list(TOPICS), rng), rng)


@functools.cache
def _names() -> list[str]:
    """The countries of the training split, as often as made-up ones."""
    real = [name for name, entity in known.countries().items() if entity.split == "train"]
    invented = [entity.name for entity in invented_world(0, countries=_INVENTED, elements=0)]
    return real * (_INVENTED // len(real)) + invented


def _any(values: list[str] | tuple[str, ...], rng: np.random.Generator) -> str:
    return values[int(rng.integers(len(values)))]
