"""The interface of knowledge bases, and the registry of their kinds, which `load_kb` opens."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, Protocol

from jax.sharding import Mesh

from routerl_jax.core.registry import Registry
from routerl_jax.core.types import Passage, Query, Walk
from routerl_jax.knowledge.counts import Counts
from routerl_jax.knowledge.encoders import TextEncoder
from routerl_jax.knowledge.query import checked_query, is_blank
from routerl_jax.knowledge.store import Store
from routerl_jax.knowledge.timing import TimedResults, timed_search

MOST_PASSAGES = 1000  # for one query, here and over HTTP


class KnowledgeBase(abc.ABC):
    """Passages that many queries can search at once. Safe to use from several threads.

    A kind implements `_search`. This class has the common parts: checks, and the treatment of blank queries.

    Attributes:
      reads: the parts of a query that it uses: "text", "image" or both; also "question" and "url" if results depend on the
        user's question behind a query, or on the web address of its picture.
      cost: cost of one query, in units of a dense search. It is the same in every run, for rewards.
      has_pictures: whether `pictures` returns the picture of any passage by its id.
    """

    name: str
    reads: frozenset[str] = frozenset({"text"})
    cost: float = 1.0
    has_pictures: bool = False

    @abc.abstractmethod
    def __len__(self) -> int:
        """Number of passages."""

    @abc.abstractmethod
    def _search(self, queries: list[Any], k: int) -> list[list[Passage]]:
        """Results for queries that are not blank: strings, or TextAndImage if there is more than a text.

        The results may be `TimedResults`, if the time of each query is known. Otherwise the time of the call is divided
        equally.
        """

    def stage_counts(self) -> Counts:
        """Counts of the requests to its stages, and of their outcomes, since it was opened; {} for a kind that counts
        nothing."""
        return {}

    @property
    def listing(self) -> KnowledgeBase:
        """The same knowledge base, but passages lack pictures that a server would have to send. `pictures` fetches these."""
        return self

    def pictures(self, ids: Sequence[str]) -> list[str]:
        """The pictures of passages, in the form of `Passage.image` ("" for a passage without a picture).

        Raises:
          ValueError: an id is unknown, or the kind lacks `has_pictures`.
        """
        raise ValueError(f"knowledge base {self.name!r} gives no pictures by the ids of passages")

    def search(self, queries: Sequence[Query], k: int = 5) -> TimedResults:
        """The k best passages for each query (all, if there are fewer), best first, with their scores.

        A blank query finds nothing and takes no time. The results of a query do not depend on the others of the call. `seconds`
        of the result are the times of the single queries.

        Raises:
          ValueError: k is not a whole number from 1 to MOST_PASSAGES, `queries` is not a list of strings (or of TextAndImage,
            for kinds that read pictures), or the kind's own search does not give one result per query.
        """
        if isinstance(queries, str):
            raise ValueError(f"search takes a list of queries, got one string; write search([{queries!r}])")
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise ValueError(f"k={k!r} must be a whole number of at least 1")
        if k > MOST_PASSAGES:
            raise ValueError(f"k={k} is more than a search gives ({MOST_PASSAGES})")
        read = [checked_query(query, i, self.reads, self.name) for i, query in enumerate(queries)]
        filled = [i for i, query in enumerate(read) if not is_blank(query)]
        results: list[list[Passage]] = [[] for _ in queries]
        times = [0.0] * len(results)
        walks = [Walk()] * len(results)
        if filled:
            answers, seconds = timed_search(self._search, [read[i] for i in filled], k)
            if len(answers) != len(filled):
                raise ValueError(
                    f"knowledge base {self.name!r} gave {len(answers)} results for {len(filled)} queries: "
                    f"{type(self).__name__}._search must give one list of passages per query"
                )
            for i, passages, elapsed in zip(filled, answers, seconds):
                results[i], times[i] = passages, elapsed
            if isinstance(answers, TimedResults):
                for i, walk in zip(filled, answers.walks):
                    walks[i] = walk
        return TimedResults(results, times, walks)


class Opener(Protocol):
    """Makes a knowledge base from an opened store. `index` and `encoder`, if given, replace those of the manifest."""

    def __call__(
        self, store: Store, *, mesh: Mesh | None, index: str | None, encoder: str | TextEncoder | None
    ) -> KnowledgeBase: ...


_HERE, _GRAPHS = "routerl_jax.knowledge", "routerl_jax.extras.graph_packages"
KB_KINDS: Registry[Opener] = Registry(
    "kind of knowledge base",
    {
        "bm25": f"{_HERE}.bm25:Bm25KB.open",
        "dense_table": f"{_HERE}.dense:DenseKB.open",
        "dense_text": f"{_HERE}.dense:DenseKB.open",
        "graph": f"{_HERE}.graph.kb:GraphKB.open",
        "graphrag": f"{_GRAPHS}.graph_rag:GraphRAGKB.open",
        "hybrid": f"{_HERE}.hybrid:open_hybrid",
        "lightrag": f"{_GRAPHS}.light_rag:LightRAGKB.open",
        "ocr": f"{_HERE}.pages.kb:OcrKB.open",
        "pages": f"{_HERE}.pages.kb:PageKB.open",
        "reverse_image": f"{_HERE}.pictures.kb:ReverseImageKB.open",
        "text_image": f"{_HERE}.pictures.kb:TextImageKB.open",
        "tree": f"{_HERE}.tree.kb:TreeKB.open",
        "web": f"{_HERE}.web.build:open_web",
    },
)
