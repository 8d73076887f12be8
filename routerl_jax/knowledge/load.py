"""`load_kb`: from a directory to a knowledge base that can be searched."""

from __future__ import annotations

import pathlib

from jax.sharding import Mesh

from routerl_jax.knowledge import dense  # noqa: F401 - registers its kinds
from routerl_jax.knowledge.base import KB_KINDS, KnowledgeBase
from routerl_jax.knowledge.encoders import TextEncoder
from routerl_jax.knowledge.store import Store


def load_kb(
    path_or_url: str | pathlib.Path,
    *,
    mesh: Mesh | None = None,
    index: str | None = None,
    encoder: str | TextEncoder | None = None,
) -> KnowledgeBase:
    """Opens a knowledge base that `launch.build_kb` made.

    Args:
      path_or_url: its directory.
      mesh: devices of the encoder and of an exact index; default: all of this process's.
      index: search with this backend (`scann`, `exact`) instead of the one it was built with.
      encoder: an encoder, or where to find it, in place of the one that kb.json names (the same weights, elsewhere).

    Raises:
      ValueError: no knowledge base there (or a damaged one; the message says how to rebuild it), an unknown kind, index
        or encoder, an encoder with other weights or another tokenizer than it was built with, or a URL.
    """
    if str(path_or_url).startswith(("http://", "https://")):
        raise ValueError(
            f"{path_or_url}: HTTP knowledge bases are not available in this version; give the directory of one"
        )
    store = Store(path_or_url)
    try:
        opener = KB_KINDS.get(store.manifest.kind)
    except ValueError as error:
        raise ValueError(f"{store.directory / 'kb.json'}: {error}") from error
    return opener(store, mesh=mesh, index=index, encoder=encoder)
