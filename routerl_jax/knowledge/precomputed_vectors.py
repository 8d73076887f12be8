"""Vectors that another program made: checks that they belong to the passages, and chooses the index that searches them."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float32

from routerl_jax.core.types import Passage
from routerl_jax.knowledge.faiss_file import FaissVectors
from routerl_jax.knowledge.index import AUTO, backend_of
from routerl_jax.knowledge.store import StoredPassages
from routerl_jax.knowledge.vector_index import FAISS_IVF, VectorSource

_SAMPLE, _LEAST_OWN = 32, 0.75  # passages that are embedded for the check, and the share that must fit


def backend_over(requested: str, vectors: FaissVectors | None) -> str:
    """The index to build. Unless another one is requested, a file's own lists are searched, or else all of its vectors."""
    if vectors is None or requested != AUTO:
        return backend_of(requested)
    return "exact" if vectors.lists is None else FAISS_IVF


def check_width(source: str | pathlib.Path, width: int, expected: int) -> None:
    """Raises ValueError if the `width` of vectors differs from the `expected` one of the encoder. `source`: their file."""
    if width != expected:
        raise ValueError(
            f"{source}: its vectors have width {width}, but the encoder gives {expected}: set encoder to the one that made them"
        )


def check_vectors(
    source: str | pathlib.Path,
    vectors: VectorSource,
    passages: StoredPassages,
    embed: Callable[[Sequence[Passage]], Float32[np.ndarray, "N D"]],
) -> None:
    """Checks that vectors are those of the passages: a few passages are embedded, and must be nearest to their own.

    Args:
      source: the file or directory of the vectors, for errors.

    Raises:
      ValueError: there are more or fewer, or most belong to other passages, as of another corpus or another encoder.
    """
    if vectors.shape[0] != len(passages):
        raise ValueError(
            f"{source}: holds {vectors.shape[0]} vectors, but the corpus has {len(passages)} passages: give the corpus that it "
            "was made from"
        )
    rows = np.unique(np.linspace(0, len(passages) - 1, _SAMPLE).astype(np.int64))
    nearest = (embed(passages.take(rows)) @ vectors.take(rows).T).argmax(1)
    matching = int((nearest == np.arange(len(rows))).sum())
    if matching < _LEAST_OWN * len(rows):
        raise ValueError(
            f"{source}: its vectors are not those of the corpus by this encoder: only {matching} of {len(rows)} passages are "
            "nearest to their own. Give the corpus, the encoder and the passage_prefix that it was made with"
        )
