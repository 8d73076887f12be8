"""An encoder of pictures without weights, where no CLIP is at hand: where which colours are; its texts are another encoder's.

It finds the same or nearly the same picture again (flags, logos, covers), whatever its size and compression. It does not
know what a picture shows, and no text finds a picture, only the caption beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float32
from PIL import Image

from routerl_jax.core.progress import Bar
from routerl_jax.core.types import TextAndImage
from routerl_jax.models.embedding import Embedder, PictureEmbedder, text_and_picture
from routerl_jax.models.images import ImageSource, decode_image

VERSION = 1  # of the vectors
_WIDE, _HIGH = 12, 8  # cells
_LEVEL = 0.5  # a constant beside the cells, so that a picture and its paler copy differ in direction
# Weight of a text beside a picture: between two captions to one question cosines differ by a few tenths, between two
# tricolours by less than a thousandth. Where both are asked for, the picture decides; words do where there is no picture.
_TEXT_WEIGHT = 0.02


class Colours(PictureEmbedder):
    """Vectors of texts, pictures, or both: a text encoder's, the mean colours of 12 x 8 cells, the two side by side.

    Args:
      texts: encodes texts.
    """

    def __init__(self, texts: Embedder) -> None:
        self.texts = texts
        self.config = texts.config
        self.tokenizer = texts.tokenizer
        self.mesh = texts.mesh

    @property
    def dim(self) -> int:
        """Width of the vectors."""
        return self.texts.dim + 3 * _WIDE * _HIGH + 1

    @property
    def longest_text(self) -> int:
        """Tokens of a text that `embed` reads."""
        return self.texts.longest_text

    def _vectors(
        self, inputs: Sequence[str | ImageSource | TextAndImage], prefix: str, batch_size: int, bar: Bar
    ) -> Float32[np.ndarray, "N D"]:
        split = [text_and_picture(one) for one in inputs]
        joined = np.zeros((len(inputs), self.dim), np.float32)
        written = [i for i, (text, _) in enumerate(split) if text]
        if written:
            texts = [text for text, _ in split if text]
            joined[written, : self.texts.dim] = _TEXT_WEIGHT * self.texts.embed(
                texts, prefix=prefix, batch_size=batch_size
            )
        for i, (_, image) in enumerate(split):
            if image is not None:
                joined[i, self.texts.dim :] = colour_layout(decode_image(image))
            bar.update()
        return joined / np.maximum(np.linalg.norm(joined, axis=1, keepdims=True), 1e-12)


def colour_layout(picture: Image.Image) -> Float32[np.ndarray, " 289"]:
    """Mean colours of 12 x 8 cells around grey, and a constant, at unit length."""
    cells = np.asarray(picture.resize((_WIDE, _HIGH), Image.Resampling.BOX), np.float32) / 255 - 0.5
    vector = np.append(cells.reshape(-1) / np.sqrt(cells.size), np.float32(_LEVEL))
    return vector / np.linalg.norm(vector)
