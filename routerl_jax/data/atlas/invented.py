"""Invented worlds: made-up countries and elements with values of the same form as real ones, to practise reading on.

Their flags are bands and a sign (flags.py). Other made-up countries (`recoloured`) have realistic flags: flags of the training
split in other colours, some upside down. These keep the parts of real flags (canton, cross, star, emblem). So what a policy
learns on them about unseen flags holds for real ones.
"""

from __future__ import annotations

import functools
import io
import itertools
import re
from collections.abc import Iterator

import numpy as np
from jaxtyping import Float
from PIL import Image

from routerl_jax.data.atlas import flags
from routerl_jax.data.atlas.world import Entity, Split, real_entities, rounded

COUNTRIES: dict[Split, int] = {"train": 600, "validation": 42, "test": 138}  # recoloured: number of made-up countries
_MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
_COLOURS = np.array(list(flags.COLOURS.values()), np.float32)
_OFTEN = np.array([flags.OFTEN[name] for name in flags.COLOURS], float)
_SHADE = 12  # largest difference of a colour from the standard one, of 255
_FRAME = (112, 56)  # size at which flags are compared, in pixels: eight image tokens
_BLOCK = 8  # pixels; the distance of means over blocks is a lower bound of the flags' distance
# Facts whose values are names: their syllables make new names.
_NAMED = ("anthem", "peak", "capital", "discoverer")


def invented_world(seed: int, countries: int = 8, elements: int = 4) -> list[Entity]:
    """A small world; the same seed gives the same world."""
    rng = np.random.default_rng([2, seed])
    entities_by_name: dict[str, Entity] = {}  # names are what tells entities apart
    while len(entities_by_name) < countries:
        country = _country(rng)
        entities_by_name.setdefault(country.name, country)
    names = list(entities_by_name)
    for number in rng.choice(np.arange(1, 119), elements, replace=False):
        while (element := _element(rng, names, number)).name in entities_by_name:
            pass
        entities_by_name[element.name] = element
    return list(entities_by_name.values())


def _country(rng: np.random.Generator) -> Entity:
    facts = {
        "independence": f"{_date(rng)} {rng.integers(1500, 2010)}",
        "holiday": _worded(rng, "holiday"),
        "holiday_date": _date(rng),
        "anthem": " ".join(
            _word(rng).capitalize() if rng.random() < 0.7 else _word(rng) for _ in range(rng.integers(1, 4))
        ),
        "emblem": _worded(rng, "emblem"),
        "peak": _place_name(rng, ("Mount ", "Monte ", "Pico ", "Jabal ", "", "", "")),
        "export": _worded(rng, "export"),
        "crop": _worded(rng, "crop"),
        "capital": _place_name(rng, ("", "", "", "", "San ", "Port ")),
        "area": f"{_quantity(rng, 2, 7)} sq km",
        "code": "." + "".join(rng.choice(list("abcdefghijklmnopqrstuvwxyz"), 2)),
        "population": _quantity(rng, 4, 9),
        "median_age": f"{rng.uniform(15, 48):.1f} years",
        "life_expectancy": f"{rng.uniform(45, 88):.1f} years",
        "currency": _worded(rng, "currency"),
        "income": f"${int(rng.integers(4, 900)) * 100:,}",
        "partner": _worded(rng, "partner"),
    }
    for key in ("independence", "holiday", "anthem", "emblem", "peak", "export", "crop", "currency", "partner"):
        if rng.random() < 0.1:  # real entries have gaps too
            del facts[key]
    name = _name(rng)
    return Entity(name, "country", {**facts, "flag": str(flags.invented_design(name))})


def _element(rng: np.random.Generator, countries: list[str], number: int) -> Entity:
    name = _word(rng).capitalize() + str(rng.choice(["ium", "ium", "on", "ine", "um", ""]))
    facts = {
        "symbol": name[: rng.integers(1, 3)].capitalize(),
        "number": str(number),
        "weight": f"{rng.uniform(1, 300):.{rng.integers(1, 4)}f}",
    }
    if rng.random() < 0.8:
        facts["discoverer"] = (
            f"{_name(rng)} {_name(rng)}" if rng.random() < 0.7 else f"{_name(rng)} {_name(rng)} {_name(rng)}"
        )
        facts["year"] = str(rng.integers(1600, 2015))
        if rng.random() < 0.6:
            facts["place"] = str(rng.choice(countries))
    if rng.random() < 0.7:
        facts["producer"] = str(rng.choice(countries))
    return Entity(name, "element", facts)


@functools.cache
def _real_values(key: str) -> tuple[str, ...]:
    """Values of the training split's real entities."""
    return tuple(sorted({e.facts[key] for e in real_entities() if e.split == "train" and key in e.facts}))


def _worded(rng: np.random.Generator, key: str) -> str:
    """A real value, words of two real values recombined, or a made-up name."""
    values = _real_values(key)
    draw = rng.random()
    if draw < 0.4:
        return str(rng.choice(values))
    if draw < 0.7:
        first, second = str(rng.choice(values)).split(), str(rng.choice(values)).split()
        return " ".join([*first[: rng.integers(1, len(first) + 1)], *second[-1:]])
    name = _word(rng) if rng.random() < 0.7 else f"{_word(rng)} {_word(rng)}"
    return name.title() if values[0][0].isupper() else name


@functools.cache
def _syllables() -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """First, middle and last syllables of the training split's names, with their frequencies."""
    first, middle, last = [], [], []
    for entity in real_entities():
        if entity.split != "train":
            continue
        names = [entity.name, *(entity.facts[key] for key in _NAMED if key in entity.facts)]
        for word in re.findall(r"[A-Za-z]{3,}", " ".join(names)):
            parts = re.findall(r"[^aeiouy]*[aeiouy]+(?:[^aeiouy]+$)?", word.lower())
            if parts:
                first.append(parts[0])
                middle += parts[1:-1]
                last.append(parts[-1])
    return tuple(first), tuple(middle), tuple(last)


def _word(rng: np.random.Generator) -> str:
    first, middle, last = _syllables()
    inner = [middle[rng.integers(len(middle))] for _ in range(rng.choice([0, 0, 1, 1, 2]))]
    return "".join([first[rng.integers(len(first))], *inner, last[rng.integers(len(last))]])


def _name(rng: np.random.Generator) -> str:
    name = _word(rng).capitalize()
    return f"{name} {_word(rng).capitalize()}" if rng.random() < 0.15 else name


def _place_name(rng: np.random.Generator, prefixes: tuple[str, ...]) -> str:
    return str(rng.choice(np.asarray(prefixes, object))) + _name(rng)


def _date(rng: np.random.Generator) -> str:
    return f"{rng.integers(1, 29)} {rng.choice(_MONTHS)}"


def _quantity(rng: np.random.Generator, low: int, high: int) -> str:
    digits = int(rng.integers(low, high + 1))
    return rounded(int(rng.integers(10 ** (digits - 1), 10**digits)))


def raster(png: bytes) -> Float[np.ndarray, "56 112 3"]:
    """A flag in the form for comparisons: colours from 0 to 1."""
    with Image.open(io.BytesIO(png)) as picture:
        return np.asarray(picture.convert("RGB").resize(_FRAME, Image.Resampling.BICUBIC), np.float32) / 255


def recoloured_flag(rng: np.random.Generator, far: float) -> bytes:
    """A random made-up flag (PNG). `far`: its least root mean square difference from real flags."""
    sources, real = [name for name, split in _countries() if split == "train"], _real_blocks()
    while True:
        flag = _recoloured_png(flags.flag(sources[int(rng.integers(len(sources)))]), rng)
        if _distance(real, _blocks(flag)) >= far:
            return flag


@functools.cache
def recoloured(far: float) -> dict[str, tuple[Entity, bytes]]:
    """Made-up countries and their flags by name, `COUNTRIES` of each split. No two flags are nearer than `far`. The result is
    always the same."""
    rng, accepted, entities = np.random.default_rng(11), _real_blocks(), _entities()
    countries: dict[str, tuple[Entity, bytes]] = {}
    while len(countries) < sum(COUNTRIES.values()):
        flag = recoloured_flag(rng, far)
        blocks = _blocks(flag)
        if _distance(accepted, blocks) >= far:
            accepted = np.concatenate([accepted, blocks[None]])
            entity = next(entities)
            countries[entity.name] = entity, flag
    return countries


@functools.cache
def _countries() -> list[tuple[str, Split]]:
    return [(entity.name, entity.split) for entity in real_entities() if entity.kind == "country"]


@functools.cache
def _real_blocks() -> Float[np.ndarray, "N B"]:
    return np.stack([_blocks(flags.flag(name)) for name, _ in _countries()])


def _distance(accepted: Float[np.ndarray, "N B"], blocks: Float[np.ndarray, " B"]) -> float:
    """The distance of a flag from the nearest accepted flag, over blocks. It is at most the distance over all pixels."""
    return float(np.square(accepted - blocks).mean(1).min() ** 0.5)


def _blocks(png: bytes) -> Float[np.ndarray, " B"]:
    rows, columns = _FRAME[1] // _BLOCK, _FRAME[0] // _BLOCK
    return raster(png).reshape(rows, _BLOCK, columns, _BLOCK, 3).mean((1, 3)).ravel()


def _entities() -> Iterator[Entity]:
    """Invented countries, `COUNTRIES` of each split, with distinct names."""
    used_names = {name for name, _ in _countries()}
    for split, missing in COUNTRIES.items():
        seeds = itertools.count(1000)
        while missing:
            (entity,) = invented_world(next(seeds), countries=1, elements=0)
            if entity.name not in used_names and entity.split == split:
                used_names.add(entity.name)
                missing -= 1
                yield entity


def _recoloured_png(png: bytes, rng: np.random.Generator) -> bytes:
    """The flag with each colour replaced by another; upside down with probability one half."""
    with Image.open(io.BytesIO(png)) as picture:
        pixels = np.asarray(picture.convert("RGB"), np.float32)
    # the standard colour that each pixel is nearest to, by the square of the distance without the term that all share
    colours = np.argmin(np.square(_COLOURS).sum(-1) - 2 * pixels @ _COLOURS.T, axis=-1)
    order = np.argsort(-np.bincount(colours.ravel(), minlength=len(_COLOURS)), kind="stable")
    drawn = rng.choice(len(_COLOURS), len(_COLOURS), replace=False, p=_OFTEN / _OFTEN.sum())
    table = np.empty((len(_COLOURS), 3), np.uint8)
    table[order] = np.clip(_COLOURS[drawn] + rng.integers(-_SHADE, _SHADE + 1, (len(drawn), 3)), 0, 255)
    changed = Image.fromarray(table[colours])
    if rng.integers(2):
        changed = changed.transpose(Image.Transpose.FLIP_TOP_BOTTOM)
    buffer = io.BytesIO()
    changed.save(buffer, "PNG")
    return buffer.getvalue()
