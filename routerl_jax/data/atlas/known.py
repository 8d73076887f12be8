"""Questions about flags and facts, some of which a policy knows. They decide which searches a question needs.

Sixty countries are known. A policy is taught their flags (forty often, twenty rarely) and three facts of each
(`KNOWN_RELATIONS`). It is never shown three more facts of every country (`OTHER_RELATIONS`), nor any other flag. So the
question and the picture together decide which searches are needed:

    kind         picture and question                               searches
    search_free  a known flag: whose, or one of the known facts     none
    text         a known flag: one of the other facts               a text search
    image        an unseen flag: whose                              an image search
    mixed        an unseen flag: any of the six facts               an image search, then a text search

The known countries are from Atlas's training split. The other countries of a split are from the same split of Atlas, or made up
(`recoloured`). So training, validation and test share only the known countries, and no two questions share a picture.
"""

from __future__ import annotations

import collections
import functools
import zlib
from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import Float

from routerl_jax.core.types import Example, Passage
from routerl_jax.data.atlas import flags, world
from routerl_jax.data.atlas.invented import raster, recoloured

Kind = Literal["search_free", "text", "image", "mixed"]
Strength = Literal["many", "few", "none"]

KINDS: tuple[Kind, ...] = ("search_free", "text", "image", "mixed")
KNOWN_RELATIONS = ("capital", "peak", "income")
OTHER_RELATIONS = ("population", "area", "independence")
RELATIONS = (*KNOWN_RELATIONS, *OTHER_RELATIONS)
FACTS, FLAGS = "facts", "flags"  # the parts of Atlas that are `fact_passages` and `flag_passages`
MANY, FEW = 40, 20  # known countries by how often their flags are shown
PIXELS = 8 * 28 * 28  # pixels of a picture: four to nine image tokens
# Root mean square difference of two flags, colours from 0 to 1, at the size of eight tokens. Of pairs of pictures of one flag
# (`flags.photographed`), 19 in 20 are nearer than this.
NEAR = 0.17
_MOST_ALIKE = 4  # countries that may share a value; if more did, guessing would pay
WHOSE = ("Which country's flag is this?", "Whose flag is this?")
ABOUT = ("What is the {noun} of the country with this flag?", "This is the flag of a country. What is its {noun}?")


@functools.cache
def countries() -> dict[str, world.Entity]:
    """All real countries by name."""
    return {entity.name: entity for entity in world.real_entities() if entity.kind == "country"}


@functools.cache
def searched_countries() -> dict[str, world.Entity]:
    """All countries that a search can find, by name: the real and the made-up ones."""
    return countries() | {name: entity for name, (entity, _) in recoloured(NEAR).items()}


def flag(country: str) -> bytes:
    """The PNG of a country's flag. Raises KeyError for a name without one."""
    made_up = recoloured(NEAR).get(country)
    return made_up[1] if made_up else flags.flag(country)


def facts(country: str) -> dict[str, str]:
    """Those of the six facts that questions can ask for: stated, not visible from the name, shared by few countries."""
    entity, alike = searched_countries()[country], _alike()
    return {
        key: value
        for key in RELATIONS
        if (value := entity.facts.get(key))
        and country not in value
        and value not in country
        and alike[key, value] <= _MOST_ALIKE
    }


@functools.cache
def _alike() -> collections.Counter[tuple[str, str]]:
    return collections.Counter((key, value) for entity in countries().values() for key, value in entity.facts.items())


def distance(country: str, other_country: str) -> float:
    """How much two countries' flags differ (`NEAR`)."""
    return float(np.sqrt(np.mean((_raster(country) - _raster(other_country)) ** 2)))


@functools.cache
def _raster(country: str) -> Float[np.ndarray, "H W 3"]:
    return raster(flag(country))


@functools.cache
def known_countries() -> dict[str, Strength]:
    """The sixty known countries, with how often their flags are shown.

    They are countries of the training split whose six facts can all be asked for, in the order of a hash of their names. A
    country is skipped if its flag is near that of one before. The first forty are shown often, the next twenty rarely.
    """
    train = [name for name, entity in countries().items() if entity.split == "train"]
    chosen: list[str] = []
    for name in sorted(train, key=lambda name: zlib.crc32(f"known/{name}".encode())):
        if len(facts(name)) == len(RELATIONS) and all(distance(name, other) >= NEAR for other in chosen):
            chosen.append(name)
    return {name: "many" if i < MANY else "few" for i, name in enumerate(chosen[: MANY + FEW])}


@functools.cache
def unknown_countries(split: world.Split) -> tuple[str, ...]:
    """The unknown countries of a split: real ones whose flag is near no other country's, and the split's made-up ones.

    Such a flag can't be mistaken for a known one, and a search can distinguish it. The made-up countries are needed because a
    policy would memorise the few real ones of training.
    """
    real = tuple(
        name
        for name, entity in countries().items()
        if entity.split == split
        and name not in known_countries()
        and all(distance(name, other) >= NEAR for other in countries() if other != name)
    )
    return real + tuple(name for name, (entity, _) in recoloured(NEAR).items() if entity.split == split)


def strength(country: str) -> Strength:
    """How often a policy is shown a country's flag."""
    return known_countries().get(country, "none")


def flag_passages() -> list[Passage]:
    """The passages of the image search: every country's flag, as a `data:` URI."""
    return [
        Passage(id=f"{FLAGS}/{name}", title=name, text=f"The flag of {name}.", image=flags.data_uri(flag(name)))
        for name in searched_countries()
    ]


def fact_passages() -> list[Passage]:
    """The passages of the text search: the fact of every country and each of the six relations."""
    return [
        Passage(
            id=passage_id(name, key),
            title=name,
            text=f"The {world.RELATIONS[key].noun} of {name} is {entity.facts[key]}.",
        )
        for name, entity in searched_countries().items()
        for key in RELATIONS
        if key in entity.facts
    ]


def known_questions(split: world.Split, count: int, start: int = 0) -> list[Example]:
    """Questions with one picture each. The four kinds take turns. The questions are the same in every call.

    `start` is the index of the first question. Questions of other indices have other pictures.

    `metadata` has the `kind`, the `country`, the `relation` ("" if the question is whose flag this is), its `strength`, a
    `type` (kind and strength; the strength is "made_up" for a made-up country) and, like other questions of Atlas, `entities`.

    Raises:
      ValueError: `count` or `start` is no multiple of four.
    """
    if count % len(KINDS) or start % len(KINDS):
        wrong = f"{count} questions, the first at {start}, are no {len(KINDS)} equal kinds"
        raise ValueError(f"{wrong}; ask for multiples of {len(KINDS)}")
    rounds = range(start // len(KINDS), (start + count) // len(KINDS))
    return [_question(split, kind, i) for i in rounds for kind in KINDS]


def _question(split: world.Split, kind: Kind, index: int) -> Example:
    """A question of a kind. Every second search-free question asks whose flag it is; otherwise these words would imply an
    unknown flag."""
    name = f"known/{split}/{kind}/{index}"
    rng = np.random.default_rng([7, zlib.crc32(name.encode())])
    is_known = kind in ("search_free", "text")
    country = _in_turn(tuple(known_countries()) if is_known else unknown_countries(split), f"{split}/{kind}", index)
    relation = ""
    if kind != "image" and (kind != "search_free" or index % 2):
        relations = {"search_free": KNOWN_RELATIONS, "text": OTHER_RELATIONS, "mixed": RELATIONS}[kind]
        askable = [key for key in relations if key in facts(country)]
        relation = askable[int(rng.integers(len(askable)))]
    wording = (ABOUT if relation else WHOSE)[int(rng.integers(2))]
    return Example(
        id=name,
        question=wording.format(noun=world.RELATIONS[relation].noun) if relation else wording,
        answers=(facts(country)[relation] if relation else country,),
        images=(flags.photographed(flag(country), name, PIXELS),),
        metadata={
            "kind": kind,
            "country": country,
            "relation": relation,
            "strength": strength(country),
            "type": f"{kind}_{strength(country) if country in countries() else 'made_up'}",
            "entities": [country],
        },
    )


def _in_turn(names: Sequence[str], key: str, index: int) -> str:
    """The name at an index. All names come once before any repeats, in a new order each time."""
    turn, position = divmod(index, len(names))
    order = np.random.default_rng([8, zlib.crc32(f"{key}/{turn}".encode())]).permutation(len(names))
    return names[int(order[position])]


def passage_id(country: str, relation: str) -> str:
    """The id of the passage that states a fact."""
    return f"fact/{country}/{relation}"
