"""Graph retrieval (HippoRAG 2): a query's facts and passages give weights to nodes, and a walk from these ranks passages."""

from __future__ import annotations

import copy
import dataclasses
import json
import time
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import jax
import numpy as np
from absl import logging
from jax.sharding import Mesh
from jaxtyping import Float32, Int

from routerl_jax.core.config import BelowOne, Size, checked, from_config_dict
from routerl_jax.core.types import Message, Walk
from routerl_jax.knowledge.base import KnowledgeBase, TimedResults
from routerl_jax.knowledge.dense import QueryVectors, query_encoder
from routerl_jax.knowledge.encoders import TextEncoder
from routerl_jax.knowledge.graph.graph import Graph
from routerl_jax.knowledge.graph.pagerank import DevicePageRank, HostPageRank
from routerl_jax.knowledge.graph.triples import Triple, json_value
from routerl_jax.knowledge.index import VectorSource
from routerl_jax.knowledge.store import EMBEDDINGS, Store, StoredArray, StoredPassages
from routerl_jax.services.base import ChatModel
from routerl_jax.services.config import ChatModelConfig
from routerl_jax.services.load import chat_model

PhraseWeights = Literal["average", "released"]

_ROWS = 65_536  # vectors that are compared at a time, which bounds memory
_GROUP = 128  # values per group; the maxima of groups are compared first
_KEYS = 2048  # vectors per block, so that a block stays in the CPU's cache for all queries


class Scores(NamedTuple):
    """The needed part of the inner products of queries with all vectors."""

    best: list[tuple[Int[np.ndarray, " K"], Float32[np.ndarray, " K"]]]  # per query: ids and products, best first
    smallest: Float32[np.ndarray, " Q"]
    largest: Float32[np.ndarray, " Q"]


def products(queries: Float32[np.ndarray, "Q D"], keys: Float32[np.ndarray, "R D"]) -> Float32[np.ndarray, "Q R"]:
    """Inner products that do not depend on the other queries of the call.

    There is one product of matrix and vector per query. In a product of two matrices, the order in which the terms of a row are
    added depends, on some CPUs (AVX-512), on the position of the row in its block. That would take 0.4 of the time for 64
    queries.
    """
    result = np.empty((len(queries), len(keys)), np.float32)
    for start in range(0, len(keys), _KEYS):
        block = keys[start : start + _KEYS]
        for query, row in zip(queries, result):
            np.dot(block, query, out=row[start : start + _KEYS])
    return result


def nearest(queries: Float32[np.ndarray, "Q D"], vectors: VectorSource, k: int) -> Scores:
    """The k vectors with the largest inner product with each query (ties: the lower id), and the range of all products."""
    count = vectors.shape[0]
    best = [(np.zeros(0, np.int64), np.zeros(0, np.float32)) for _ in queries]
    smallest = np.full(len(queries), np.inf, np.float32)
    largest = -smallest
    for start in range(0, count, _ROWS):
        block = products(queries, vectors.read(start, min(start + _ROWS, count)))
        smallest, largest = np.minimum(smallest, block.min(1)), np.maximum(largest, block.max(1))
        for i, row in enumerate(block):
            ids = largest_of(row, k)
            ids, values = np.concatenate([best[i][0], ids + start]), np.concatenate([best[i][1], row[ids]])
            order = np.lexsort((ids, -values))[:k]
            best[i] = ids[order], values[order]
    return Scores(best, smallest, largest)


def largest_of(values: Float32[np.ndarray, " R"], k: int) -> Int[np.ndarray, " K"]:
    """Indices of the k largest values, best first; ties: the lower index."""
    grouped = len(values) // _GROUP * _GROUP
    if grouped >= 2 * k * _GROUP:  # the k-th largest maximum of groups is a bound that few values reach
        tops = values[:grouped].reshape(-1, _GROUP).max(1)
        candidates = np.flatnonzero(values >= np.partition(tops, -k)[-k])
    else:
        candidates = np.arange(len(values))
    return candidates[np.lexsort((candidates, -values[candidates]))[:k]]


def min_max(values: np.ndarray, smallest: np.ndarray, largest: np.ndarray) -> np.ndarray:
    """Values scaled to 0..1 by their range; 1 if the range is empty, as in HippoRAG."""
    extent = largest - smallest
    return np.where(extent > 0, (values - smallest) / np.where(extent > 0, extent, 1), 1)


def phrase_weights(
    ends: Int[np.ndarray, "K 2"],
    scores: Sequence[float],
    passages_of: Int[np.ndarray, " E"],
    *,
    keep: int,
    rule: PhraseWeights = "average",
) -> dict[int, float]:
    """Reset weights of the phrases of linked facts (HippoRAG 2, section 3.4), at most `keep` of them.

    A fact gives its score, divided by the number of passages that mention the phrase, to subject and object.

    Args:
      ends: entities of the facts, best fact first.
      scores: scores of the facts, 0..1.
      rule: "average": a phrase gets the mean over its facts, and the phrases with the largest weights are kept (HippoRAG since
        its issue 128). "released": the last fact of a phrase overwrites the others, and the phrases with the largest mean score
        of their facts are kept (RouteRAG's release).
    """
    shares: dict[int, list[tuple[float, float]]] = {}  # entity: (share, score) of each of its facts
    for (subject, object_), score in zip(ends.tolist(), scores):
        for entity in (subject, object_):
            shares.setdefault(entity, []).append((float(score) / max(int(passages_of[entity]), 1), float(score)))
    mean = {entity: sum(share for share, _ in facts) / len(facts) for entity, facts in shares.items()}
    if rule == "average":
        return dict(sorted(mean.items(), key=lambda item: -item[1])[:keep])
    linked = {entity: sum(score for _, score in facts) / len(facts) for entity, facts in shares.items()}
    best = sorted(linked, key=lambda entity: -linked[entity])[:keep]
    return {entity: shares[entity][-1][0] for entity in best}


class RecognitionFilter:
    """Asks a language model which of the linked facts are relevant to the question (HippoRAG 2, section 3.3)."""

    def __init__(self, model: ChatModel) -> None:
        self.model = model

    def __call__(self, queries: Sequence[str], facts: Sequence[Sequence[Triple]]) -> list[list[int]]:
        """For each query, the indices of the facts to keep, in the model's order; all facts if its answer is unusable."""
        with_facts = [i for i, linked in enumerate(facts) if linked]
        answers = self.model.complete(
            [_filter_prompt(queries[i], facts[i]) for i in with_facts],
            max_tokens=_ANSWER_TOKENS,
            schema=_SCHEMA,
        )
        result = [list(range(len(linked))) for linked in facts]
        failed = 0
        for i, answer in zip(with_facts, answers):
            chosen = None if answer.error else _chosen(answer.text, len(facts[i]))
            failed += chosen is None
            result[i] = result[i] if chosen is None else chosen[:_MOST_FACTS]
        if failed:
            logging.warning(
                "%s: %d of %d answers name no facts; all are kept", self.model.name, failed, len(with_facts)
            )
        return result


_MOST_FACTS = 4  # that the filter keeps
_ANSWER_TOKENS = 256
_SCHEMA = {
    "type": "object",
    "properties": {"keep": {"type": "array", "items": {"type": "integer"}}},
    "required": ["keep"],
    "additionalProperties": False,
}


def _filter_prompt(query: str, facts: Sequence[Triple]) -> list[Message]:
    listed = "\n".join(f"{number}. {json.dumps(fact, ensure_ascii=False)}" for number, fact in enumerate(facts, 1))
    return [
        Message(
            role="system",
            content=(
                "You select facts for a search engine. A fact is kept if it states something that helps to answer the "
                "question, be it only one step on the way to the answer. Facts about other things of a similar name are "
                f'left out. Reply with JSON alone: {{"keep": [numbers of at most {_MOST_FACTS} facts, most useful first]}}, or '
                '{"keep": []} if none helps.'
            ),
        ),
        Message(
            role="user",
            content="Question: Who founded the maker of the Zephyr?\n\n1. "
            '["zephyr", "is made by", "lincoln motor company"]\n2. ["zephyr", "is", "greek god of the west wind"]',
        ),
        Message(role="assistant", content='{"keep": [1]}'),
        Message(role="user", content=f"Question: {query}\n\n{listed}"),
    ]


def _chosen(text: str, count: int) -> list[int] | None:
    value = json_value(text, "keep")
    numbers = value.get("keep") if isinstance(value, dict) else value
    if not isinstance(numbers, list):
        return None
    if any(isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= count for n in numbers):
        return None
    return [n - 1 for n in dict.fromkeys(numbers)]


FACTS, ENTITIES = "facts", "entities"
BACKENDS = ("host", "device")

_QUERIES = 64  # queries that walk at once
_MEMORY = 2**30  # bytes up to which facts, or their vectors, are held in memory
_SHOWN = 8  # phrases of a walk that are recorded
# rows of the facts from which a query walked, and of the phrases that it passed most
_Steps = tuple[list[int], list[int]]
_PASSAGE_ROWS = 65_536  # passages that are compared at a time


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
      fact_filter: decides which of the linked facts count; default: by the model in the settings, or all facts.
      cache_size: number of cached query vectors.
    """

    cost = 2.0

    def __init__(
        self,
        store: Store,
        encoder: TextEncoder,
        *,
        fact_filter: RecognitionFilter | None = None,
        cache_size: int | None = None,
    ) -> None:
        self._vectors = QueryVectors(store, encoder, cache_size)
        saved = store.manifest.index
        self.fact_prefix = str(saved.get("fact_prefix", self._vectors.prefix))
        path = f"{store.directory / 'kb.json'}: index.walk"
        self.settings = from_config_dict(WalkSettings, saved.get("walk", {}), path=path)
        self.name, self.store, self.encoder = store.manifest.name, store, encoder
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
        results = self.store.scored([ids for ids, _ in ranked], [scores for _, scores in ranked])
        in_words = []
        for facts, phrases in walks:
            walk = Walk()
            if facts:
                nodes = tuple(phrase.text for phrase in self.phrases.take(phrases))
                walk = Walk(facts=tuple(" | ".join(triple) for triple in self.triples(facts)), nodes=nodes)
            in_words.append(walk)
        return TimedResults(results, [(time.perf_counter() - started) / len(queries)] * len(queries), in_words)

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
        for start in range(0, count, _PASSAGE_ROWS):
            stop = min(start + _PASSAGE_ROWS, count)
            scores[:, start:stop] = products(vectors, self.store.embeddings.read(start, stop))
        return min_max(scores, scores.min(1, keepdims=True), scores.max(1, keepdims=True)).astype(np.float32)


def _filter(settings: WalkSettings) -> RecognitionFilter | None:
    return RecognitionFilter(chat_model(settings.filter)) if settings.filter.model else None


def _page_rank(graph: Graph, settings: WalkSettings) -> HostPageRank | DevicePageRank:
    backend = settings.backend
    if backend == "auto":
        backend = "host" if jax.default_backend() == "cpu" else "device"
    make = HostPageRank if backend == "host" else DevicePageRank
    return make(graph.adjacency, damping=settings.damping, tolerance=settings.tolerance)
