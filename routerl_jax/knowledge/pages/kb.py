"""Page images found by late interaction (VRAG-RL's retriever), and pages found by their text (its OCR baseline)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import ml_dtypes
import numpy as np
from jax.sharding import Mesh

from routerl_jax.core.types import Passage
from routerl_jax.knowledge.base import KB_KINDS, KnowledgeBase, TimedResults
from routerl_jax.knowledge.dense import QueryCache, query_encoder, stored_embedding
from routerl_jax.knowledge.encoders import TextEncoder
from routerl_jax.knowledge.index import INDEXES, opening_backend
from routerl_jax.knowledge.pages.index import FirstStage, PageIndex, Ragged
from routerl_jax.knowledge.picture_files import PictureFiles
from routerl_jax.knowledge.store import TEXTS, Store
from routerl_jax.models.families.colqwen import LateInteraction

VECTORS, POOLED = "vectors", "pooled"
_QUERY_BATCH = 16  # fixed number of rows of encoder calls, so that a vector does not depend on the other queries
_COST = 2.0  # in units of a dense search: a query has some twenty vectors, and candidates are read from disk
_REMEMBERED = 4096  # queries whose vectors are cached (10 KB each at 20 vectors)


class PageKB(KnowledgeBase):
    """Pages by MaxSim; `Passage.image` is the path of the page's picture.

    Args:
      store: an opened store of kind "pages".
      encoder: the encoder of queries.
      index: the index over the pages' vectors.
    """

    cost = _COST
    has_pictures = True

    def __init__(self, store: Store, encoder: LateInteraction, index: PageIndex) -> None:
        self.name = store.manifest.name
        self.store, self.encoder, self.index = store, encoder, index
        self.cache = QueryCache(_REMEMBERED)
        self._files = PictureFiles(store.directory, store.manifest.settings["picture_format"])
        assert store.manifest.embedding is not None
        self._prefix = store.manifest.embedding.query_prefix
        self._rounded = store.manifest.settings["precision"] == "bfloat16"

    @classmethod
    def open(cls, store: Store, *, mesh: Mesh | None, index: str | None, encoder: str | TextEncoder | None) -> PageKB:
        """Opens a built store. `index` is the backend of the first stage; "maxsim": no first stage, all pages are compared."""
        model = query_encoder(store, encoder, mesh)
        if not isinstance(model, LateInteraction):
            raise ValueError(
                f"{encoder or stored_embedding(store).encoder!r} is not a late-interaction model (ColQwen2, ColQwen2.5), "
                f"which {store.directory} is searched with"
            )
        return cls(store, model, open_index(store, index, mesh))

    def __len__(self) -> int:
        return len(self.store)

    def embed_queries(self, queries: Sequence[str]) -> list[np.ndarray]:
        """A matrix [n, D] per query, rounded like the stored vectors of pages (bfloat16, as in VRAG-RL's engine)."""

        def embed(missing: list[str]) -> list[np.ndarray]:
            vectors = self.encoder.embed(missing, prefix=self._prefix, batch_size=_QUERY_BATCH)
            if self._rounded:
                vectors = [vector.astype(ml_dtypes.bfloat16).astype(np.float32) for vector in vectors]
            return vectors

        vectors = self.cache.fetch({query: query for query in queries}, embed)
        return [vectors[query] for query in queries]

    def pictures(self, ids: Sequence[str]) -> list[str]:
        return self._pages.pictures(ids)

    @functools.cached_property
    def _pages(self) -> _Pages:
        return _Pages(self.store)

    def _search(self, queries: list[str], k: int) -> list[list[Passage]]:
        rows, scores = zip(*self.index.search(self.embed_queries(queries), k))
        return [
            [dataclasses.replace(page, image=str(self._files.path(row))) for page, row in zip(pages, ids.tolist())]
            for pages, ids in zip(self.store.scored(rows, scores), rows)
        ]


class OcrKB(KnowledgeBase):
    """Pages by their text: a text knowledge base whose passages get the pictures of the pages.

    Args:
      store: an opened store of kind "ocr": the pages.
      texts: the knowledge base of their texts, with the same ids.
    """

    has_pictures = True

    def __init__(self, store: Store, texts: KnowledgeBase) -> None:
        self.name = store.manifest.name
        self.store, self.texts = store, texts
        self.cost = texts.cost
        self._pages = _Pages(store)

    @classmethod
    def open(cls, store: Store, *, mesh: Mesh | None, index: str | None, encoder: str | TextEncoder | None) -> OcrKB:
        """Opens a built store, and the knowledge base of texts inside it with `index` and `encoder`."""
        inner = Store(store.directory / TEXTS)
        return cls(store, KB_KINDS.get(inner.manifest.kind)(inner, mesh=mesh, index=index, encoder=encoder))

    def __len__(self) -> int:
        return len(self.store)

    def pictures(self, ids: Sequence[str]) -> list[str]:
        return self._pages.pictures(ids)

    def _search(self, queries: list[str], k: int) -> TimedResults:
        texts = self.texts.search(queries, k)
        images = [self._pages.pictures([passage.id for passage in passages]) for passages in texts]
        pages = [
            [dataclasses.replace(passage, image=image) for passage, image in zip(passages, page_images)]
            for passages, page_images in zip(texts, images)
        ]
        return TimedResults(pages, texts.seconds)


class _Pages:
    """The paths of pictures by the ids of pages. Reads all ids of the store."""

    def __init__(self, store: Store) -> None:
        self._name = store.manifest.name
        self._files = PictureFiles(store.directory, store.manifest.settings["picture_format"])
        self._rows = {passage.id: row for row, passage in enumerate(store.passages.read(0, len(store)))}

    def pictures(self, ids: Sequence[str]) -> list[str]:
        """The paths of pictures. Raises ValueError for an unknown id."""
        for id in ids:
            if id not in self._rows:
                raise ValueError(f"{id!r} is no page of knowledge base {self._name!r}")
        return [str(self._files.path(self._rows[id])) for id in ids]


def open_index(store: Store, backend: str | None = None, mesh: Mesh | None = None) -> PageIndex:
    """The index of a built store of pages."""
    settings, built = store.manifest.settings, dict(store.manifest.index)
    vectors = Ragged(store.directory / VECTORS, settings["precision"], hint=store.hint)
    if len(vectors) != len(store):
        raise ValueError(
            f"{store.directory / VECTORS} holds {len(vectors)} pages, but kb.json speaks of {len(store)}: they are of "
            f"different builds. {store.hint}"
        )
    name = built.pop("backend")
    chosen = opening_backend(backend, name)
    if chosen == "maxsim":
        return PageIndex(vectors, mesh=mesh)
    if name == "maxsim":
        raise ValueError(
            f"{store.directory} was built without pooled vectors (index='maxsim'), which index={chosen!r} searches. "
            f"Leave out the index, or rebuild with index={chosen!r}. {store.hint}"
        )
    pooled = Ragged(store.directory / POOLED, "float32", hint=store.hint)
    index = INDEXES.get(chosen)
    try:
        loaded = (
            index.load(store.index_directory, pooled.values, built, mesh=mesh)
            if chosen == name
            else index.build(pooled.values, {}, mesh=mesh)
        )
    except ValueError as error:
        raise ValueError(f"{error}. {store.hint}") from error
    first = FirstStage(loaded, pooled.owner(), settings["depth"], settings["candidates"])
    return PageIndex(vectors, first, mesh=mesh)
