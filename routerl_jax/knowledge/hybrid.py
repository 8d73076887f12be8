"""Knowledge bases over others: several joined by reciprocal rank fusion, or one that a cross-encoder reranks."""

from __future__ import annotations

import collections
import contextvars
import dataclasses
import os
import pathlib
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float32

from routerl_jax.core.buckets import fetched, in_bucket, resolve_url, url_of
from routerl_jax.core.config import NonNegative, Size, checked
from routerl_jax.core.text import one_line
from routerl_jax.core.types import Passage, Query, Walk
from routerl_jax.knowledge.base import (
    MOST_PASSAGES,
    Counts,
    KnowledgeBase,
    TimedResults,
    checked_query,
    is_blank,
    query_text,
    timed_search,
)
from routerl_jax.knowledge.builds import Builder, BuildReport, digest_of, write_settings
from routerl_jax.knowledge.encoders import TextEncoder, local_mesh, resolved_encoder
from routerl_jax.knowledge.load import has_index, load_kb
from routerl_jax.knowledge.store import Manifest, Store
from routerl_jax.models.families.bert import CrossEncoder
from routerl_jax.models.huggingface import load_pretrained
from routerl_jax.models.images import is_url

RRF_K = 60.0  # Cormack, Clarke and Buettcher 2009
DEPTH = 2  # RouteRAG


def reciprocal_rank_fusion(
    rankings: Sequence[Sequence[Passage]], k: int, *, weights: Sequence[float] | None = None, constant: float = RRF_K
) -> list[Passage]:
    """The k passages with the largest sum of weight / (constant + rank), with ranks from 1. The sum becomes their score.

    Passages are the same if id, title and text agree. Ties go to the one that comes first in the earliest ranking.
    Source: Cormack, Clarke and Buettcher, "Reciprocal Rank Fusion", SIGIR 2009, equation in section 2.
    """
    scores: dict[tuple[str, ...], float] = collections.defaultdict(float)
    passages: dict[tuple[str, ...], Passage] = {}
    for ranking, weight in zip(rankings, weights or [1.0] * len(rankings), strict=True):
        for rank, passage in enumerate(ranking, 1):
            key = (passage.id, passage.title, passage.text)
            scores[key] += weight / (constant + rank)
            passages.setdefault(key, passage)
    best = sorted(passages, key=lambda key: -scores[key])[:k]  # stable: ties keep the order of their first appearance
    return [dataclasses.replace(passages[key], score=scores[key]) for key in best]


class HybridKB(KnowledgeBase):
    """Joins several knowledge bases. The cost of a query is the sum of its costs in all members.

    A query with a picture goes in full to the members that read pictures; the others get its text. All members are searched at
    the same time. An error of one of them is raised.

    Args:
      members: the knowledge bases; at least one.
      weights: weights of their rankings, not negative; default: 1 each.
      constant: k of reciprocal rank fusion. The larger it is, the less the first ranks count.
      depth: every member finds `depth * k` passages, but at most MOST_PASSAGES.
    """

    def __init__(
        self,
        members: Sequence[KnowledgeBase],
        *,
        name: str = "hybrid",
        weights: Sequence[float] | None = None,
        constant: float = RRF_K,
        depth: int = DEPTH,
    ) -> None:
        _check(len(members), weights or (), constant, depth)
        self.members = list(members)
        self.name = name
        self.weights = list(weights or [1.0] * len(members))
        self.constant, self.depth = constant, depth
        self.reads = frozenset[str]().union(*(member.reads for member in members))
        self.cost = sum(member.cost for member in members)

    def __len__(self) -> int:
        """Number of passages of all members. A passage in several members counts several times."""
        return sum(len(member) for member in self.members)

    def stage_counts(self) -> Counts:
        """Counts of the members, as MEMBER/STAGE."""
        return {
            f"{member.name}/{stage}": counts
            for member in self.members
            for stage, counts in member.stage_counts().items()
        }

    def _search(self, queries: list[Any], k: int) -> TimedResults:
        with ThreadPoolExecutor(len(self.members)) as pool:
            futures = [
                pool.submit(contextvars.copy_context().run, _ask, member, queries, min(self.depth * k, MOST_PASSAGES))
                for member in self.members
            ]
            rankings = [of_member.result() for of_member in futures]
        joined = [
            reciprocal_rank_fusion(
                [ranking[i] for ranking in rankings], k, weights=self.weights, constant=self.constant
            )
            for i in range(len(queries))
        ]
        seconds = [sum(times) for times in zip(*(results.seconds for results in rankings))]
        walks = []
        for of_query in zip(*(results.walks for results in rankings)):  # one walk with the names of all, each once
            facts, nodes = (dict.fromkeys(name for names in part for name in names) for part in zip(*of_query))
            walks.append(Walk(facts=tuple(facts), nodes=tuple(nodes)))
        return TimedResults(joined, seconds, walks)


def open_hybrid(store: Store, *, mesh: Mesh | None, index: str | None, encoder: str | TextEncoder | None) -> HybridKB:
    """Opens a hybrid directory with its members. `index` is passed to members with an index, `encoder` to those with
    vectors."""
    settings = dict(store.manifest.settings)
    members = []
    for member in settings.pop("members", ()):
        source, path = member, url_of(store.directory)
        if not (is_url(member) or in_bucket(member)):  # relative to this one
            source = resolve_url(path, member) if in_bucket(path) else str((store.directory / member).resolve())
        vectors = not is_url(source) and Manifest.read(fetched(source)).embedding is not None
        try:
            member_index = index if has_index(source) else None
            members.append(load_kb(source, mesh=mesh, index=member_index, encoder=encoder if vectors else None))
        except ValueError as error:
            raise ValueError(f"{store.directory}: member {member!r}: {error}") from error
    return HybridKB(members, name=store.manifest.name, **settings)


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class HybridConfig:
    """Configuration of `build_hybrid`."""

    kind: str = "hybrid"  # kind of the knowledge base
    name: str = ""  # name of the knowledge base; default: that of its directory
    members: tuple[str, ...] = ()  # directories or URLs of the knowledge bases to be joined
    weights: tuple[NonNegative, ...] = ()  # weights of their rankings; default: 1 each
    constant: NonNegative = RRF_K  # k of reciprocal rank fusion: the larger, the less the first ranks count
    depth: Size = DEPTH  # every member finds depth * k passages
    overwrite: bool = False  # replace a hybrid knowledge base in the same directory

    def __post_init__(self) -> None:
        if self.members:
            _check(len(self.members), self.weights, self.constant, self.depth)


def build_hybrid(config: HybridConfig, directory: str | pathlib.Path, *, progress: bool = True) -> BuildReport:
    """Writes a directory whose kb.json names the members. The members are not moved.

    Raises:
      ValueError: there are no members, one is no knowledge base, or `directory` has other content.
    """
    if not config.members:
        raise ValueError("members must be set, such as --config.members=\"('kb/dense', 'kb/bm25')\"")
    directory = pathlib.Path(directory).expanduser().resolve()
    members = tuple(
        member if is_url(member) or in_bucket(member) else _relative(pathlib.Path(member), directory)
        for member in config.members
    )
    settings = {
        "members": members,
        "weights": config.weights or [1.0] * len(members),
        "constant": config.constant,
        "depth": config.depth,
    }
    digest = digest_of(settings)
    manifest = write_settings(config, directory, settings, overwrite=config.overwrite, digest=digest)
    return BuildReport(
        name=manifest.name, kind="hybrid", directory=str(directory), notes={"members": ", ".join(members)}
    )


def _relative(member: pathlib.Path, directory: pathlib.Path) -> str:
    """The relative path of a member beside the directory, so that both can be moved together; the given path of another."""
    member = member.expanduser().resolve()
    Manifest.read(member)
    return os.path.relpath(member, directory) if member.parent == directory.parent else str(member)


def _ask(member: KnowledgeBase, queries: Sequence[Query], k: int) -> TimedResults:
    """The member's results for the parts of each query that it reads; [] for a query without such parts."""
    readable = [_readable(query, member.reads) for query in queries]
    results, seconds = timed_search(member.search, readable, k)
    return TimedResults(results, seconds, results.walks if isinstance(results, TimedResults) else ())


def _readable(query: Query, reads: frozenset[str]) -> Query:
    if isinstance(query, str):
        return query if "text" in reads else ""
    text, image = query.text if "text" in reads else None, query.image if "image" in reads else None
    reduced = dataclasses.replace(query, text=text, image=image, url=query.url if "image" in reads else "")
    return "" if is_blank(reduced) else checked_query(reduced, 0, reads, "")


def _check(members: int, weights: Sequence[float], constant: float, depth: int) -> None:
    if not members:
        raise ValueError("a hybrid knowledge base needs at least one member")
    if weights and len(weights) != members:
        raise ValueError(f"{len(weights)} weights for {members} members; give one each, or none")
    if any(weight < 0 for weight in weights) or constant < 0 or depth < 1:
        raise ValueError(f"weights={list(weights)}, constant={constant} must not be negative, depth={depth} at least 1")


BUILDER = Builder(HybridConfig, build_hybrid)


RERANK_DEPTH = 20

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

    def __init__(
        self, kb: KnowledgeBase, reranker: Reranker, *, depth: int = RERANK_DEPTH, batch_size: int = 32
    ) -> None:
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
