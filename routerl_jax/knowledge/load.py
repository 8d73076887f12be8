"""Opens knowledge bases from directories and URLs."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence

from jax.sharding import Mesh

from routerl_jax.core.buckets import fetched, in_bucket, resolve_url, url_of
from routerl_jax.core.types import Passage
from routerl_jax.knowledge.base import KnowledgeBase
from routerl_jax.knowledge.corpus import passages_sha256
from routerl_jax.knowledge.encoders import TextEncoder, resolved_encoder
from routerl_jax.knowledge.hybrid import HybridKB, is_url
from routerl_jax.knowledge.index import fits
from routerl_jax.knowledge.kinds import KB_BUILDERS, KB_KINDS
from routerl_jax.knowledge.pages.kb import TEXTS
from routerl_jax.knowledge.store import Manifest, Store


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
        server with Search-R1's protocol (knowledge.client.retrieve).
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
        from routerl_jax.knowledge.client.kb import HttpKB
        from routerl_jax.knowledge.client.policy import Unavailable
        from routerl_jax.knowledge.client.retrieve import RetrieveKB

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


@KB_KINDS.register("hybrid")
def open_hybrid(store: Store, *, mesh: Mesh | None, index: str | None, encoder: str | TextEncoder | None) -> HybridKB:
    """Opens a hybrid directory with its members. `index` is passed to members with an index, `encoder` to those with
    vectors."""
    settings = dict(store.manifest.settings)
    members = []
    for member in settings.pop("members", ()):
        source = _member_source(store.directory, member)
        vectors = not is_url(source) and Manifest.read(fetched(source)).embedding is not None
        try:
            member_index = index if has_index(source) else None
            members.append(load_kb(source, mesh=mesh, index=member_index, encoder=encoder if vectors else None))
        except ValueError as error:
            raise ValueError(f"{store.directory}: member {member!r}: {error}") from error
    return HybridKB(members, name=store.manifest.name, **settings)


def _member_source(directory: pathlib.Path, member: str) -> str:
    if is_url(member) or in_bucket(member):
        return member
    path = url_of(directory)
    return resolve_url(path, member) if in_bucket(path) else str((directory / member).resolve())


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


def check_kb(
    directory: str | pathlib.Path, expected: Mapping[str, str], section: str, passages: Sequence[Passage] | None = None
) -> None:
    """Checks that an existing knowledge base fits a configuration. Otherwise keys of the configuration would have no effect.

    Args:
      expected: any of kind, encoder, index and source. A source fits if its path or its content is the same. A missing file
        is not compared.
      section: the section of the configuration, for the message.
      passages: the passages of `source`, if it is not a file.

    Raises:
      ValueError: a key differs (names it), or an error of `load_kb`.
    """
    path = fetched(directory)
    manifest = Manifest.read(path)
    searched = Manifest.read(path / TEXTS) if manifest.kind == "ocr" else manifest
    actual = {
        "kind": manifest.kind,
        "encoder": searched.embedding.encoder if searched.embedding else "",
        "index": str(searched.index.get("backend", "")),
        "source": manifest.corpus or "passages in memory",
    }
    for key, value in expected.items():
        if key == "source":
            same = _same_source(manifest, value, passages)
        elif key == "index":
            same = fits(value, actual[key])
        else:
            same = actual[key] == (resolved_encoder(value) if key == "encoder" else value)
        if not same:
            raise ValueError(
                f"{section}.{key}={value!r}, but the knowledge base in {directory} was built with another: {actual[key]!r}. "
                f"Change {section}.{key}, or give another {section}.directory"
            )


def _same_source(manifest: Manifest, source: str, passages: Sequence[Passage] | None) -> bool:
    if passages is not None:
        return passages_sha256(passages) == manifest.corpus_sha256
    if in_bucket(source) and source == manifest.corpus:
        return True
    path = fetched(source)
    if not path.exists() or url_of(path.resolve()) == manifest.corpus:
        return True
    return KB_BUILDERS.get(manifest.kind).digest(path) == manifest.corpus_sha256
