"""Search over vectors by inner product: one interface (`VectorIndex`), two backends, their registry, and which one is meant."""

from __future__ import annotations

import functools

from absl import logging

from routerl_jax.core.extras import install_hint
from routerl_jax.knowledge.exact_index import ExactIndex
from routerl_jax.knowledge.scann_index import ScannIndex, ScannSettings
from routerl_jax.knowledge.vector_index import INDEXES, VectorIndex, VectorSource

__all__ = [
    "AUTO",
    "INDEXES",
    "ExactIndex",
    "ScannIndex",
    "ScannSettings",
    "VectorIndex",
    "VectorSource",
    "backend_of",
    "fits",
    "has_scann",
    "opening_backend",
]

AUTO = "auto"  # ScaNN where it is installed, exact search elsewhere; few pages are all compared
_BY_AUTO = ("scann", "exact", "maxsim")  # what it may have come to


def backend_of(asked: str) -> str:
    """The backend that a setting asks for. Where `auto` is not ScaNN, a warning says so, once."""
    if asked != AUTO:
        return asked
    if has_scann():
        return "scann"
    _say_once()
    return "exact"


def opening_backend(asked: str | None, built: str) -> str:
    """The backend that searches what was built with another, or with the same.

    That is the one asked for; without one, or for `auto`, the one that it was built with, and where that is ScaNN and ScaNN is
    not installed, exact search, which needs the embeddings alone.
    """
    if asked and asked != AUTO:
        return asked
    return backend_of(AUTO) if built == "scann" else built


def fits(asked: str, built: str) -> bool:
    """Whether what was built with a backend is what a setting asks for."""
    return asked == built or (asked == AUTO and built in _BY_AUTO)


def has_scann() -> bool:
    """Whether ScaNN can be imported here."""
    try:
        ScannIndex.require()
    except ValueError:
        return False
    return True


@functools.cache
def _say_once() -> None:
    logging.warning(
        "ScaNN is not installed, so all vectors are compared, exactly (slower from some 100,000 on). It has wheels for "
        "Linux on x86-64: %s",
        install_hint("scann"),
    )
