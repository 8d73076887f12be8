"""Lessons about the register for a small policy: to find a mark on a page, to read small print, and random plans.

Pages in lessons have real titles and are otherwise drawn anew, so nothing on them can be remembered. `raw`: pages are seen at
their full size, 252 x 252 in 81 image tokens, where small print can be read, too.
"""

from __future__ import annotations

import dataclasses
import functools
import io

import numpy as np
from PIL import Image

from routerl_jax.core.types import Demonstration, DemonstrationStep, Example, Passage
from routerl_jax.data.atlas import flags, known
from routerl_jax.data.atlas.invented import invented_world
from routerl_jax.data.atlas.pages import Box
from routerl_jax.data.atlas.register import (
    ACROSS,
    ASKED,
    CELL,
    CODES,
    MARKS,
    SIZE,
    TOPICS,
    WORDINGS,
    RegisterPage,
    draw,
    drawn_page,
    grid_position,
    middles,
    title,
)

SMALL, PAPER = "?", "."  # the signs for a code in small print, and for a token on which no sign can be read
SIGNS = "".join(map(str, range(ACROSS**2))) + "".join(MARKS) + CODES + SMALL + PAPER
TURNS = 4  # of the agent. After them the answer is begun for it.
_INVENTED = 1000  # countries that are made up, so that names are copied and not remembered
_CODE_TOKEN = 6  # of the nine tokens of a crop, the one with a code in small print
_TOKEN = 28  # pixels of a side of an image token


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shares:
    """How plans are drawn.

    Attributes:
      titled: the query is the page's title. Else it is the country, which finds any of its pages.
      again: a wrong page is followed by a search for the right one, unless two countries are asked about. Else by a guess.
      looks: the right page is followed by a closer look. Else by an answer.
      tight: the box is the cell of the entry. Else it is the whole row, or (`astray`) another cell.
    """

    titled: float = 0.25
    again: float = 0.9
    looks: float = 0.45
    tight: float = 0.4
    astray: float = 0.15


def view_of(page: RegisterPage, mark: str, raw: bool = False) -> str:
    """The text of a mark as a view of the whole page shows it: "W5=K", "W5=?" in small print, "no W" if it is absent."""
    if mark not in page.marks:
        return f"no {mark}"
    cell, code = page.entry(mark)
    return f"{mark}{cell}={code if _readable(page, raw) else SMALL}"


def _readable(page: RegisterPage, raw: bool) -> bool:
    """Whether the codes can be read in a view of the whole page."""
    return raw or page.print == "large"


def sheet(rng: np.random.Generator) -> tuple[Image.Image, list[str]]:
    """A view of a page, or the crop of a cell in small print, with the signs on each of its nine image tokens.

    In a crop only the code is a sign, because its other parts are larger than a token.
    """
    page = _any_page(rng)
    if page.print == "large" or rng.random() < 0.5:
        signs = [PAPER] * ACROSS**2
        for mark, cell, code in zip(page.marks, page.cells, page.codes):
            signs[cell] = f"{mark}{cell}{code if page.print == 'large' else SMALL}"
        return draw(page), signs
    mark = _choice(page.marks, rng)
    signs = [PAPER] * ACROSS**2
    signs[_CODE_TOKEN] = page.entry(mark)[1]
    return crop(page, page.entry(mark)[0]), signs


def raw_sheet(rng: np.random.Generator) -> tuple[Image.Image, list[str]]:
    """A page at its full size, with the sign on each of its 81 image tokens: `PAPER` where nothing is, "" on a part of a sign
    whose middle is elsewhere."""
    page = _any_page(rng)
    picture = draw(page)
    high, wide = SIZE[1] // _TOKEN, SIZE[0] // _TOKEN
    pixels = np.asarray(picture)
    blank = (pixels == pixels[0, 0]).reshape(high, _TOKEN, wide, _TOKEN, 3).all((1, 3, 4))  # no sign reaches the corner
    signs = [PAPER if empty else "" for empty in blank.ravel()]
    for sign, (x, y) in middles(page):
        signs[y // _TOKEN * wide + x // _TOKEN] = sign
    return picture, signs


def crop(page: RegisterPage, cell: int) -> Image.Image:
    """A cell, cut from the page."""
    left, top = (CELL * index for index in grid_position(cell))
    return draw(page).crop((left, top, left + CELL, top + CELL))


def finding(rng: np.random.Generator, raw: bool = False) -> tuple[Example, str]:
    """A page with one to four entries and a mark, and the policy's turn: a thought that says what it sees, and an action.

    If the cell is asked for, the action answers with its number. Else it answers with the code, or looks at the entry's box if
    the print is too small. If the page lacks the mark, there is no action.
    """
    page = _any_page(rng)
    indices = rng.permutation(len(page.marks))[: int(rng.integers(1, len(page.marks) + 1))]
    marks, cells, codes = (tuple(part[i] for i in indices) for part in (page.marks, page.cells, page.codes))
    page = dataclasses.replace(page, marks=marks, cells=cells, codes=codes)
    mark = _choice(page.marks if rng.random() < 0.75 else list(MARKS), rng)
    asked, action = "Cell" if rng.random() < 1 / 3 else "Find", ""
    if mark in page.marks:
        cell, code = page.entry(mark)
        if asked == "Cell":
            action = f"<answer>{cell}</answer>"
        else:
            action = f"<answer>{code}</answer>" if _readable(page, raw) else f"<bbox>{list(cell_box(cell))}</bbox>"
    return _lesson(f"{asked}:{mark}\n", draw(page)), f"<think>{view_of(page, mark, raw)}</think>\n{action}"


def reading(rng: np.random.Generator) -> tuple[Example, str]:
    """The crop of an entry in small print, and the thought and the answer that say its code."""
    page = dataclasses.replace(_any_page(rng), print="small")
    cell, code = page.entry(_choice(page.marks, rng))
    return _lesson("Read:\n", crop(page, cell)), f"<think>{code}</think>\n<answer>{code}</answer>"


def plan(
    rng: np.random.Generator, tool: str, shares: Shares = Shares(), asked: str | None = None, raw: bool = False
) -> Demonstration:
    """A worked question with mostly random actions. Its thoughts and answers say what was shown, or guess.

    Args:
      asked: one of `ASKED`. None: any.
      raw: pages are seen at their full size. Give `shares` with no looks: none is needed.
    """
    mark, asked = _choice(list(MARKS), rng), asked or _choice(ASKED, rng)
    countries = [_choice(_names(), rng)]
    while asked == "codes" and len(set(countries)) < 2:
        countries = [countries[0], _choice(_names(), rng)]
    steps: list[DemonstrationStep] = []
    thought, answers = f"{mark} {MARKS[mark]}", []
    for country in countries:
        visit_steps, thought, answer = _visit(rng, country, mark, asked, thought, tool, shares, raw)
        steps += visit_steps
        answers.append(answer)
    # which wording is of no interest, so it follows from the mark
    text = WORDINGS[asked][(len(countries[0]) + ord(mark)) % 2].format(
        noun=TOPICS[MARKS[mark]][mark], name=countries[0], other=countries[-1]
    )
    answer = " ".join(answers)
    example = Example(id=f"lesson/{text}", question=text, answers=(answer,))
    return Demonstration(
        example=example, steps=tuple(steps), thought=thought, answer=answer, forced=len(steps) == TURNS
    )


def _visit(
    rng: np.random.Generator, country: str, mark: str, asked: str, thought: str, tool: str, shares: Shares, raw: bool
) -> tuple[list[DemonstrationStep], str, str]:
    """The steps on a country's pages, the thought that follows them, and the answer."""
    topic = MARKS[mark]
    page = drawn_page(country, topic, rng)
    guess = str(int(rng.integers(ACROSS**2))) if asked == "cell" else CODES[int(rng.integers(len(CODES)))]
    if rng.random() < shares.titled:
        steps = [_search(thought, title(country, topic), tool, page)]
    else:
        drawn = drawn_page(country, _choice(list(TOPICS), rng), rng)
        steps = [_search(thought, country, tool, drawn)]
        if drawn.topic == topic:
            page = drawn
        elif asked == "codes" or rng.random() >= shares.again:
            return steps, view_of(drawn, mark, raw), guess
        else:
            steps.append(_search(view_of(drawn, mark, raw), title(country, topic), tool, page))
    cell, code = page.entry(mark)
    answer = str(cell) if asked == "cell" else code if _readable(page, raw) else guess
    if rng.random() >= shares.looks:
        return steps, view_of(page, mark, raw), answer
    chance, at = rng.random(), cell
    if chance < shares.astray:
        at = int(rng.choice([other for other in page.cells if other != cell]))
    wide = shares.astray <= chance < 1 - shares.tight
    steps.append(DemonstrationStep(thought=view_of(page, mark), box=row_box(at) if wide else cell_box(at)))
    if page.print == "large":  # the page has shown the code
        return steps, code, answer
    if wide:
        return steps, SMALL, answer
    read = page.codes[page.cells.index(at)]
    return steps, read, answer if asked == "cell" else read


def cell_box(cell: int) -> Box:
    """The box of a cell, on a scale of 0 to 3 over the page."""
    column, row = grid_position(cell)
    return column, row, column + 1, row + 1


def row_box(cell: int) -> Box:
    """The box of the row of a cell."""
    row = grid_position(cell)[1]
    return 0, row, ACROSS, row + 1


def _search(thought: str, query: str, tool: str, page: RegisterPage) -> DemonstrationStep:
    buffer = io.BytesIO()
    draw(page).save(buffer, "PNG", compress_level=1)
    passage = Passage(id=page.id, title=page.title, text=page.title, image=flags.data_uri(buffer.getvalue()))
    return DemonstrationStep(thought=thought, query=query, tool=tool, passages=(passage,))


def _lesson(question: str, picture: Image.Image) -> Example:
    return Example(id=f"lesson/{question.strip()}", question=question, answers=(), images=(np.asarray(picture),))


def _any_page(rng: np.random.Generator) -> RegisterPage:
    return drawn_page("", _choice(list(TOPICS), rng), rng)


@functools.cache
def _names() -> list[str]:
    """The countries of the training split, as often as made-up ones."""
    real = [name for name, entity in known.countries().items() if entity.split == "train"]
    invented = [entity.name for entity in invented_world(0, countries=_INVENTED, elements=0)]
    return real * (_INVENTED // len(real)) + invented


def _choice(values: list[str] | tuple[str, ...], rng: np.random.Generator) -> str:
    return values[int(rng.integers(len(values)))]
