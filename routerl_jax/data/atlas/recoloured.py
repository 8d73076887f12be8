"""Countries that don't exist, with flags that look real: those of the training split in other colours, some upside down.

`invented.py`'s flags are bands and a sign. These keep what real flags have (canton, cross, star, emblem), so that what is
learnt on them about flags never seen holds for real ones.
"""

from __future__ import annotations

import functools
import io
import itertools
import zlib
from collections.abc import Iterator

import numpy as np
from jaxtyping import Float, Int
from PIL import Image

from routerl_jax.data.atlas import flags, world
from routerl_jax.data.atlas.invented import invented_world

MOST = 600
_WAYS = 12  # to change one flag, most of which are too near another flag
_COLOURS = np.array(list(flags.COLOURS.values()), np.float32)
_OFTEN = np.array([flags.OFTEN[name] for name in flags.COLOURS], float)
_SHADE = 12  # most that a colour is off the standard one, of 255
_FRAME = (112, 56)  # pixels at which flags are compared: those of eight image tokens
_BLOCK = 8  # pixels; where means over blocks are far apart, the flags are at least as far


def raster(png: bytes) -> Float[np.ndarray, "56 112 3"]:
    """A flag as it is compared with others: colours from 0 to 1."""
    with Image.open(io.BytesIO(png)) as picture:
        return np.asarray(picture.convert("RGB").resize(_FRAME, Image.Resampling.BICUBIC), np.float32) / 255


@functools.cache
def recoloured(far: float) -> dict[str, tuple[world.Entity, bytes]]:
    """Made-up countries by name, each with its flag (PNG): at most `MOST`, the same every time.

    Args:
      far: least root mean square difference of a flag from every other one, real ones included.
    """
    real = [entity for entity in world.real_entities() if entity.kind == "country"]
    others = np.stack([_blocks(flags.flag(entity.name)) for entity in real])
    entities = _entities({entity.name for entity in real})
    found: dict[str, tuple[world.Entity, bytes]] = {}
    ways = [(entity.name, way) for entity in real if entity.split == "train" for way in range(_WAYS)]
    for name, way in sorted(ways, key=lambda one: zlib.crc32(repr(one).encode())):
        flag = _changed(flags.flag(name), np.random.default_rng([11, zlib.crc32(f"{name}/{way}".encode())]))
        blocks = _blocks(flag)
        if np.square(others - blocks).mean(1).min() < far**2:
            continue
        others = np.concatenate([others, blocks[None]])
        entity = next(entities)
        found[entity.name] = entity, flag
        if len(found) == MOST:
            break
    return found


def _blocks(png: bytes) -> Float[np.ndarray, " B"]:
    rows, columns = _FRAME[1] // _BLOCK, _FRAME[0] // _BLOCK
    return raster(png).reshape(rows, _BLOCK, columns, _BLOCK, 3).mean((1, 3)).ravel()


def _entities(taken: set[str]) -> Iterator[world.Entity]:
    """Invented countries of the training split, none of whose names is taken."""
    names = set(taken)
    for seed in itertools.count(1000):
        (entity,) = invented_world(seed, countries=1, elements=0)
        if entity.name not in names and entity.split == "train":
            names.add(entity.name)
            yield entity


def _changed(png: bytes, rng: np.random.Generator) -> bytes:
    """The flag with each of its colours replaced by another, and every other time upside down."""
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
    away = np.square(_COLOURS).sum(-1) - 2 * pixels @ _COLOURS.T  # less what all colours share
    return np.argmin(away, axis=-1)
