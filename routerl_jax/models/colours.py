"""An encoder of pictures without weights, for use without CLIP. It encodes the layout of colours; another encoder encodes
texts.

It finds the same or nearly the same picture again (flags, logos, covers), for any size and compression. It does not recognise
what a picture shows. A text can only find a picture's caption, not the picture.
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
_LEVEL = 0.5  # an additional constant component, so that a picture and its paler copy differ in direction
# Weight of a text relative to a picture. The cosines of two captions with one question differ by a few tenths, those of two
# tricolours by less than a thousandth. If a query has both, the picture decides.
_TEXT_WEIGHT = 0.02


class Colours(PictureEmbedder):
    """Vectors of texts (by a text encoder), pictures (mean colours of 12 x 8 cells), or both (the two concatenated).

    Args:
      texts: encodes texts.
    """

    def __init__(self, texts: Embedder) -> None:
        self.texts = texts
        self.config = texts.config
        self.dim = texts.dim + 3 * _WIDE * _HIGH + 1
        self.tokenizer = texts.tokenizer
        self.mesh = texts.mesh

    @property
    def longest_text(self) -> int:
        """Tokens of a text that `embed` reads."""
        return self.texts.longest_text

    def _vectors(
        self, inputs: Sequence[str | ImageSource | TextAndImage], prefix: str, batch_size: int, bar: Bar
    ) -> Float32[np.ndarray, "N D"]:
        split = [text_and_picture(item) for item in inputs]
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
    """Mean colours of 12 x 8 cells, relative to grey, and a constant; unit length."""
    cells = np.asarray(picture.resize((_WIDE, _HIGH), Image.Resampling.BOX), np.float32) / 255 - 0.5
    vector = np.append(cells.reshape(-1) / np.sqrt(cells.size), np.float32(_LEVEL))
    return vector / np.linalg.norm(vector)
