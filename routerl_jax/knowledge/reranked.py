"""A knowledge base whose best passages are reranked by a cross-encoder."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from jaxtyping import Float32

from routerl_jax.core.text import one_line
from routerl_jax.knowledge.base import KnowledgeBase
from routerl_jax.knowledge.counts import Counts
from routerl_jax.knowledge.encoders import local_mesh, resolved_encoder
from routerl_jax.knowledge.query import query_text
from routerl_jax.knowledge.timing import TimedResults, timed_search
from routerl_jax.models.families.bert import CrossEncoder
from routerl_jax.models.huggingface import load_pretrained

DEPTH = 20

_loaded: dict[str, CrossEncoder] = {}
_lock = threading.Lock()


def shared_reranker(name: str) -> CrossEncoder:
    """The cross-encoder of that name (directory or hub id) on this process's devices. It is loaded once.

    Raises:
      ValueError: there is no usable model of that name, or it is no cross-encoder with a tokenizer.
    """
    key = resolved_encoder(name)
    with _lock:
        if key not in _loaded:
            model = load_pretrained(name, mesh=local_mesh(None))
            if not isinstance(model, CrossEncoder) or model.tokenizer is None:
                raise ValueError(
                    f"reranker {name!r} is no cross-encoder with a tokenizer (such as BAAI/bge-reranker-base); its config.json "
                    "must name a class ..ForSequenceClassification of BERT, RoBERTa or XLM-R"
                )
            _loaded[key] = model
        return _loaded[key]


class Reranker(Protocol):
    """Scores pairs of a query and a passage. A pair's score must not depend on the other pairs of the call."""

    def score(self, pairs: Sequence[tuple[str, str]], /, *, batch_size: int = 32) -> Float32[np.ndarray, " N"]:
        """One number per pair, in order; higher is better."""
        ...


class RerankedKB(KnowledgeBase):
    """Searches for more passages than requested, and returns those that the reranker scores best, with its scores.

    All pairs of a call are scored together; a passage is scored with its title. Passages of equal score keep the order of the
    search. A query that is only a picture has no text to score: its passages stay as they were found.

    Args:
      kb: the knowledge base that is searched.
      depth: passages found per query, or as many as are requested if that is more.
      batch_size: pairs per batch of the reranker.

    Raises:
      ValueError: the depth is below 1.
    """

    def __init__(self, kb: KnowledgeBase, reranker: Reranker, *, depth: int = DEPTH, batch_size: int = 32) -> None:
        if depth < 1:
            raise ValueError(f"depth={depth} must be at least 1")
        self.kb, self.name, self.reads, self.cost = kb, kb.name, kb.reads, kb.cost
        self.has_pictures, self.depth = kb.has_pictures, depth
        self._reranker, self._batch_size = reranker, batch_size

    def __len__(self) -> int:
        return len(self.kb)

    def stage_counts(self) -> Counts:
        """The counts of the reranked knowledge base."""
        return self.kb.stage_counts()

    @property
    def listing(self) -> KnowledgeBase:
        """The same, with the `listing` of the knowledge base that it reranks."""
        if (listing := self.kb.listing) is self.kb:
            return self
        return RerankedKB(listing, self._reranker, depth=self.depth, batch_size=self._batch_size)

    def pictures(self, ids: Sequence[str]) -> list[str]:
        return self.kb.pictures(ids)

    def _search(self, queries: list[Any], k: int) -> TimedResults:
        results, seconds = timed_search(self.kb.search, queries, max(k, self.depth))
        started = time.perf_counter()
        texts = [query_text(query) for query in queries]
        pairs = [(text, one_line(passage)) for text, passages in zip(texts, results) if text for passage in passages]
        scores = iter(self._reranker.score(pairs, batch_size=self._batch_size).tolist() if pairs else ())
        scored = [
            [dataclasses.replace(passage, score=next(scores)) for passage in passages] if text else passages
            for text, passages in zip(texts, results)
        ]
        best = [
            sorted(passages, key=lambda passage: -passage.score)[:k] if text else passages[:k]
            for text, passages in zip(texts, scored)
        ]
        seconds_per_pair = (time.perf_counter() - started) / max(len(pairs), 1)
        rerank_seconds = [seconds_per_pair * len(passages) if text else 0.0 for text, passages in zip(texts, results)]
        walks = results.walks if isinstance(results, TimedResults) else ()
        return TimedResults(
            best, [search_time + rerank_time for search_time, rerank_time in zip(seconds, rerank_seconds)], walks
        )
