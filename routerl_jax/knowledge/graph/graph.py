"""The graph of HippoRAG 2: a node for each phrase and each passage; edges from facts, from mentions and from synonymy.

    phrase - phrase     twice the number of triples that join them, because the original has an edge in each direction
    passage - phrase    1 if a triple of the passage has the phrase as subject or object
    synonyms            their cosine instead of the count, for each end that has the other among its neighbours

Dimensions: E entities (phrases), F facts, P passages; nodes are the E entities, then the P passages.
"""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
from collections.abc import Iterable, Sequence

import numpy as np
import scipy.sparse
from jaxtyping import Int, Int32

from routerl_jax.knowledge.graph.synonyms import Neighbours
from routerl_jax.knowledge.graph.triples import Triple, normalised

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
