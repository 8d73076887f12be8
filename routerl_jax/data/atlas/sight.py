"""What a small policy with vision is taught: to see, the known flags and facts (`SightSource`), and to search (`planned`).

`SightSource` describes pictures, names the known flags, and states facts of their countries. Questions have no agent's prompt,
and none is about searching. So the policy learns to see, learns the known flags and facts, and learns to say that it doesn't
know a flag, as large models do. It learns no rule for when to search.

`planned` makes worked examples of questions for any plan of their searches. The caller chooses the plan: answer, search by the
picture, search in words, search by the picture and then in words. If a plan's searches don't find the answer, it is a known
fact, or else a guess.
"""

from __future__ import annotations

import dataclasses
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageDraw, ImageFont

from routerl_jax.core.types import Demonstration, DemonstrationStep, Example, Passage
from routerl_jax.data.atlas import flags, known, world
from routerl_jax.data.atlas.invented import invented_world, recoloured_flag
from routerl_jax.data.atlas.pages import PAPER

FIGURES = "0123456789"
TOKEN = 28  # side of an image token, in pixels
DESCRIBE, FIGURES_OF = "What is on this flag?", "Which figures are on this picture?"
UNKNOWN = "I don't know this flag."
RARELY = 0.25  # frequency of a flag of strength "few", relative to one of strength "many"
Plan = tuple[Literal["image", "text"], ...]
PLANS: tuple[Plan, ...] = ((), ("image",), ("text",), ("image", "text"))
NEEDED: dict[str, Plan] = {"search_free": (), "image": ("image",), "text": ("text",), "mixed": ("image", "text")}
SAID = "This says it."


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
        return taught(kind, f"sight-{self.seed}-{index}", rng, _random_country(rng, self.rarely))


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
    paper = Image.new("RGB", (4 * TOKEN, TOKEN), PAPER)  # on white paper, digits are learnt much later
    for i, figure in enumerate(figures):
        x = (i + 0.5) * TOKEN + push + rng.uniform(-2, 2)
        _write(paper, figure, size, (x, TOKEN / 2 + rng.uniform(-3, 3)), ink)
    return np.asarray(paper), figures


def sheet_of_figures(rng: np.random.Generator) -> tuple[UInt8[np.ndarray, "H W 3"], str]:
    """Sixteen digits of all sizes and shades, one per token of a picture of four by four tokens, row by row."""
    figures = _drawn_figures(rng, 16)
    paper = Image.new("RGB", (4 * TOKEN, 4 * TOKEN), PAPER)
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Planned:
    """A question with its searches, and the country and answer to use if they don't find anything.

    Attributes:
      country: the assumed country of the picture, without a search: the right one for a known flag, else a random known one.
      guess: the answer if it is neither known nor in a passage: a random value of the relation.
    """

    example: Example
    plan: Plan
    country: str
    guess: str

    @property
    def relation(self) -> str:
        """The relation that the question asks for; "" if it asks for the country."""
        return self.example.metadata["relation"]

    def named(self, passages: Sequence[Passage] | None) -> str:
        """The country, given the passages of a search by the picture: the right one if it is among them, else the first."""
        if not passages:
            return self.country
        titles = [passage.title for passage in passages]
        return right if (right := self.example.metadata["country"]) in titles else titles[0]

    def query(self, country: str) -> str:
        """The query of the search in words."""
        return f"{world.RELATIONS[self.relation].noun} of {country}" if self.relation else f"flag of {country}"

    def demonstration(
        self, tools: tuple[str, str], by_picture: Sequence[Passage] | None, in_words: Sequence[Passage] | None
    ) -> Demonstration:
        """The worked example.

        Args:
          tools: names of the knowledge bases for pictures and words.
          by_picture, in_words: passages that the searches found; None for a search that is not in the plan.
        """
        country, read = self.named(by_picture), bool(by_picture)
        steps: list[DemonstrationStep] = []
        if by_picture is not None:
            thought = self._thought(self.country)
            steps.append(DemonstrationStep(thought=thought, query="", tool=tools[0], passages=tuple(by_picture)))
        if in_words is not None:
            thought, query = self._thought(country, read), self.query(country)
            steps.append(DemonstrationStep(thought=thought, query=query, tool=tools[1], passages=tuple(in_words)))
        return Demonstration(
            example=self.example,
            steps=tuple(steps),
            thought=self._thought(country, read) if in_words is None else SAID,
            answer=self._answer(country, in_words or ()),
        )

    def _thought(self, country: str, read: bool = False) -> str:
        """States what the policy knows and doesn't know before a search, in the words in which it was taught (`taught`).

        Args:
          country: the assumed country of the picture.
          read: whether a search brought that to light.
        """
        if not read and known.strength(self.example.metadata["country"]) == "none":
            return UNKNOWN
        identification = f"It is {country}."
        if not self.relation:
            return identification
        noun = world.RELATIONS[self.relation].noun
        fact = (
            f"Its {noun} is {self._remembered(country)}." if self._is_taught(country) else f"I don't know its {noun}."
        )
        return f"{identification} {fact}"

    def _is_taught(self, country: str) -> bool:
        return self.relation in known.KNOWN_RELATIONS and known.strength(country) != "none"

    def _remembered(self, country: str) -> str:
        return known.facts(country)[self.relation] if self._is_taught(country) else self.guess

    def _answer(self, country: str, passages: Sequence[Passage]) -> str:
        if not self.relation:
            return country
        stated = known.passage_id(country, self.relation)
        if any(passage.id == stated for passage in passages):
            return known.searched_countries()[country].facts[self.relation]
        return self._remembered(country)


def renamed(demonstration: Demonstration, name: str) -> Demonstration:
    """The demonstration with another name for the question's country, in all passages that were found and all later texts. So
    names are read, not remembered."""
    country = demonstration.example.metadata["country"]
    word = re.compile(rf"\b{re.escape(country)}\b")

    def rename(passage: Passage) -> Passage:
        if passage.title != country:
            return passage
        return dataclasses.replace(passage, title=name, text=word.sub(name, passage.text))

    steps = tuple(
        dataclasses.replace(
            step,
            thought=word.sub(name, step.thought),
            query=word.sub(name, step.query),
            passages=tuple(map(rename, step.passages)),
        )
        for step in demonstration.steps
    )
    thought, answer = (word.sub(name, text) for text in (demonstration.thought, demonstration.answer))
    return dataclasses.replace(demonstration, steps=steps, thought=thought, answer=answer)


def restated(demonstration: Demonstration, value: str) -> Demonstration:
    """The demonstration with another value of the fact, in the passage that states it and in the answer. The thoughts still
    state the known value, so it teaches to believe what is read. If no passage states the fact, nothing changes."""
    metadata = demonstration.example.metadata
    stated = known.passage_id(metadata["country"], metadata["relation"])

    def restate(passage: Passage) -> Passage:
        if passage.id != stated:
            return passage
        return dataclasses.replace(passage, text=passage.text.replace(demonstration.answer, value))

    steps = tuple(
        dataclasses.replace(step, passages=tuple(map(restate, step.passages))) for step in demonstration.steps
    )
    return (
        demonstration if steps == demonstration.steps else dataclasses.replace(demonstration, steps=steps, answer=value)
    )


def planned(example: Example, plan: Plan) -> Planned:
    """A question of `known_questions` with a plan. The guesses are a function of the question's id and the plan."""
    rng = np.random.default_rng([10, zlib.crc32(f"{example.id}/{'-'.join(plan)}".encode())])
    country, relation = example.metadata["country"], example.metadata["relation"]
    assumed = country if known.strength(country) != "none" else _random_country(rng, RARELY)
    return Planned(
        example=example, plan=plan, country=assumed, guess=value_by_chance(relation, rng) if relation else ""
    )


def _random_country(rng: np.random.Generator, rarely: float) -> str:
    """A random known country. Countries of strength "few" are drawn less often (`rarely`)."""
    names = known.known_countries()
    weights = np.array([1.0 if often == "many" else rarely for often in names.values()])
    return list(names)[int(rng.choice(len(names), p=weights / weights.sum()))]


def value_by_chance(relation: str, rng: np.random.Generator) -> str:
    """The value of a relation of a random known country."""
    values = [facts[relation] for name in known.known_countries() if relation in (facts := known.facts(name))]
    return values[int(rng.integers(len(values)))]
