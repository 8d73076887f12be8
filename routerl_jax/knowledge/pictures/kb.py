"""Captions and pictures found by text, picture or both (R1-Router's UniIR), and pictures by a picture (MMSearch-R1)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, Self

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Bool, Float32, UInt8
from PIL import Image

from routerl_jax.core.types import Passage, Query, TextAndImage
from routerl_jax.knowledge.base import KnowledgeBase, query_image, query_key, query_text
from routerl_jax.knowledge.dense import QueryCache, open_index, query_encoder, stored_embedding
from routerl_jax.knowledge.encoders import TextEncoder
from routerl_jax.knowledge.index import VectorIndex
from routerl_jax.knowledge.picture_files import PictureFiles
from routerl_jax.knowledge.store import Store, StoredArray
from routerl_jax.models.embedding import PictureEmbedder
from routerl_jax.models.families.clip import uniir_text
from routerl_jax.models.images import decode_image, is_url

_SIDE = 16
BYTES = _SIDE * _SIDE // 8 + 3
_STEP = 2  # levels of 255; smaller ones are noise of compression
# of 256 that may differ: of 182 real pictures, halved JPEG copies differ in 14 at most, others in 33 at least
_MOST_BITS = 16
_MOST_COLOUR = 12  # largest difference of mean colours, of 255


def difference_hash(picture: Image.Image) -> UInt8[np.ndarray, " F"]:
    """A picture's fingerprint: the grid points at which it gets brighter to the right (a difference hash), and its mean
    colour."""
    grey = np.asarray(picture.convert("L").convert("F").resize((_SIDE + 1, _SIDE), Image.Resampling.BOX))
    bits = np.packbits(grey[:, 1:] - grey[:, :-1] > _STEP)
    colour = np.asarray(picture.convert("RGB").resize((1, 1), Image.Resampling.BOX), np.uint8).reshape(3)
    return np.concatenate([bits, colour])


def near_duplicates(
    fingerprint: UInt8[np.ndarray, " F"], fingerprints: UInt8[np.ndarray, "N F"]
) -> Bool[np.ndarray, " N"]:
    """Whether each of the other fingerprints belongs to the same picture."""
    differ = np.unpackbits(np.bitwise_xor(fingerprint[:-3], fingerprints[:, :-3]), axis=1).sum(1)
    colours = np.abs(fingerprint[-3:].astype(np.int16) - fingerprints[:, -3:].astype(np.int16)).max(1)
    return (differ <= _MOST_BITS) & (colours <= _MOST_COLOUR)


FINGERPRINTS = "fingerprints"
_QUERY_BATCH = 16  # fixed number of rows of encoder calls, so that a vector does not depend on the other queries
_REMEMBERED = 16_384  # cached query vectors (3 KB each at 768 dimensions)


class PictureKB(KnowledgeBase):
    """Base of both kinds: vectors of CLIP or another `PictureEmbedder`, an index over them, and pictures on disk.

    Args:
      store: an opened store with embeddings.
      encoder: the encoder of queries.
      index: the index over the store's embeddings.
    """

    def __init__(self, store: Store, encoder: PictureEmbedder, index: VectorIndex) -> None:
        self.name = store.manifest.name
        self.store, self.encoder, self.index = store, encoder, index
        self.cache = QueryCache(_REMEMBERED)
        self._files = PictureFiles(store.directory, store.manifest.settings["picture_format"])
        self._fingerprints = StoredArray(store.directory / FINGERPRINTS, 2**30, store.hint)

    @classmethod
    def open(cls, store: Store, *, mesh: Mesh | None, index: str | None, encoder: str | TextEncoder | None) -> Self:
        """Opens a built store with its encoder and index, or the given ones."""
        model = query_encoder(store, encoder, mesh)
        if not isinstance(model, PictureEmbedder):
            name = encoder or stored_embedding(store).encoder
            raise ValueError(f"{name!r} reads no pictures, which {store.directory} is searched with")
        return cls(store, model, open_index(store, index, mesh))

    def __len__(self) -> int:
        return len(self.store)

    def embed_queries(self, queries: Sequence[Query]) -> Float32[np.ndarray, "Q D"]:
        """The queries' vectors: the sum of text and picture, at unit length.

        Raises:
          ValueError: a picture can't be read, or only its URL is given; names the query.
        """
        if url := next((query.image for query in queries if not isinstance(query, str) and is_url(query.image)), None):
            raise ValueError(
                f"knowledge base {self.name!r} compares pictures and opens no URLs: give the picture itself, or use a web "
                f"knowledge base (mode='image'). Asked was {url}"
            )

        def embed(missing: list[Query]) -> Float32[np.ndarray, "M D"]:
            return self.encoder.embed([self._input(query) for query in missing], prefix="", batch_size=_QUERY_BATCH)

        keys = [query_key(query) for query in queries]
        vectors = self.cache.fetch(dict(zip(keys, queries)), embed)
        return np.stack([vectors[key] for key in keys])

    def _input(self, query: Query) -> TextAndImage:
        """A query in the form for the encoder."""
        if isinstance(query, str):
            return TextAndImage(text=query)
        return dataclasses.replace(query, image=decode_image(query.image, name="the query's picture"))

    def _passages(self, rows: Sequence[int] | np.ndarray) -> dict[int, Passage]:
        """Passages by row, with their pictures if they have any."""
        distinct = np.unique(np.asarray(rows, np.int64))
        have_pictures = (
            [bool(fingerprint.any()) for fingerprint in self._fingerprints.take(distinct)] if len(distinct) else []
        )
        return {
            row: dataclasses.replace(passage, image=str(self._files.path(row)) if has_picture else "")
            for row, passage, has_picture in zip(distinct.tolist(), self.store.passages.take(distinct), have_pictures)
        }


class TextImageKB(PictureKB):
    """Finds texts, pictures, or texts with pictures by a text, a picture, or both.

    The instruction before a query's text belongs to the trained model (UniIR has one per task).
    """

    reads: ClassVar[frozenset[str]] = frozenset({"text", "image"})

    def _input(self, query: Query) -> TextAndImage:
        has_picture = bool(query_image(query))
        instruction = str(self.store.manifest.settings["image_instruction" if has_picture else "instruction"])
        text = uniir_text(query_text(query), instruction)
        return dataclasses.replace(super()._input(query), text=text or None)

    def _search(self, queries: list[Query], k: int) -> list[list[Passage]]:
        ids, scores = self.index.search(self.embed_queries(queries), k)
        passages = self._passages(ids[ids >= 0])
        return [
            [dataclasses.replace(passages[i], score=score) for i, score in zip(ids_row, scores_row) if i >= 0]
            for ids_row, scores_row in zip(ids.tolist(), scores.tolist())
        ]


class ReverseImageKB(PictureKB):
    """Finds the nearest pictures to a picture, with the titles of their sources. `Passage.image` is a thumbnail.

    Copies of a picture (also re-encoded or resized ones) are one result, whose text lists the other titles.
    """

    reads: ClassVar[frozenset[str]] = frozenset({"image"})

    def _search(self, queries: list[Query], k: int) -> list[list[Passage]]:
        vectors = self.embed_queries(queries)
        results: list[list[Passage]] = [[] for _ in queries]
        open_queries, count = np.arange(len(queries)), min(4 * k, len(self))
        while len(open_queries):
            unclear = []
            for query, ids, scores in zip(open_queries, *self.index.search(vectors[open_queries], count)):
                groups = self._groups(ids[ids >= 0])
                if len(groups) < k and count < len(self):
                    unclear.append(query)
                else:
                    results[query] = self._merged(groups[:k], dict(zip(ids.tolist(), scores.tolist())))
            open_queries, count = np.asarray(unclear, np.int64), min(4 * count, len(self))
        return results

    def _groups(self, rows: np.ndarray) -> list[list[int]]:
        """Groups the rows of the same picture. A group has the position of its best row."""
        prints = self._fingerprints.take(rows)
        groups: list[list[int]] = []
        ungrouped = np.ones(len(rows), bool)
        for i, row in enumerate(rows):
            if ungrouped[i]:
                same = ungrouped & near_duplicates(prints[i], prints)
                same[i] = True
                ungrouped &= ~same
                groups.append([int(row), *(int(other) for other in rows[same] if other != row)])
        return groups

    def _merged(self, groups: list[list[int]], scores: dict[int, float]) -> list[Passage]:
        passages = self._passages([row for group in groups for row in group])
        results = []
        for first, *others in groups:
            passage = passages[first]
            titles = dict.fromkeys(passages[row].title for row in others)
            titles.pop(passage.title, None)
            lines = [passage.text] if passage.text.strip() else []
            lines += [f"The same picture: {title}" for title in titles if title]
            results.append(dataclasses.replace(passage, text="\n".join(lines), score=scores[first]))
        return results
