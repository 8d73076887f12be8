"""Dense retrieval: an encoder turns the query into a vector, an index finds the passages whose vectors are nearest."""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Sequence

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float32

from routerl_jax.core.types import Passage
from routerl_jax.knowledge.base import KB_KINDS, KnowledgeBase
from routerl_jax.knowledge.encoders import TextEncoder, encoder_digest, shared_encoder
from routerl_jax.knowledge.index import INDEXES, VectorIndex
from routerl_jax.knowledge.store import Embedding, Store
from routerl_jax.knowledge.updated_index import Searcher, UpdatedIndex

_QUERY_BATCH = 16  # rows of every encoder call, full or not: a query's vector must not depend on how many come with it


class QueryCache:
    """The vectors of the most recent queries; safe to use from several threads."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._vectors: collections.OrderedDict[str, np.ndarray] = collections.OrderedDict()
        self._lock = threading.Lock()

    def known(self, queries: Sequence[str]) -> dict[str, np.ndarray]:
        """The vectors of those (distinct) queries that are here."""
        with self._lock:
            found = {query: self._vectors[query] for query in queries if query in self._vectors}
            for query in found:
                self._vectors.move_to_end(query)
        return found

    def add(self, vectors: dict[str, np.ndarray]) -> None:
        """Keeps vectors, and lets go of the oldest where there are too many."""
        with self._lock:
            self._vectors.update(vectors)
            while len(self._vectors) > self._size:
                self._vectors.popitem(last=False)


class QueryVectors:
    """Embeds queries as a store calls for, and remembers the vectors of the most recent ones.

    Raises:
      ValueError: the store has no embeddings.
    """

    def __init__(self, store: Store, encoder: TextEncoder, cache_size: int = 16_384) -> None:
        self.prefix, self._dim = stored_embedding(store).query_prefix, stored_embedding(store).dim
        self.cache = QueryCache(cache_size)
        self._encoder, self._directory = encoder, store.directory

    def __call__(self, queries: Sequence[str], prefix: str | None = None) -> Float32[np.ndarray, "Q D"]:
        """One vector per query; with the store's prefix, or another."""
        prefix = self.prefix if prefix is None else prefix
        keys = dict.fromkeys(prefix + query for query in queries)
        vectors = self.cache.known(list(keys))
        missing = [key for key in keys if key not in vectors]
        if missing:
            texts = [key.removeprefix(prefix) for key in missing]
            embedded = np.asarray(self._encoder.embed(texts, prefix=prefix, batch_size=_QUERY_BATCH), np.float32)
            if embedded.shape != (len(missing), self._dim):
                raise ValueError(
                    f"the encoder gives vectors of width {embedded.shape[-1]}, but {self._directory} was built "
                    f"with {self._dim}: load it with the encoder that its kb.json names"
                )
            fresh = {key: vector.copy() for key, vector in zip(missing, embedded)}  # a view would keep the batch alive
            self.cache.add(fresh)
            vectors |= fresh
        return np.stack([vectors[prefix + query] for query in queries])


def stored_embedding(store: Store) -> Embedding:
    """How a store's passages became vectors; ValueError for a kind that has none."""
    if store.manifest.embedding is None:
        raise ValueError(f"{store.directory} ({store.manifest.kind}) has no embeddings to search in. {store.hint}")
    return store.manifest.embedding


def query_encoder(store: Store, encoder: str | TextEncoder | None, mesh: Mesh | None) -> TextEncoder:
    """The encoder of a store's queries: the one that its kb.json names (shared), or the given one if it is the same.

    Raises:
      ValueError: the store has no embeddings, or the encoder has other weights or another tokenizer.
    """
    embedding = stored_embedding(store)
    built_with, built = embedding.encoder, embedding.digest
    if embedding.query_encoder:
        built_with, built = embedding.query_encoder, embedding.query_digest
    chosen = encoder or built_with
    model = shared_encoder(chosen, mesh) if isinstance(chosen, str) else chosen
    found = encoder_digest(model)
    if built and found and built != found:
        name = f"the encoder {chosen!r}" if isinstance(chosen, str) else "the given encoder"
        raise ValueError(
            f"{name} is not what {store.directory} was built with: its weights or tokenizer have another digest "
            f"than kb.json says of {built_with!r}. Give the old one "
            f"(load_kb(..., encoder=DIRECTORY)). {store.hint}"
        )
    return model


class DenseKB(KnowledgeBase):
    """Passages found by the inner product of embeddings. Both kinds, text and table, are searched in the same way.

    Args:
      store: an opened store with embeddings.
      encoder: what its queries are embedded with.
      index: over the store's embeddings.
      cache_size: number of query vectors to remember (1.5 KB each at 384 dimensions).
    """

    def __init__(self, store: Store, encoder: TextEncoder, index: Searcher, *, cache_size: int = 16_384) -> None:
        self.name = store.manifest.name
        self.store = store
        self.encoder = encoder
        self.index = index
        self._vectors = QueryVectors(store, encoder, cache_size)

    @classmethod
    def open(cls, store: Store, *, mesh: Mesh | None, index: str | None, encoder: str | TextEncoder | None) -> DenseKB:
        """Opens a built store: loads its encoder (shared) and its index, or makes another index of its embeddings."""
        model, main = query_encoder(store, encoder, mesh), open_index(store, index, mesh)
        if store.manifest.delta is None:
            return cls(store, model, main)
        return cls(store, model, UpdatedIndex(main, store.added_embeddings, store.deleted, mesh=mesh))

    @property
    def cache(self) -> QueryCache:
        """The queries' vectors that are remembered."""
        return self._vectors.cache

    def __len__(self) -> int:
        return len(self.store)

    def embed_queries(self, queries: Sequence[str]) -> Float32[np.ndarray, "Q D"]:
        """The queries' vectors, with the prefix that the knowledge base was built for."""
        return self._vectors(queries)

    def _search(self, queries: list[str], k: int) -> list[list[Passage]]:
        ids, scores = self.index.search(self.embed_queries(queries), k)
        rows = np.unique(ids[ids >= 0])
        passages = dict(zip(rows.tolist(), self.store.passages.take(rows)))
        return [
            [dataclasses.replace(passages[i], score=score) for i, score in zip(found, row) if i >= 0]
            for found, row in zip(ids.tolist(), scores.tolist())
        ]


def open_index(store: Store, name: str | None, mesh: Mesh | None) -> VectorIndex:
    """The index of a built store over its embeddings, or another backend (`name`) made of them."""
    settings = dict(store.manifest.index)
    built = settings.pop("backend", None)
    name = name or built
    if name is None:
        raise ValueError(f"{store.directory}: kb.json names no index. {store.hint}")
    backend = INDEXES.get(name)
    if name != built:  # another than the one that was built: made here, of the embeddings
        return backend.build(store.embeddings, {}, mesh=mesh)
    try:
        return backend.load(store.index_directory, store.embeddings, settings, mesh=mesh)
    except ValueError as error:
        raise ValueError(f"{error}. {store.hint}") from error


KB_KINDS.register("dense_text")(DenseKB.open)
KB_KINDS.register("dense_table")(DenseKB.open)
