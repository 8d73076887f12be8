"""Vectors that another program made: checks that they belong to the passages, and chooses the index that searches them."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float32

from routerl_jax.core.types import Passage
from routerl_jax.knowledge.faiss_file import FaissVectors
from routerl_jax.knowledge.faiss_index import FAISS_IVF
from routerl_jax.knowledge.index import AUTO, backend_of
from routerl_jax.knowledge.store import StoredPassages
from routerl_jax.knowledge.vector_index import VectorSource

_SAMPLE, _LEAST_OWN = 32, 0.75  # passages that are embedded for the check, and the share that must fit


def backend_over(asked: str, given: FaissVectors | None) -> str:
    """The index to build. A file's own lists are searched, or all of its vectors, unless something else is asked for."""
    if given is None or asked != AUTO:
        return backend_of(asked)
    return "exact" if given.lists is None else FAISS_IVF


def check_width(place: str | pathlib.Path, given: int, width: int) -> None:
    """Raises ValueError if vectors have another width than the encoder's. `place`: where they are from."""
    if given != width:
        raise ValueError(
            f"{place}: its vectors have width {given}, but the encoder gives {width}: set encoder to the one that made them"
        )


def check_vectors(
    place: str | pathlib.Path,
    given: VectorSource,
    passages: StoredPassages,
    embed: Callable[[Sequence[Passage]], Float32[np.ndarray, "N D"]],
) -> None:
    """Checks that vectors are those of the passages: a few passages are embedded, and must be nearest to their own.

    Args:
      place: where the vectors are from, for errors.

    Raises:
      ValueError: there are more or fewer, or most belong to other passages, as of another corpus or another encoder.
    """
    if given.shape[0] != len(passages):
        raise ValueError(
            f"{place}: holds {given.shape[0]} vectors, but the corpus has {len(passages)} passages: give the corpus that it "
            "was made from"
        )
    rows = np.unique(np.linspace(0, len(passages) - 1, _SAMPLE).astype(np.int64))
    nearest = (embed(passages.take(rows)) @ given.take(rows).T).argmax(1)
    own = int((nearest == np.arange(len(rows))).sum())
    if own < _LEAST_OWN * len(rows):
        raise ValueError(
            f"{place}: its vectors are not those of the corpus by this encoder: only {own} of {len(rows)} passages are "
            "nearest to their own. Give the corpus, the encoder and the passage_prefix that it was made with"
        )
