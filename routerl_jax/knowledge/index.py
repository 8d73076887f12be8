"""Search over vectors by inner product: the registry of backends (`VectorIndex`), and the choice of one."""

from __future__ import annotations

import functools

from absl import logging

from routerl_jax.core.packages import install_hint
from routerl_jax.knowledge.vector_index import FAISS_IVF, INDEXES

AUTO = "auto"  # ScaNN if it is installed, else exact search; few pages are all compared
_BY_AUTO = ("scann", "exact", "maxsim", FAISS_IVF)  # backends that `auto` may choose


def backend_of(requested: str) -> str:
    """The backend for a setting. If `auto` is not ScaNN, a warning says so once."""
    if requested != AUTO:
        return requested
    if has_scann():
        return "scann"
    _warn_once()
    return "exact"


def opening_backend(requested: str | None, built: str) -> str:
    """The backend for searching a knowledge base that was built with `built`.

    It is the requested one. Without one, or for `auto`, it is `built`. If that is ScaNN and ScaNN is not installed, it is exact
    search, which only needs the embeddings.
    """
    if requested and requested != AUTO:
        return requested
    return backend_of(AUTO) if built == "scann" else built


def fits(requested: str, built: str) -> bool:
    """Whether a knowledge base built with a backend fits a setting."""
    return requested == built or (requested == AUTO and built in _BY_AUTO)


def has_scann() -> bool:
    """Whether ScaNN can be imported here."""
    try:
        INDEXES.get("scann").require()
    except ValueError:
        return False
    return True


@functools.cache
def _warn_once() -> None:
    logging.warning(
        "ScaNN is not installed, so all vectors are compared, exactly (slower from some 100,000 on). It has wheels for "
        "Linux on x86-64: %s",
        install_hint("scann"),
    )
