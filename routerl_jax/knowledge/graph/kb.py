"""Graph retrieval (HippoRAG 2): a query's facts and passages give weights to nodes, and a walk from these ranks passages."""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Iterable, Sequence

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float32

from routerl_jax.core.config import BelowOne, Size, checked, from_config_dict
from routerl_jax.core.types import Walk
from routerl_jax.knowledge.base import KB_KINDS, KnowledgeBase
from routerl_jax.knowledge.dense import QueryVectors, query_encoder
from routerl_jax.knowledge.encoders import TextEncoder
from routerl_jax.knowledge.graph.graph import Graph
from routerl_jax.knowledge.graph.linking import (
    PhraseWeights,
    RecognitionFilter,
    largest_of,
    min_max,
    nearest,
    phrase_weights,
    products,
)
from routerl_jax.knowledge.graph.pagerank import DevicePageRank, HostPageRank, PageRank
from routerl_jax.knowledge.graph.triples import Triple
from routerl_jax.knowledge.store import EMBEDDINGS, Store, StoredArray, StoredPassages
from routerl_jax.knowledge.timing import TimedResults
from routerl_jax.services.config import ChatModelConfig
from routerl_jax.services.load import chat_model

FACTS, ENTITIES = "facts", "entities"
BACKENDS = ("host", "device")

_QUERIES = 64  # queries that walk at once
_MEMORY = 2**30  # bytes up to which facts, or their vectors, are held in memory
_SHOWN = 8  # phrases of a walk that are recorded
_Steps = tuple[
    list[int], list[int]
]  # rows of the facts from which a query walked, and of the phrases that it passed most
_ROWS = 65_536  # passages that are compared at a time


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class WalkSettings:
    """How a query finds passages. The defaults are those of HippoRAG 2, and of RouteRAG."""

    link_facts: Size = 5  # facts nearest to the query
    link_phrases: Size = 5  # number of phrases of these facts that are used, those with the largest weights
    # "released": as RouteRAG's code, where a phrase's last fact overwrites others
    phrase_weights: PhraseWeights = "average"
    passage_weight: float = 0.05  # weight of the passages' dense scores (0..1) beside the scores of facts
    damping: BelowOne = 0.5  # probability of walking on
    tolerance: float = 1e-6  # tolerance of the ranks; below 2e-7 they are computed in float64
    backend: str = "auto"  # "host", "device", or "auto": the device unless it is a CPU
    filter: ChatModelConfig = dataclasses.field(default_factory=ChatModelConfig)  # with a `model`: recognition filter

    def __post_init__(self) -> None:
        if self.passage_weight <= 0:
            raise ValueError(
                f"passage_weight={self.passage_weight} must be above 0, or a query without weights goes nowhere"
            )
        if not 1e-14 <= self.tolerance < 1:
            raise ValueError(f"tolerance={self.tolerance} must lie in [1e-14, 1)")
        if self.backend not in ("auto", *BACKENDS):
            raise ValueError(f"backend={self.backend!r} is not one of auto, {', '.join(BACKENDS)}")


class GraphKB(KnowledgeBase):
    """Ranks passages by personalised PageRank. All queries of a call walk together.

    A passage's score is its rank in the walk; the ranks of all nodes sum to 1. For a query without linked facts, it is the
    dense score scaled to 0..1.

    Args:
      store: an opened store that `knowledge.graph.build` wrote.
      encoder: the encoder of its queries.
      settings: default: those of the build.
      fact_filter: decides which of the linked facts count; default: by the model in the settings, or all facts.
      cache_size: number of cached query vectors.
    """

    cost = 2.0

    def __init__(
        self,
        store: Store,
        encoder: TextEncoder,
        *,
        settings: WalkSettings | None = None,
        fact_filter: RecognitionFilter | None = None,
        cache_size: int | None = None,
    ) -> None:
        self._vectors = QueryVectors(store, encoder, cache_size)
        saved = store.manifest.index
        self.fact_prefix = str(saved.get("fact_prefix", self._vectors.prefix))
        built = from_config_dict(WalkSettings, saved.get("walk", {}), path=f"{store.directory / 'kb.json'}: index.walk")
        self.name, self.store, self.encoder = store.manifest.name, store, encoder
        self.settings = settings or built
        self.fact_filter = fact_filter or _filter(self.settings)
        try:
            self.graph = Graph.load(store.index_directory)
        except ValueError as error:
            raise ValueError(f"{error}. {store.hint}") from error
        self.facts: StoredPassages | None = None
        facts = 0
        if len(self.graph.fact_ends):
            directory = store.directory / FACTS
            self.facts = StoredPassages(directory, _MEMORY, store.hint)
            self.phrases = StoredPassages(store.directory / ENTITIES, _MEMORY, store.hint)
            self.fact_vectors = StoredArray(directory / EMBEDDINGS, _MEMORY, store.hint)
            facts = len(self.facts)
        if facts != len(self.graph.fact_ends) or self.graph.passages != len(store):
            raise ValueError(
                f"{store.directory}: the graph has {len(self.graph.fact_ends)} facts and {self.graph.passages} passages, but "
                f"{facts} facts and {len(store)} passages are stored: they are of different builds. {store.hint}"
            )
        self._walk = _page_rank(self.graph, self.settings)

    @classmethod
    def open(cls, store: Store, *, mesh: Mesh | None, index: str | None, encoder: str | TextEncoder | None) -> GraphKB:
        """Opens a built store. `index` may name the backend of the walk, "host" or "device"."""
        if index is not None and index not in BACKENDS:
            raise ValueError(f"index={index!r}: a graph is walked on the 'host' or on the 'device'")
        kb = cls(store, query_encoder(store, encoder, mesh))
        return kb if index is None else kb.with_settings(backend=index)

    def with_settings(self, **changes: object) -> GraphKB:
        """The same knowledge base with other `WalkSettings`. Data in memory are shared."""
        changed = copy.copy(self)
        changed.settings = dataclasses.replace(self.settings, **changes)  # pyright: ignore[reportArgumentType]
        changed._walk = _page_rank(self.graph, changed.settings)
        if changed.settings.filter != self.settings.filter:
            changed.fact_filter = _filter(changed.settings)
        return changed

    def __len__(self) -> int:
        return len(self.store)

    def link(self, queries: Sequence[str]) -> list[list[tuple[int, float]]]:
        """The facts from which each query starts: (row in `facts`, score 0..1), best first, after the filter if there is
        one."""
        return self._linked(queries, self._vectors(queries, self.fact_prefix))

    def triples(self, rows: Iterable[int]) -> list[Triple]:
        """The facts of these rows, with normalised phrases, as in the nodes."""
        parts = [line.text.split("\t") for line in self.facts.take(list(rows))] if self.facts else []
        return [(subject, predicate, object_) for subject, predicate, object_ in parts]

    def _linked(self, queries: Sequence[str], vectors: Float32[np.ndarray, "Q D"]) -> list[list[tuple[int, float]]]:
        if self.facts is None:
            return [[] for _ in queries]
        scores = nearest(vectors, self.fact_vectors, self.settings.link_facts)
        linked = []
        for i, (ids, values) in enumerate(scores.best):
            normal = min_max(values, scores.smallest[i], scores.largest[i])
            linked.append(list(zip(ids.tolist(), normal.tolist())))
        if self.fact_filter is None:
            return linked
        chosen = self.fact_filter(queries, [self.triples(row for row, _ in facts) for facts in linked])
        return [[facts[index] for index in indices] for facts, indices in zip(linked, chosen)]

    def _search(self, queries: list[str], k: int) -> TimedResults:
        started = time.perf_counter()
        ranked: list[tuple[np.ndarray, np.ndarray]] = []
        walks: list[_Steps] = []
        for start in range(0, len(queries), _QUERIES):
            best, steps = self._ranked(queries[start : start + _QUERIES], k)
            ranked += best
            walks += steps
        rows = np.unique(np.concatenate([ids for ids, _ in ranked]))
        passages = dict(zip(rows.tolist(), self.store.passages.take(rows)))
        results = [
            [dataclasses.replace(passages[row], score=score) for row, score in zip(ids.tolist(), scores.tolist())]
            for ids, scores in ranked
        ]
        walks_in_words = [self._in_words(*steps) for steps in walks]
        return TimedResults(results, [(time.perf_counter() - started) / len(queries)] * len(queries), walks_in_words)

    def _in_words(self, facts: list[int], phrases: list[int]) -> Walk:
        """A walk in words."""
        if self.facts is None or not facts:
            return Walk()
        nodes = tuple(phrase.text for phrase in self.phrases.take(phrases))
        return Walk(facts=tuple(" | ".join(triple) for triple in self.triples(facts)), nodes=nodes)

    def _ranked(self, queries: list[str], k: int) -> tuple[list[tuple[np.ndarray, np.ndarray]], list[_Steps]]:
        """Rows and scores of the k best passages of each query, and how it walked to them."""
        vectors = self._vectors(queries)
        same = self.fact_prefix == self._vectors.prefix  # then a query is embedded once
        linked = self._linked(queries, vectors if same else self._vectors(queries, self.fact_prefix))
        dense = self._dense(vectors)
        walking = [i for i, facts in enumerate(linked) if facts]
        scores = dense.copy()
        passed: list[list[int]] = [[] for _ in queries]
        if walking:
            entities = self.graph.entities
            reset = np.zeros((self.graph.nodes, len(walking)), np.float32)
            reset[entities:] = self.settings.passage_weight * dense[walking].T
            for column, i in enumerate(walking):
                rows, values = zip(*linked[i])
                weights = phrase_weights(
                    self.graph.fact_ends[list(rows)],
                    values,
                    self.graph.passages_of,
                    keep=self.settings.link_phrases,
                    rule=self.settings.phrase_weights,
                )
                reset[list(weights), column] = list(weights.values())
            scores = scores.astype(np.float64)
            ranks = self._walk(reset)
            scores[walking] = ranks[entities:].T
            for column, i in enumerate(walking):
                passed[i] = largest_of(ranks[:entities, column], min(_SHOWN, entities)).tolist()
        best = [largest_of(row, min(k, len(row))) for row in scores]
        steps = [([row for row, _ in facts], phrases) for facts, phrases in zip(linked, passed)]
        return [(rows, row[rows]) for rows, row in zip(best, scores)], steps

    def _dense(self, vectors: Float32[np.ndarray, "Q D"]) -> Float32[np.ndarray, "Q P"]:
        """Inner products with all passages, scaled to 0..1."""
        count = len(self.store)
        scores = np.empty((len(vectors), count), np.float32)
        for start in range(0, count, _ROWS):
            stop = min(start + _ROWS, count)
            scores[:, start:stop] = products(vectors, self.store.embeddings.read(start, stop))
        return min_max(scores, scores.min(1, keepdims=True), scores.max(1, keepdims=True)).astype(np.float32)


def _filter(settings: WalkSettings) -> RecognitionFilter | None:
    return RecognitionFilter(chat_model(settings.filter)) if settings.filter.model else None


def _page_rank(graph: Graph, settings: WalkSettings) -> PageRank:
    backend = settings.backend
    if backend == "auto":
        backend = "host" if jax.default_backend() == "cpu" else "device"
    make = HostPageRank if backend == "host" else DevicePageRank
    return make(graph.adjacency, damping=settings.damping, tolerance=settings.tolerance)


KB_KINDS.register("graph")(GraphKB.open)
