"""Several knowledge bases as one: their rankings are joined by reciprocal rank fusion."""

from __future__ import annotations

import collections
import contextvars
import dataclasses
import os
import pathlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from routerl_jax.core.checked import NonNegative, Size, checked
from routerl_jax.core.types import Passage, Query
from routerl_jax.knowledge.base import KB_BUILDERS, Builder, KnowledgeBase
from routerl_jax.knowledge.builds import BuildReport, digest_of, write_settings
from routerl_jax.knowledge.counts import Counts
from routerl_jax.knowledge.query import checked_query, is_blank
from routerl_jax.knowledge.store import Manifest
from routerl_jax.knowledge.timing import TimedResults, timed_search

RRF_K = 60.0  # Cormack, Clarke and Buettcher 2009
DEPTH = 2  # RouteRAG


def reciprocal_rank_fusion(
    rankings: Sequence[Sequence[Passage]], k: int, *, weights: Sequence[float] | None = None, constant: float = RRF_K
) -> list[Passage]:
    """The k passages with the largest sum of weight / (constant + rank), ranks from 1, which becomes their score.

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
    best = sorted(passages, key=lambda key: -scores[key])[
        :k
    ]  # stable: ties stay in the order of their first appearance
    return [dataclasses.replace(passages[key], score=scores[key]) for key in best]


class HybridKB(KnowledgeBase):
    """Knowledge bases that answer together; a query costs what it costs in all of them, and takes as long.

    A query with a picture goes in full to the members that read pictures; the others get its text. All members are asked
    at the same time. What fails in one of them is raised.

    Args:
      members: at least one.
      weights: of their rankings; default: 1 each. Not negative.
      constant: k of reciprocal rank fusion: the larger, the less the first ranks stand out.
      depth: every member finds `depth * k` passages.
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
        """Passages of all members; those that are in several count as often."""
        return sum(len(member) for member in self.members)

    def stage_counts(self) -> Counts:
        """Those of the members, as MEMBER/STAGE."""
        return {
            f"{member.name}/{stage}": counts
            for member in self.members
            for stage, counts in member.stage_counts().items()
        }

    def _search(self, queries: list[Any], k: int) -> TimedResults:
        with ThreadPoolExecutor(len(self.members)) as pool:
            asked = [
                pool.submit(contextvars.copy_context().run, _ask, member, queries, self.depth * k)
                for member in self.members
            ]
            found = [of_member.result() for of_member in asked]
        joined = [
            reciprocal_rank_fusion([ranking[i] for ranking in found], k, weights=self.weights, constant=self.constant)
            for i in range(len(queries))
        ]
        return TimedResults(joined, [sum(times) for times in zip(*(results.seconds for results in found))])


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class HybridConfig:
    """What `build_hybrid` makes."""

    kind: str = "hybrid"  # of knowledge base
    name: str = ""  # what the knowledge base calls itself; default: the name of its directory
    members: tuple[str, ...] = ()  # directories or URLs of the knowledge bases to be joined
    weights: tuple[NonNegative, ...] = ()  # of their rankings; default: 1 each
    constant: NonNegative = RRF_K  # k of reciprocal rank fusion: the larger, the less the first ranks stand out
    depth: Size = DEPTH  # every member finds depth * k passages
    overwrite: bool = False  # replace a hybrid knowledge base that is at the same place already

    def __post_init__(self) -> None:
        if self.members:
            _check(len(self.members), self.weights, self.constant, self.depth)


def build_hybrid(config: HybridConfig, directory: str | pathlib.Path, *, progress: bool = True) -> BuildReport:
    """Writes a directory whose kb.json names the members, which stay where they are.

    Raises:
      ValueError: no members, a directory that holds no knowledge base, or something else at `directory`.
    """
    if not config.members:
        raise ValueError("members must be set, such as --config.members=\"('kb/dense', 'kb/bm25')\"")
    directory = pathlib.Path(directory).expanduser().resolve()
    places = tuple(place if is_url(place) else _relative(pathlib.Path(place), directory) for place in config.members)
    settings = {
        "members": places,
        "weights": config.weights or [1.0] * len(places),
        "constant": config.constant,
        "depth": config.depth,
    }
    digest = digest_of(settings)
    made = write_settings(config, directory, settings, overwrite=config.overwrite, digest=digest)
    return BuildReport(name=made.name, kind="hybrid", directory=str(directory), notes={"members": ", ".join(places)})


def _relative(member: pathlib.Path, directory: pathlib.Path) -> str:
    """A member beside the directory by its relative path, so that both can be moved together; another by its own."""
    member = member.expanduser().resolve()
    Manifest.read(member)
    return os.path.relpath(member, directory) if member.parent == directory.parent else str(member)


def _ask(member: KnowledgeBase, queries: Sequence[Query], k: int) -> TimedResults:
    """The member's answers to what it can read of each query; none where nothing is left."""
    asked = [_readable(query, member.reads) for query in queries]
    return TimedResults(*timed_search(member.search, asked, k))


def _readable(query: Query, reads: frozenset[str]) -> Query:
    if isinstance(query, str):
        return query if "text" in reads else ""
    text, image = query.text if "text" in reads else None, query.image if "image" in reads else None
    kept = dataclasses.replace(query, text=text, image=image, url=query.url if "image" in reads else "")
    return "" if is_blank(kept) else checked_query(kept, 0, reads, "")


def _check(members: int, weights: Sequence[float], constant: float, depth: int) -> None:
    if not members:
        raise ValueError("a hybrid knowledge base needs at least one member")
    if weights and len(weights) != members:
        raise ValueError(f"{len(weights)} weights for {members} members; give one each, or none")
    if any(weight < 0 for weight in weights) or constant < 0 or depth < 1:
        raise ValueError(f"weights={list(weights)}, constant={constant} must not be negative, depth={depth} at least 1")


def is_url(place: str) -> bool:
    """Whether a member is served by another process."""
    return place.startswith(("http://", "https://"))


KB_BUILDERS.register("hybrid")(Builder(HybridConfig, build_hybrid))
