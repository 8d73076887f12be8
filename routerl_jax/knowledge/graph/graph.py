"""The graph of HippoRAG 2: a node for each phrase and each passage; edges from facts, from mentions and from synonymy.

    phrase - phrase     twice the number of triples that join them, because the original has an edge in each direction
    passage - phrase    1 if a triple of the passage has the phrase as subject or object
    synonyms            their cosine instead of the count, for each end that has the other among its neighbours

Dimensions: E entities (phrases), F facts, P passages; nodes are the E entities, then the P passages.

Synonyms are phrases that are nearly the same: the neighbours of each entity's vector, found block by block. The memory is
that of one block of products and of the neighbours. The time is quadratic in the number of entities, so for very many
entities, an index (`knowledge.index`) can replace the comparison of all with all.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pathlib
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from jaxtyping import Array, Float32, Int, Int32

from routerl_jax.core.progress import Bar
from routerl_jax.knowledge.graph.triples import Triple, normalised
from routerl_jax.knowledge.index import INDEXES, VectorSource, backend_of

MOST = 101  # most synonyms of a phrase: HippoRAG's loop stops once it has more than 100
_LETTERS = re.compile("[^A-Za-z0-9]")
_QUERIES, _KEYS = 1024, 8192  # a block of products: 32 MB


class Neighbours(NamedTuple):
    """Pairs of entities whose cosine reaches the threshold, by source and then nearest first."""

    sources: Int32[np.ndarray, " S"]
    targets: Int32[np.ndarray, " S"]
    cosines: Float32[np.ndarray, " S"]


def synonyms(
    phrases: Sequence[str],
    vectors: VectorSource,
    *,
    threshold: float = 0.8,
    most: int = MOST,
    index: str = "",
    progress: bool = False,
) -> Neighbours:
    """For each phrase of more than two letters and digits, at most `most` nearest other phrases with at least this cosine.

    Letters of other scripts than Latin count as letters. Ties go to the lower number.

    Args:
      index: "" compares all with all; "auto" (or another of `knowledge.index`) finds about the same in less time.
    """
    count = len(phrases)
    asking = np.asarray([len(_LETTERS.sub("", p) or p.replace(" ", "")) > 2 for p in phrases], bool)
    most = min(most, count - 1)
    if count < 2 or not asking.any():
        return Neighbours(np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, np.float32))
    built = INDEXES.get(backend_of(index)).build(_Unit(vectors), {}) if index else None
    parts: list[Neighbours] = []
    with Bar(total=int(asking.sum()), desc="synonyms", unit="phrase", disable=not progress) as bar:
        for start in range(0, count, _QUERIES):
            rows = start + np.flatnonzero(asking[start : start + _QUERIES])
            if len(rows):
                queries = _unit(vectors.take(rows))
                if built is None:
                    near = _nearest(queries, vectors, most + 1, threshold)
                else:
                    near = built.search(queries, most + 1)
                parts.append(_above_threshold(rows, *near, threshold, most))
                bar.update(len(rows))
    return Neighbours(*(np.concatenate(column) for column in zip(*parts)))


def _above_threshold(rows: np.ndarray, ids: np.ndarray, scores: np.ndarray, threshold: float, most: int) -> Neighbours:
    """The nearest candidates of each row, [R, C], that reach the threshold and are not the phrase itself."""
    ids, scores = _in_order(ids, scores)
    good = (ids >= 0) & (scores >= threshold) & (ids != rows[:, None])
    good &= np.cumsum(good, axis=1) <= most
    sources = np.broadcast_to(rows[:, None], ids.shape)[good]
    return Neighbours(sources.astype(np.int32), ids[good].astype(np.int32), scores[good].astype(np.float32))


def _in_order(ids: np.ndarray, scores: np.ndarray, most: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """The best candidates of each row, best first; ties: the lower id."""
    order = np.lexsort((ids, -scores), axis=1)[:, :most]
    return np.take_along_axis(ids, order, 1), np.take_along_axis(scores, order, 1)


def _nearest(queries: np.ndarray, vectors: VectorSource, most: int, threshold: float) -> tuple[np.ndarray, np.ndarray]:
    """The best vectors for a block of queries: a matrix product and a selection per block of keys."""
    count = vectors.shape[0]
    ids = np.full((len(queries), most), -1, np.int64)
    scores = np.full((len(queries), most), -np.inf, np.float32)
    for start in range(0, count, _KEYS):
        keys = _unit(vectors.read(start, min(start + _KEYS, count)))
        found, values = _best(queries, keys, most, threshold)
        ids = np.concatenate([ids, np.where(found >= 0, found + start, -1)], axis=1)
        ids, scores = _in_order(ids, np.concatenate([scores, values], axis=1), most)
    return ids, scores


def _best(queries: np.ndarray, keys: np.ndarray, most: int, threshold: float) -> tuple[np.ndarray, np.ndarray]:
    """Ids and products of the nearest keys; -1 and -inf if fewer are above the threshold."""
    most = min(most, len(keys))
    if jax.default_backend() == "cpu":
        return _few_above(queries @ keys.T, most, threshold)
    padded = np.pad(queries, ((0, _QUERIES - len(queries)), (0, 0)))
    padded_keys = np.pad(keys, ((0, _KEYS - len(keys)), (0, 0)))
    scores, ids = (np.asarray(part)[: len(queries)] for part in _top(padded, padded_keys, len(keys), most))
    return np.where(scores >= threshold, ids, -1), np.where(scores >= threshold, scores, -np.inf)


def _few_above(products: np.ndarray, most: int, threshold: float) -> tuple[np.ndarray, np.ndarray]:
    """Like `_best`, for products in memory. Few are above the threshold, so finding these is faster than selecting the best."""
    rows, columns = np.nonzero(products >= threshold)
    counts = np.bincount(rows, minlength=len(products))
    width = max(int(counts.max(initial=0)), 1)
    ids = np.full((len(products), width), -1, np.int64)
    scores = np.full((len(products), width), -np.inf, np.float32)
    column = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    ids[rows, column], scores[rows, column] = columns, products[rows, columns]
    return (ids, scores) if width <= most else _in_order(ids, scores, most)


@functools.partial(jax.jit, static_argnums=3)
def _top(queries: Array, keys: Array, count: Array, most: int) -> tuple[Array, Array]:
    products = jnp.einsum("qd,kd->qk", queries, keys, precision=jax.lax.Precision.HIGHEST)
    scores, ids = jax.lax.top_k(jnp.where(jnp.arange(len(keys)) < count, products, -jnp.inf), most)
    return scores, ids


class _Unit:
    """Vectors scaled to unit length."""

    def __init__(self, vectors: VectorSource) -> None:
        self._vectors, self.shape = vectors, vectors.shape

    def read(self, start: int, stop: int) -> np.ndarray:
        return _unit(self._vectors.read(start, stop))

    def take(self, rows: np.ndarray) -> np.ndarray:
        flat = self._vectors.take(np.asarray(rows).reshape(-1))
        return _unit(flat).reshape(*np.shape(rows), -1)


def _unit(vectors: np.ndarray) -> np.ndarray:
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return np.divide(vectors, lengths, out=np.zeros_like(vectors), where=lengths > 0).astype(np.float32)


_FILE = "graph.npz"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phrases:
    """The triples of a corpus with a number for each phrase.

    Attributes:
      entities: the phrases, sorted.
      facts: the distinct (subject, predicate, object) of phrases, in their first order.
      fact_ends: entities that a fact joins, [F, 2].
      joined: the same for every triple of every passage, [T, 2]. A fact of two passages occurs twice.
      mentions: (passage, entity) of every phrase of a passage's triples, each once, [M, 2].
    """

    entities: list[str]
    facts: list[Triple]
    fact_ends: Int32[np.ndarray, "F 2"]
    joined: Int32[np.ndarray, "T 2"]
    mentions: Int32[np.ndarray, "M 2"]


def phrases_of(passages: Iterable[Sequence[Triple]]) -> Phrases:
    """Phrases and facts of the triples of each passage, in the passages' order."""
    numbers: dict[str, int] = {}
    facts: dict[Triple, tuple[int, int]] = {}
    joined: list[tuple[int, int]] = []
    mentions: list[tuple[int, int]] = []
    for row, triples in enumerate(passages):
        mentioned: dict[int, None] = {}
        for triple in triples:
            subject, predicate, object_ = (normalised(part) for part in triple)
            ends = tuple(numbers.setdefault(phrase, len(numbers)) for phrase in (subject, object_))
            facts.setdefault((subject, predicate, object_), (ends[0], ends[1]))
            joined.append((ends[0], ends[1]))
            mentioned |= dict.fromkeys(ends)
        mentions += zip(itertools.repeat(row), mentioned)
    entities = sorted(numbers)
    rank = np.zeros(len(entities), np.int32)
    rank[[numbers[phrase] for phrase in entities]] = np.arange(len(entities))
    pairs = np.asarray(mentions, np.int32).reshape(-1, 2)
    return Phrases(
        entities=entities,
        facts=list(facts),
        fact_ends=rank[np.asarray(list(facts.values()), np.int64).reshape(-1, 2)],
        joined=rank[np.asarray(joined, np.int64).reshape(-1, 2)],
        mentions=np.stack([pairs[:, 0], rank[pairs[:, 1]]], axis=1),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Graph:
    """The graph on which a query walks.

    Attributes:
      adjacency: symmetric weights, [E + P, E + P].
      fact_ends: entities that a fact joins, [F, 2].
      passages_of: number of passages that mention an entity, [E].
    """

    adjacency: scipy.sparse.csr_array
    fact_ends: Int32[np.ndarray, "F 2"]
    passages_of: Int[np.ndarray, " E"]

    @property
    def entities(self) -> int:
        """Number of entities."""
        return len(self.passages_of)

    @property
    def nodes(self) -> int:
        """Number of entities and passages."""
        return len(self.adjacency.indptr) - 1

    @property
    def passages(self) -> int:
        """Number of passages."""
        return self.nodes - self.entities

    def save(self, directory: pathlib.Path) -> None:
        """Writes DIR/graph.npz."""
        directory.mkdir(parents=True, exist_ok=True)
        matrix = self.adjacency
        np.savez(
            directory / _FILE,
            indptr=matrix.indptr,
            indices=matrix.indices,
            weights=matrix.data,
            fact_ends=self.fact_ends,
            passages_of=self.passages_of,
        )

    @classmethod
    def load(cls, directory: pathlib.Path) -> Graph:
        """Reads DIR/graph.npz. Raises ValueError if it is missing or damaged."""
        path = directory / _FILE
        try:
            with np.load(path, allow_pickle=False) as file:
                size = len(file["indptr"]) - 1
                parts = file["weights"], file["indices"], file["indptr"]
                matrix = scipy.sparse.csr_array(parts, shape=(size, size))
                matrix.check_format()
                return cls(adjacency=matrix, fact_ends=file["fact_ends"], passages_of=file["passages_of"])
        except (OSError, KeyError, ValueError, EOFError) as error:
            raise ValueError(f"{path} is missing or damaged ({error})") from error
        except Exception as error:  # a zip file may be damaged in many ways
            raise ValueError(f"{path} is damaged ({type(error).__name__}: {error})") from error


def make_graph(phrases: Phrases, passages: int, synonyms: Neighbours) -> Graph:
    """Makes the graph. `passages` is the number of passages, `synonyms` the neighbours of each entity."""
    count = len(phrases.entities)
    loops = phrases.joined[:, 0] == phrases.joined[:, 1]
    heads, tails = phrases.joined[~loops].T
    triples = _sparse(np.ones(len(heads)), heads, tails, count)
    alike = _sparse(synonyms.cosines, synonyms.sources, synonyms.targets, count)
    counts = triples + triples.T
    directed = counts - counts * (alike != 0) + alike  # synonymy replaces a count, as in the original
    between = (directed + directed.T).tocoo()
    row, entity = phrases.mentions.T.astype(np.int64)
    nodes = count + passages
    index = np.int32 if nodes < 2**31 else np.int64
    sources = np.concatenate([between.row, entity, row + count]).astype(index)
    targets = np.concatenate([between.col, row + count, entity]).astype(index)
    weights = np.concatenate([between.data, np.ones(2 * len(row))]).astype(np.float32)
    matrix = scipy.sparse.coo_array((weights, (sources, targets)), shape=(nodes, nodes)).tocsr()
    matrix.eliminate_zeros()
    return Graph(adjacency=matrix, fact_ends=phrases.fact_ends, passages_of=np.bincount(entity, minlength=count))


def _sparse(values: np.ndarray, rows: np.ndarray, columns: np.ndarray, size: int) -> scipy.sparse.csr_array:
    return scipy.sparse.coo_array((values.astype(np.float64), (rows, columns)), shape=(size, size)).tocsr()
