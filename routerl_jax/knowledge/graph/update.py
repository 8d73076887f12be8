"""Updates of a graph knowledge base: passages that stay are neither extracted nor embedded again.

Phrases, synonyms and edges depend on all passages, so they are made again. The slow parts, language model and encoder, only
work on new passages.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from jaxtyping import Float32

from routerl_jax.core.config import from_config_dict
from routerl_jax.core.types import Passage
from routerl_jax.knowledge.builds import Source
from routerl_jax.knowledge.encoders import TextEncoder, encoder_digest, shared_encoder
from routerl_jax.knowledge.graph.build import TRIPLES, EarlierBuild, write_graph
from routerl_jax.knowledge.graph.config import GraphConfig
from routerl_jax.knowledge.graph.kb import ENTITIES, FACTS
from routerl_jax.knowledge.graph.triples import PrecomputedTriples, passage_text
from routerl_jax.knowledge.measures import Clock
from routerl_jax.knowledge.store import EMBEDDINGS, JoinedPassages, Store, StoredArray, StoredPassages, nested
from routerl_jax.knowledge.vector_index import VectorSource
from routerl_jax.knowledge.writer import StoreWriter
from routerl_jax.services.base import ChatModel
from routerl_jax.services.load import chat_model

_BLOCK = 8192  # texts read at a time


def rebuild_graph(
    writer: StoreWriter,
    store: Store,
    passages: Callable[[], Iterable[Passage]],
    new: Sequence[Passage],
    *,
    encoder: TextEncoder | None = None,
    llm: ChatModel | None = None,
    progress: bool = False,
) -> None:
    """Builds the graph of other passages with the settings of a knowledge base, and replaces it.

    Args:
      writer: writer of the store's directory.
      passages: all passages of the new knowledge base, those of `new` included.
      new: passages whose triples the store does not know, even if it has a passage of the same id.
      llm: extracts the triples of `new`, if a model does this; default: the model of kb.json.

    Raises:
      ValueError: the encoder's weights differ from those that the store was built with, or kb.json has no model.
    """
    old = store.manifest
    assert old.embedding is not None
    config = from_config_dict(GraphConfig, nested(old.config), "config")
    config = dataclasses.replace(config, encoder=old.embedding.encoder)
    model = encoder or shared_encoder(old.embedding.encoder, instead="")
    digest = encoder_digest(model)
    if old.embedding.digest and digest and old.embedding.digest != digest:
        raise ValueError(f"the encoder {config.encoder!r} has other weights than the knowledge base was built with")
    if config.extractor == "llm" and llm is None:
        try:
            llm = chat_model(config.llm)
        except ValueError as error:
            raise ValueError(
                f"{store.directory}: its triples come from a language model, and kb.json describes none that can be asked "
                f"({error}). Give it: update(.., llm=MODEL)"
            ) from error
    earlier = EarlierBuild(
        triples=PrecomputedTriples(store.directory / TRIPLES),
        changed=frozenset(passage.id for passage in new),
        vectors=KnownVectors(store),
    )
    source = Source(old.corpus, old.corpus_sha256, passages)
    manifest = write_graph(config, writer, source, model, Clock(), llm=llm, earlier=earlier, progress=progress)
    writer.commit(
        dataclasses.replace(manifest, config=old.config, created=old.created, name=old.name, updates=old.updates + 1)
    )


class KnownVectors:
    """The vectors of a store's passages, phrases and facts, by their texts."""

    def __init__(self, store: Store) -> None:
        self._arrays: list[VectorSource] = []
        self._rows: dict[str, tuple[int, int]] = {}
        self._add(store.passages, store.embeddings, passage_text)
        for part in (ENTITIES, FACTS):
            directory = store.directory / part
            if directory.is_dir():
                lines = StoredPassages(directory, memory_limit=0, hint=store.hint)
                vectors = StoredArray(directory / EMBEDDINGS, memory_limit=0, hint=store.hint)
                self._add(lines, vectors, lambda line: line.text.replace("\t", " "))

    def _add(
        self, texts: StoredPassages | JoinedPassages, vectors: VectorSource, text: Callable[[Passage], str]
    ) -> None:
        for start in range(0, len(texts), _BLOCK):
            for row, passage in enumerate(texts.read(start, min(start + _BLOCK, len(texts))), start):
                self._rows[text(passage)] = len(self._arrays), row
        self._arrays.append(vectors)

    def of(
        self, texts: Sequence[str], embed: Callable[[list[str]], Float32[np.ndarray, "M D"]], part: str
    ) -> Float32[np.ndarray, "N D"]:
        """One vector per text: from the store, or from `embed` if the store lacks it. A text is taken from any part."""
        rows: dict[int, list[tuple[int, int]]] = collections.defaultdict(list)
        missing = [i for i, text in enumerate(texts) if text not in self._rows]
        for i, text in enumerate(texts):
            if text in self._rows:
                array, row = self._rows[text]
                rows[array].append((i, row))
        parts = [(missing, embed([texts[i] for i in missing]))] if missing else []
        for array, pairs in rows.items():
            parts.append(([i for i, _ in pairs], self._arrays[array].take(np.asarray([row for _, row in pairs]))))
        result = np.empty((len(texts), parts[0][1].shape[1]), np.float32)
        for indices, vectors in parts:
            result[indices] = vectors
        return result
