"""Worked examples of questions, for any plan of their searches: the caller chooses the plan.

There are four plans: answer, search by the picture, search in words, search by the picture and then in words. If a plan's
searches don't find the answer, it is a known fact, or else a guess.
"""

from __future__ import annotations

import dataclasses
import re
import zlib
from collections.abc import Sequence
from typing import Literal

import numpy as np

from routerl_jax.core.types import Demonstration, DemonstrationStep, Example, Passage
from routerl_jax.data.atlas import known, world
from routerl_jax.data.atlas.sight import RARELY, UNKNOWN

Plan = tuple[Literal["image", "text"], ...]

PLANS: tuple[Plan, ...] = ((), ("image",), ("text",), ("image", "text"))
NEEDED: dict[str, Plan] = {"search_free": (), "image": ("image",), "text": ("text",), "mixed": ("image", "text")}
SAID = "This says it."


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
        """States what the policy knows and doesn't know before a search, in the words in which it was taught (`atlas.sight`).

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


def planned(example: Example, plan: Plan, rarely: float = RARELY) -> Planned:
    """A question of `known_questions` with a plan. The guesses are a function of the question's id and the plan."""
    rng = np.random.default_rng([10, zlib.crc32(f"{example.id}/{'-'.join(plan)}".encode())])
    country, relation = example.metadata["country"], example.metadata["relation"]
    assumed = country if known.strength(country) != "none" else _random_country(rng, rarely)
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
