"""Training items for a small policy with vision: describing pictures, naming the known flags, facts of their countries.

Questions have no agent's prompt, and none is about searching. So the policy learns to see, learns the known flags and facts,
and learns to say that it doesn't know a flag, as large models do. It learns no rule for when to search.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageDraw, ImageFont

from routerl_jax.core.types import Example
from routerl_jax.data.atlas import flags, known, world
from routerl_jax.data.atlas.invented import invented_world
from routerl_jax.data.atlas.recoloured import recoloured_flag

FIGURES = "0123456789"
TOKEN = 28  # side of an image token, in pixels
DESCRIBE, FIGURES_OF = "What is on this flag?", "Which figures are on this picture?"
_PAPER = (122, 117, 104)  # nearly zero for the vision tower; on white paper, digits are learnt much later
UNKNOWN = "I don't know this flag."
RARELY = 0.25  # frequency of a flag of strength "few", relative to one of strength "many"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Taught:
    """A question with or without a picture (`example`), and the text that the policy should write."""

    example: Example
    answer: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class SightSource:
    """A random-access, reproducible stream of training items (item i is a function of seed and i).

    Kinds, in `example.metadata["kind"]`: `name` (the country of a known flag), `about` (the country of a known flag, and a
    known fact of it), `unknown` (the same questions with a new made-up flag each time), `fact` (a known fact of a named
    country, without a picture), `describe` (the design of a made-up flag) and `figures` (two to four digits in a row).

    Attributes:
      seed: root of the randomness; use different seeds for training and validation.
      shares: how often each kind is drawn.
      rarely: frequency of a flag of strength "few", relative to one of strength "many".
    """

    seed: int = 0
    shares: Mapping[str, float] = dataclasses.field(
        default_factory=lambda: {
            "name": 0.22,
            "about": 0.14,
            "unknown": 0.26,
            "fact": 0.11,
            "describe": 0.05,
            "figures": 0.22,
        }
    )
    rarely: float = RARELY

    def __getitem__(self, index: int) -> Taught:
        rng = np.random.default_rng([9, self.seed, index])
        kinds = list(self.shares)
        kind = kinds[int(rng.choice(len(kinds), p=np.array(list(self.shares.values())) / sum(self.shares.values())))]
        return taught(kind, f"sight-{self.seed}-{index}", rng, self._country(rng))

    def _country(self, rng: np.random.Generator) -> str:
        names = known.known_countries()
        weights = np.array([1.0 if often == "many" else self.rarely for often in names.values()])
        return list(names)[int(rng.choice(len(weights), p=weights / weights.sum()))]


def taught(kind: str, name: str, rng: np.random.Generator, country: str) -> Taught:
    """An item of a kind. `country` is used by kinds about a country; `name` determines the picture of its flag."""
    images: tuple[Any, ...] = ()
    if kind == "figures":
        picture, figures = figures_in_a_row(rng)
        return _taught(kind, name, FIGURES_OF, figures, (picture,))
    if kind == "describe":
        invented = invented_world(int(rng.integers(2**31)), countries=1, elements=0)[0].name
        png = flags.invented_flag(invented)
        images = (flags.photographed(png, name, known.PIXELS),)
        return _taught(kind, name, DESCRIBE, str(flags.invented_design(invented)), images)
    if kind == "unknown":
        images = (flags.photographed(recoloured_flag(rng, known.NEAR), name, known.PIXELS),)
        relation = world.RELATIONS[known.RELATIONS[int(rng.integers(len(known.RELATIONS)))]]
        about = (*known.WHOSE, *known.ABOUT)
        return _taught(kind, name, about[int(rng.integers(len(about)))].format(noun=relation.noun), UNKNOWN, images)
    if kind != "fact":
        images = (flags.photographed(flags.flag(country), name, known.PIXELS),)
    if kind == "name":
        return _taught(kind, name, known.WHOSE[int(rng.integers(len(known.WHOSE)))], country, images)
    relation = world.RELATIONS[known.KNOWN_RELATIONS[int(rng.integers(len(known.KNOWN_RELATIONS)))]]
    value = known.facts(country)[relation.key]
    if kind == "fact":
        return _taught(kind, name, fact_question(country, relation.key), value, ())
    wordings = known.ABOUT
    question = wordings[int(rng.integers(len(wordings)))].format(noun=relation.noun)
    return _taught(kind, name, question, f"It is {country}. Its {relation.noun} is {value}.", images)


def fact_question(country: str, relation: str) -> str:
    """A question about a fact of a named country."""
    return f"What is the {world.RELATIONS[relation].noun} of {country}?"


def figures_in_a_row(rng: np.random.Generator) -> tuple[UInt8[np.ndarray, "H W 3"], str]:
    """Two to four digits, about one per token, in a picture four tokens wide."""
    figures = _drawn_figures(rng, int(rng.integers(2, 5)))
    size, push, ink = float(rng.uniform(17, 27)), float(rng.uniform(-4, 4)), _ink(rng)
    paper = Image.new("RGB", (4 * TOKEN, TOKEN), _PAPER)
    for i, figure in enumerate(figures):
        x = (i + 0.5) * TOKEN + push + rng.uniform(-2, 2)
        _write(paper, figure, size, (x, TOKEN / 2 + rng.uniform(-3, 3)), ink)
    return np.asarray(paper), figures


def sheet_of_figures(rng: np.random.Generator) -> tuple[UInt8[np.ndarray, "H W 3"], str]:
    """Sixteen digits of all sizes and shades, one per token of a picture of four by four tokens, row by row."""
    figures = _drawn_figures(rng, 16)
    paper = Image.new("RGB", (4 * TOKEN, 4 * TOKEN), _PAPER)
    for i, figure in enumerate(figures):
        x, y = (TOKEN * (where + 0.5) + rng.uniform(-4, 4) for where in (i % 4, i // 4))
        _write(paper, figure, float(rng.uniform(14, 28)), (x, y), _ink(rng))
    return np.asarray(paper), figures


def _taught(kind: str, name: str, question: str, answer: str, images: tuple[Any, ...]) -> Taught:
    example = Example(id=name, question=question, answers=(answer,), images=images, metadata={"kind": kind})
    return Taught(example=example, answer=answer)


def _drawn_figures(rng: np.random.Generator, count: int) -> str:
    return "".join(FIGURES[i] for i in rng.integers(len(FIGURES), size=count))


def _ink(rng: np.random.Generator) -> tuple[int, int, int]:
    low, high = (0, 60) if rng.random() < 0.5 else (200, 256)
    red, green, blue = rng.integers(low, high, 3)
    return int(red), int(green), int(blue)


def _write(
    paper: Image.Image, figure: str, size: float, middle: tuple[float, float], ink: tuple[int, int, int]
) -> None:
    draw, font = ImageDraw.Draw(paper), ImageFont.load_default(size=size)
    left, top, right, bottom = draw.textbbox((0, 0), figure, font=font)
    draw.text((middle[0] - (left + right) / 2, middle[1] - (top + bottom) / 2), figure, font=font, fill=ink)
