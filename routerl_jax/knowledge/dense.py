"""Dense retrieval: an encoder turns the query into a vector, an index finds the passages whose vectors are nearest."""

from __future__ import annotations

import collections
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float, Float32, Int

from routerl_jax.core.types import Passage
from routerl_jax.knowledge.base import KnowledgeBase
from routerl_jax.knowledge.encoders import TextEncoder, encoder_digest, shared_encoder
from routerl_jax.knowledge.exact_index import ExactIndex
from routerl_jax.knowledge.index import INDEXES, VectorIndex, VectorSource, opening_backend
from routerl_jax.knowledge.store import Embedding, Store

_SPARE = 16  # further results of the first search, in case some are deleted
_GROWTH = 4
T = TypeVar("T")


class UpdatedIndex:
    """Searches both parts and joins the results. Deleted rows are never returned, however many of them rank before the others.

    Args:
      main: index over the rows 0 .. N-1.
      added: vectors of the rows from N on, which are compared one by one; None if there are none.
      deleted: deleted rows of the main part, sorted.
    """

    def __init__(
        self, main: VectorIndex, added: VectorSource | None, deleted: Int[np.ndarray, " G"], *, mesh: Mesh | None = None
    ) -> None:
        self.main = main
        self.added = None if added is None else ExactIndex.build(added, {}, mesh=mesh)
        self.deleted = np.asarray(deleted, np.int64)

    def __len__(self) -> int:
        return len(self.main) - len(self.deleted) + (len(self.added) if self.added else 0)

    def search(
        self, queries: Float[np.ndarray, "Q D"], k: int
    ) -> tuple[Int[np.ndarray, "Q K"], Float32[np.ndarray, "Q K"]]:
        """Like `VectorIndex.search`; K = min(k, number of vectors without deleted ones)."""
        ids, scores = self._search_main(np.asarray(queries, np.float32), k)
        if self.added is not None:
            more_ids, more_scores = self.added.search(queries, k)
            ids = np.concatenate([ids, np.where(more_ids >= 0, more_ids + len(self.main), -1)], 1)
            scores = np.concatenate([scores, more_scores], 1)
        order = np.lexsort((ids, -scores), axis=-1)[:, : min(k, len(self))]
        return np.take_along_axis(ids, order, 1), np.take_along_axis(scores, order, 1)

    def _search_main(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The k best rows that are not deleted; -1 and -inf if there are fewer."""
        n = len(self.main)
        count = min(k, n - len(self.deleted))
        all_ids = np.full((len(queries), max(count, 0)), -1, np.int64)
        all_scores = np.full(all_ids.shape, -np.inf, np.float32)
        rows, depth = np.arange(len(queries)), min(k + min(_SPARE, len(self.deleted)), n)
        while count > 0 and len(rows):
            ids, scores = self.main.search(queries[rows], depth)
            alive = (ids >= 0) & ~np.isin(ids, self.deleted)
            order = np.argsort(~alive, axis=1, kind="stable")[:, :count]
            alive, ids, scores = (np.take_along_axis(part, order, 1) for part in (alive, ids, scores))
            all_ids[rows, : ids.shape[1]] = np.where(alive, ids, -1)
            all_scores[rows, : ids.shape[1]] = np.where(alive, scores, -np.inf)
            if depth == n:
                break
            rows, depth = rows[alive.sum(1) < count], min(depth * _GROWTH, n)
        return all_ids, all_scores


_CACHED = 16_384  # vectors in the cache of an encoder
_WINDOW = 0.002  # seconds for which knowledge bases of one encoder collect texts before they are embedded together


class QueryCache:
    """The vectors of the most recent queries. Safe to use from several threads.

    Attributes:
      users: number of knowledge bases that share the cache.
    """

    def __init__(self, size: int) -> None:
        self.users = 0
        self._size = size
        self._vectors: collections.OrderedDict[str, np.ndarray] = collections.OrderedDict()
        self._pending: dict[str, dict[str, Any]] = {}  # group -> queries that will be embedded next, by their keys
        self._lock, self._computing = threading.Lock(), threading.Lock()

    def cached(self, keys: Iterable[str]) -> dict[str, np.ndarray]:
        """The cached vectors of these keys."""
        with self._lock:
            vectors = {key: self._vectors[key] for key in keys if key in self._vectors}
            for key in vectors:
                self._vectors.move_to_end(key)
        return vectors

    def fetch(
        self, queries: Mapping[str, T], embed: Callable[[list[T]], Sequence[np.ndarray] | np.ndarray], group: str = ""
    ) -> dict[str, np.ndarray]:
        """The vectors of queries by their keys. `embed` computes those that are not cached.

        A rollout asks several knowledge bases at once. If they share the cache, one of them embeds the missing queries of all
        that are of one group.
        """
        vectors = self.cached(queries)
        missing = {key: query for key, query in queries.items() if key not in vectors}
        if not missing:
            return vectors
        with self._lock:
            self._pending.setdefault(group, {}).update(missing)
        if self.users > 1:
            time.sleep(_WINDOW)
        with self._computing:
            vectors |= self.cached(missing)  # another thread may have computed them
            missing = {key: query for key, query in missing.items() if key not in vectors}
            if not missing:
                return vectors
            with self._lock:
                waiting = self._pending.pop(group, {})
                pending = {key: query for key, query in waiting.items() if key not in self._vectors} | missing
            try:
                fresh = self._embedded(pending, embed)
            except Exception:
                if len(pending) == len(missing):
                    raise
                fresh = self._embedded(missing, embed)  # the failure may be due to another's query
        return vectors | fresh

    def _embedded(
        self, queries: Mapping[str, T], embed: Callable[[list[T]], Sequence[np.ndarray] | np.ndarray]
    ) -> dict[str, np.ndarray]:
        """Embeds and caches queries, and drops the oldest vectors if there are too many."""
        # copies, because a view would keep the batch alive
        fresh = {key: np.array(vector, np.float32) for key, vector in zip(queries, embed(list(queries.values())))}
        with self._lock:
            self._vectors.update(fresh)
            while len(self._vectors) > self._size:
                self._vectors.popitem(last=False)
        return fresh


_caches: dict[int, tuple[weakref.ref[Any], QueryCache]] = {}
_caches_lock = threading.Lock()


def shared_cache(encoder: TextEncoder) -> QueryCache:
    """The cache that all knowledge bases with this query encoder share.

    The samples of a question often send the same query to different knowledge bases, and embedding takes far longer than
    searching.
    """
    with _caches_lock:
        entry = _caches.get(id(encoder))
        if entry is None or entry[0]() is not encoder:  # the id may have belonged to a deleted encoder
            for stale in [key for key, (reference, _) in _caches.items() if reference() is None]:
                del _caches[stale]
            _caches[id(encoder)] = entry = weakref.ref(encoder), QueryCache(_CACHED)
        return entry[1]


class QueryVectors:
    """Embeds queries for a store, and caches the vectors of the most recent ones.

    Args:
      cache_size: size of a cache of its own; default: the cache of 16,384 vectors that all users of the encoder share.

    Raises:
      ValueError: the store has no embeddings.
    """

    def __init__(self, store: Store, encoder: TextEncoder, cache_size: int | None = None) -> None:
        self.prefix, self._dim = stored_embedding(store).query_prefix, stored_embedding(store).dim
        self.cache = shared_cache(encoder) if cache_size is None else QueryCache(cache_size)
        self.cache.users += 1
        self._encoder, self._directory = encoder, store.directory

    def __call__(self, queries: Sequence[str], prefix: str | None = None) -> Float32[np.ndarray, "Q D"]:
        """One vector per query, with the store's prefix or another one."""
        group = self.prefix if prefix is None else prefix

        def embed(texts: list[str]) -> Float32[np.ndarray, "M D"]:
            return self._encoder.embed(texts, prefix=group, batch_size=query_rows())

        keys = [f"{group}\0{query}" if group else query for query in queries]
        vectors = self.cache.fetch(dict(zip(keys, queries)), embed, group)
        result = np.stack([vectors[key] for key in keys])
        if result.shape[1] != self._dim:
            raise ValueError(
                f"the encoder gives vectors of width {result.shape[1]}, but {self._directory} was built "
                f"with {self._dim}: load it with the encoder that its kb.json names"
            )
        return result


def query_rows() -> int:
    """The fixed number of rows of encoder calls for queries, so that a query's vector does not depend on the others.

    A search of a rollout has about four new queries. On a CPU, 8 rows would embed many queries 20 % faster, but four of them in
    twice the time. An accelerator takes hardly longer for 64 than for four.
    """
    return 4 if jax.default_backend() == "cpu" else 64


def stored_embedding(store: Store) -> Embedding:
    """How a store's passages became vectors. Raises ValueError for a kind without vectors."""
    if store.manifest.embedding is None:
        raise ValueError(f"{store.directory} ({store.manifest.kind}) has no embeddings to search in. {store.hint}")
    return store.manifest.embedding


def query_encoder(store: Store, encoder: str | TextEncoder | None, mesh: Mesh | None) -> TextEncoder:
    """The encoder of a store's queries: the (shared) one of its kb.json, or the given one if it is the same.

    Raises:
      ValueError: the store has no embeddings, or the encoder has other weights or another tokenizer.
    """
    embedding = stored_embedding(store)
    built_with, built = embedding.encoder, embedding.digest
    if embedding.query_encoder:
        built_with, built = embedding.query_encoder, embedding.query_digest
    chosen = encoder or built_with
    model = shared_encoder(chosen, mesh, instead="") if isinstance(chosen, str) else chosen
    digest = encoder_digest(model)
    if built and digest and built != digest:
        name = f"the encoder {chosen!r}" if isinstance(chosen, str) else "the given encoder"
        raise ValueError(
            f"{name} is not what {store.directory} was built with: its weights or tokenizer have another digest "
            f"than kb.json says of {built_with!r}. Give the old one "
            f"(load_kb(..., encoder=DIRECTORY)). {store.hint}"
        )
    return model


class DenseKB(KnowledgeBase):
    """Finds passages by the inner product of embeddings. Used for both kinds, text and tables.

    Args:
      store: an opened store with embeddings.
      encoder: the encoder of its queries.
      index: the index over the store's embeddings.
      cache_size: number of cached query vectors (1.5 KB each at 384 dimensions); default: see `QueryVectors`.
    """

    def __init__(
        self, store: Store, encoder: TextEncoder, index: VectorIndex | UpdatedIndex, *, cache_size: int | None = None
    ) -> None:
        self.name = store.manifest.name
        self.store = store
        self.encoder = encoder
        self.index = index
        self._vectors = QueryVectors(store, encoder, cache_size)

    @classmethod
    def open(cls, store: Store, *, mesh: Mesh | None, index: str | None, encoder: str | TextEncoder | None) -> DenseKB:
        """Opens a built store: loads its (shared) encoder and its index, or makes another index of its embeddings."""
        model, main = query_encoder(store, encoder, mesh), open_index(store, index, mesh)
        if store.manifest.delta is None:
            return cls(store, model, main)
        return cls(store, model, UpdatedIndex(main, store.added_embeddings, store.deleted, mesh=mesh))

    @property
    def cache(self) -> QueryCache:
        """The cache of query vectors."""
        return self._vectors.cache

    def __len__(self) -> int:
        return len(self.store)

    def embed_queries(self, queries: Sequence[str]) -> Float32[np.ndarray, "Q D"]:
        """The vectors of queries, with the query prefix of the knowledge base."""
        return self._vectors(queries)

    def _search(self, queries: list[str], k: int) -> list[list[Passage]]:
        ids, scores = self.index.search(self.embed_queries(queries), k)
        return self.store.scored(list(ids), list(scores))


def open_index(store: Store, name: str | None, mesh: Mesh | None) -> VectorIndex:
    """The index of a built store over its embeddings, or another backend (`name`) made of them."""
    settings = dict(store.manifest.index)
    built = settings.pop("backend", None)
    if name is None and built is None:
        raise ValueError(f"{store.directory}: kb.json names no index. {store.hint}")
    name = opening_backend(name, str(built))
    backend = INDEXES.get(name)
    if name != built:  # another than the one that was built: made here, of the embeddings
        return backend.build(store.embeddings, {}, mesh=mesh)
    try:
        return backend.load(store.index_directory, store.embeddings, settings, mesh=mesh)
    except ValueError as error:
        raise ValueError(f"{error}. {store.hint}") from error
