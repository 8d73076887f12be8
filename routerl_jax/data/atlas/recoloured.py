"""Made-up countries with realistic flags: flags of the training split in other colours, some upside down.

The flags of `invented.py` are bands and a sign. The flags here keep the parts of real flags (canton, cross, star, emblem). So
what a policy learns on them about unseen flags holds for real ones.
"""

from __future__ import annotations

import functools
import io
import itertools
from collections.abc import Iterator

import numpy as np
from jaxtyping import Float, Int
from PIL import Image

from routerl_jax.data.atlas import flags, world
from routerl_jax.data.atlas.invented import invented_world

COUNTRIES: dict[world.Split, int] = {"train": 600, "validation": 42, "test": 138}  # number of made-up countries
_COLOURS = np.array(list(flags.COLOURS.values()), np.float32)
_OFTEN = np.array([flags.OFTEN[name] for name in flags.COLOURS], float)
_SHADE = 12  # largest difference of a colour from the standard one, of 255
_FRAME = (112, 56)  # size at which flags are compared, in pixels: eight image tokens
_BLOCK = 8  # pixels; the distance of means over blocks is a lower bound of the flags' distance


def raster(png: bytes) -> Float[np.ndarray, "56 112 3"]:
    """A flag in the form for comparisons: colours from 0 to 1."""
    with Image.open(io.BytesIO(png)) as picture:
        return np.asarray(picture.convert("RGB").resize(_FRAME, Image.Resampling.BICUBIC), np.float32) / 255


def recoloured_flag(rng: np.random.Generator, far: float) -> bytes:
    """A random made-up flag (PNG). `far`: its least root mean square difference from real flags."""
    sources, real = _sources(), _real_blocks()
    while True:
        flag = _recoloured_png(flags.flag(sources[int(rng.integers(len(sources)))]), rng)
        if _distance(real, _blocks(flag)) >= far:
            return flag


@functools.cache
def recoloured(far: float) -> dict[str, tuple[world.Entity, bytes]]:
    """Made-up countries and their flags by name, `COUNTRIES` of each split. No two flags are nearer than `far`. The result is
    always the same."""
    rng, accepted, entities = np.random.default_rng(11), _real_blocks(), _entities()
    countries: dict[str, tuple[world.Entity, bytes]] = {}
    while len(countries) < sum(COUNTRIES.values()):
        flag = recoloured_flag(rng, far)
        blocks = _blocks(flag)
        if _distance(accepted, blocks) >= far:
            accepted = np.concatenate([accepted, blocks[None]])
            entity = next(entities)
            countries[entity.name] = entity, flag
    return countries


def _sources() -> list[str]:
    """The countries whose flags are changed."""
    return [name for name, split in _countries() if split == "train"]


@functools.cache
def _countries() -> list[tuple[str, world.Split]]:
    return [(entity.name, entity.split) for entity in world.real_entities() if entity.kind == "country"]


@functools.cache
def _real_blocks() -> Float[np.ndarray, "N B"]:
    return np.stack([_blocks(flags.flag(name)) for name, _ in _countries()])


def _distance(accepted: Float[np.ndarray, "N B"], blocks: Float[np.ndarray, " B"]) -> float:
    """The distance of a flag from the nearest accepted flag, over blocks. It is at most the distance over all pixels."""
    return float(np.square(accepted - blocks).mean(1).min() ** 0.5)


def _blocks(png: bytes) -> Float[np.ndarray, " B"]:
    rows, columns = _FRAME[1] // _BLOCK, _FRAME[0] // _BLOCK
    return raster(png).reshape(rows, _BLOCK, columns, _BLOCK, 3).mean((1, 3)).ravel()


def _entities() -> Iterator[world.Entity]:
    """Invented countries, `COUNTRIES` of each split, with distinct names."""
    used_names = {name for name, _ in _countries()}
    for split, count in COUNTRIES.items():
        yield from itertools.islice(_invented(split, used_names), count)


def _invented(split: world.Split, used_names: set[str]) -> Iterator[world.Entity]:
    for seed in itertools.count(1000):
        (entity,) = invented_world(seed, countries=1, elements=0)
        if entity.name not in used_names and entity.split == split:
            used_names.add(entity.name)
            yield entity


def _recoloured_png(png: bytes, rng: np.random.Generator) -> bytes:
    """The flag with each colour replaced by another; upside down with probability one half."""
    with Image.open(io.BytesIO(png)) as picture:
        pixels = np.asarray(picture.convert("RGB"), np.float32)
    colours = _nearest(pixels)
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


def _nearest(pixels: Float[np.ndarray, "H W 3"]) -> Int[np.ndarray, "H W"]:
    """The standard colour that each pixel is nearest to."""
    away = np.square(_COLOURS).sum(-1) - 2 * pixels @ _COLOURS.T  # without the term that all colours share
    return np.argmin(away, axis=-1)
