"""Opens knowledge bases from directories and URLs."""

from __future__ import annotations

import pathlib

from jax.sharding import Mesh

from routerl_jax.core.buckets import fetched
from routerl_jax.knowledge.base import KB_KINDS, KnowledgeBase
from routerl_jax.knowledge.encoders import TextEncoder
from routerl_jax.knowledge.store import TEXTS, Manifest, Store
from routerl_jax.models.images import is_url


def load_kb(
    path_or_url: str | pathlib.Path,
    *,
    mesh: Mesh | None = None,
    index: str | None = None,
    encoder: str | TextEncoder | None = None,
    token: str | None = None,
) -> KnowledgeBase:
    """Opens a knowledge base that `launch.build_kb` made, or one that `launch.serve_kb` serves.

    Args:
      path_or_url: its directory (here, or under gs:// or s3://, from where it is copied into the cache), or
        `http://host:port/NAME`, or several URLs of equal servers separated by commas. A URL that ends in `/retrieve` is a
        server with Search-R1's protocol (knowledge.client.kb).
      mesh: devices of the encoder and of an exact index; default: all devices of this process.
      index: search with this backend (`scann`, `exact`). Default: the one it was built with; if that is ScaNN and ScaNN is not
        installed, `exact`, with a warning.
      encoder: an encoder, or its name or path, instead of the one in kb.json (it must have the same weights).
      token: token for the server; default: ROUTERL_KB_TOKEN in the environment. `knowledge.client.kb.HttpKB` has further
        settings: timeouts, retries, hedging, cache, rate limit.

    Raises:
      ValueError: there is no knowledge base, or a damaged one (the message says how to rebuild it); the kind, index or encoder
        is unknown; the encoder's weights or tokenizer differ from those of the build; or there is no server at the URL.
    """
    if is_url(str(path_or_url)):
        if not (mesh is None and index is None and encoder is None):
            raise ValueError(f"{path_or_url}: mesh, index and encoder are those of the server; leave them out")
        from routerl_jax.knowledge.client.kb import HttpKB, RetrieveKB
        from routerl_jax.knowledge.client.transport import Unavailable

        urls = [url.strip() for url in str(path_or_url).split(",")]
        try:
            if all(url.rstrip("/").endswith("/retrieve") for url in urls):
                return RetrieveKB(urls, token=token)
            return HttpKB(urls, token=token)
        except Unavailable as error:
            raise ValueError(f"{error}. Start a server there (launch.serve_kb), or give a directory") from error
    if token is not None:
        raise ValueError(f"{path_or_url}: a token is for URLs")
    store = Store(fetched(path_or_url))
    try:
        opener = KB_KINDS.get(store.manifest.kind)
    except ValueError as error:
        raise ValueError(f"{store.directory / 'kb.json'}: {error}") from error
    return opener(store, mesh=mesh, index=index, encoder=encoder)


def has_index(source: str) -> bool:
    """Whether the knowledge base in a directory (or a member of it) has vectors in an index, so that `load_kb` takes `index`.

    Raises ValueError if there is no knowledge base.
    """
    if is_url(source):
        return False
    directory = fetched(source)
    manifest = Manifest.read(directory)
    if manifest.kind == "ocr":
        return has_index(str(directory / TEXTS))
    return manifest.kind == "hybrid" or (manifest.embedding is not None and manifest.kind != "graph")
