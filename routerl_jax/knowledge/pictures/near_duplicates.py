"""Detects pictures that look the same, by a fingerprint of 256 brightness steps and the mean colour. It is robust to changes
of size and compression."""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, UInt8
from PIL import Image

_SIDE = 16
BYTES = _SIDE * _SIDE // 8 + 3
_STEP = 2  # levels of 255; smaller ones are noise of compression
# of 256 that may differ: of 182 real pictures, halved JPEG copies differ in 14 at most, others in 33 at least
_MOST_BITS = 16
_MOST_COLOUR = 12  # largest difference of mean colours, of 255


def difference_hash(picture: Image.Image) -> UInt8[np.ndarray, " F"]:
    """A picture's fingerprint: the grid points at which it gets brighter to the right (a difference hash), and its mean
    colour."""
    grey = np.asarray(picture.convert("L").convert("F").resize((_SIDE + 1, _SIDE), Image.Resampling.BOX))
    bits = np.packbits(grey[:, 1:] - grey[:, :-1] > _STEP)
    colour = np.asarray(picture.convert("RGB").resize((1, 1), Image.Resampling.BOX), np.uint8).reshape(3)
    return np.concatenate([bits, colour])


def near_duplicates(
    fingerprint: UInt8[np.ndarray, " F"], fingerprints: UInt8[np.ndarray, "N F"]
) -> Bool[np.ndarray, " N"]:
    """Whether each of the other fingerprints belongs to the same picture."""
    differ = np.unpackbits(np.bitwise_xor(fingerprint[:-3], fingerprints[:, :-3]), axis=1).sum(1)
    colours = np.abs(fingerprint[-3:].astype(np.int16) - fingerprints[:, -3:].astype(np.int16)).max(1)
    return (differ <= _MOST_BITS) & (colours <= _MOST_COLOUR)
