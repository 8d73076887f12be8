"""The interface of knowledge bases: queries, results with times, counts, and the registry of kinds that `load_kb` opens."""

from __future__ import annotations

import abc
import collections
import dataclasses
import math
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from jax.sharding import Mesh

from routerl_jax.core.registry import Registry
from routerl_jax.core.text import replace_surrogates
from routerl_jax.core.types import Passage, Query, TextAndImage, Walk
from routerl_jax.knowledge.encoders import TextEncoder
from routerl_jax.knowledge.store import Store
from routerl_jax.models.images import image_digest


class TimedResults(list[list[Passage]]):
    """The results of a search with the time of each query. `search` returns this if the tool measures times itself.

    Args:
      results: the passages of each query.
      seconds: the seconds of each query alone; finite and not negative.
      walks: each query's walk over a graph; () if nothing is known of walks.

    Raises:
      ValueError: `seconds` or `walks` has another length, or `seconds` other values.
    """

    def __init__(self, results: Iterable[list[Passage]], seconds: Iterable[float], walks: Iterable[Walk] = ()) -> None:
        super().__init__(results)
        self.walks = list(walks) or [Walk()] * len(self)
        if len(self.walks) != len(self):
            raise ValueError(f"walks of {len(self.walks)} queries for {len(self)} results")
        self.seconds = [float(value) for value in seconds]
        if len(self.seconds) != len(self):
            raise ValueError(f"{len(self.seconds)} times for {len(self)} results; give the seconds of each query")
        if wrong := [value for value in self.seconds if not (value >= 0 and math.isfinite(value))]:
            raise ValueError(f"a query that took {wrong[0]} s; give seconds that are not negative and not infinite")


def timed_search(search: Callable[[Any, int], Any], queries: Sequence[Query], k: int) -> tuple[Any, list[float]]:
    """The result of `search(queries, k)`, unchecked, and the seconds of each query.

    The seconds are those of the reply if it is `TimedResults`; else the time of the call in equal shares.
    """
    started = time.perf_counter()
    reply = search(queries, k)
    elapsed = time.perf_counter() - started
    if isinstance(reply, TimedResults) and len(reply.seconds) == len(queries):
        return reply, list(reply.seconds)
    return reply, [elapsed / max(len(queries), 1)] * len(queries)


# Stage -> number of requests ("asked"), of answers from a cache ("hits", only for stages with a cache), of failures, and of
# documents that were no passages ("left_out", if there were any).
Counts = Mapping[str, Mapping[str, int]]

ASKED, HITS, FAILURES, LEFT_OUT = "asked", "hits", "failures", "left_out"


class StageCounts:
    """Counters of stages. Safe to use from several threads.

    Args:
      cached: stages with a cache.
      uncached: stages without a cache.
    """

    def __init__(self, *cached: str, uncached: tuple[str, ...] = ()) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, dict[str, int]] = {
            **{stage: {ASKED: 0, HITS: 0, FAILURES: 0} for stage in cached},
            **{stage: {ASKED: 0, FAILURES: 0} for stage in uncached},
        }

    def add(self, stage: str, *, asked: int = 0, hits: int = 0, failures: int = 0, left_out: int = 0) -> None:
        """Adds to the counts of a stage."""
        with self._lock:
            counts = self._counts[stage]
            counts[ASKED] += asked
            counts[FAILURES] += failures
            if hits:
                counts[HITS] += hits
            if left_out:
                counts[LEFT_OUT] = counts.get(LEFT_OUT, 0) + left_out

    def __call__(self) -> dict[str, dict[str, int]]:
        """All counts so far."""
        with self._lock:
            return {stage: dict(counts) for stage, counts in self._counts.items()}


def added(*parts: Counts) -> dict[str, dict[str, int]]:
    """The sums of several counts."""
    sums: dict[str, collections.Counter[str]] = {}
    for part in parts:
        for stage, counts in part.items():
            sums.setdefault(stage, collections.Counter()).update(counts)
    return {stage: dict(counts) for stage, counts in sums.items()}


def difference(after: Counts, before: Counts) -> dict[str, dict[str, int]]:
    """The counts after, less those before."""
    return {
        stage: {name: value - before.get(stage, {}).get(name, 0) for name, value in counts.items()}
        for stage, counts in after.items()
    }


_BESIDE = ("question", "url")  # further fields of a query


def query_text(query: Query) -> str:
    """The text of a query; "" for a picture alone."""
    return query if isinstance(query, str) else query.text or ""


def query_image(query: Query) -> str:
    """The digest of a query's picture; "" if it has none."""
    return "" if isinstance(query, str) or query.image is None else image_digest(query.image)


def query_question(query: Query) -> str:
    """The user's question behind a query; "" if it has none."""
    return "" if isinstance(query, str) else query.question


def query_url(query: Query) -> str:
    """The web address of a query's picture; "" if it has none."""
    return "" if isinstance(query, str) else query.url


def query_key(query: Query) -> str:
    """A string that identifies a query: the text, and if there are any, the digest of the picture, the user's question and the
    picture's URL."""
    parts = {"image": query_image(query), "question": query_question(query), "url": query_url(query)}
    return query_text(query) + "".join(f"\0{name}:{value}" for name, value in parts.items() if value)


def with_question(text: str, question: str) -> Query:
    """A query of a text, with the user's question behind it."""
    return TextAndImage(text=text, question=question) if question.strip() else text


def as_read(query: Query, reads: Collection[str]) -> Query:
    """The query without the user's question and the picture's URL, unless the knowledge base reads these. Otherwise equal
    searches would have different keys."""
    if isinstance(query, str):
        return query
    return _simplified(dataclasses.replace(query, **{key: "" for key in _BESIDE if key not in reads}))


def _simplified(query: TextAndImage) -> Query:
    """The query as a string if it is a text alone."""
    alone = query.image is None and not any(getattr(query, key) for key in _BESIDE)
    return query.text or "" if alone else query


def with_picture(text: str, images: Sequence[Any]) -> Query:
    """A query of a text and the first of a question's pictures; of the text alone if there are none."""
    return TextAndImage(text=text, image=images[0]) if images else text


def is_blank(query: Query) -> bool:
    """Whether a query is blank: it has no picture, no URL of one, and no text but white space."""
    return not query_text(query).strip() and (isinstance(query, str) or (query.image is None and not query.url.strip()))


def checked_query(query: object, number: int, reads: Collection[str], name: str) -> Query:
    """Checks a query for a knowledge base and reduces it to the parts that it `reads`. A text alone becomes a string.

    Halves of surrogate pairs, which JSON may contain and no encoder reads, become question marks.

    Raises:
      ValueError: the query is no query, or has a text or a picture that the knowledge base does not read.
    """
    if isinstance(query, str):
        query = TextAndImage(text=query)
    elif not isinstance(query, TextAndImage):
        raise ValueError(f"query {number} is of type {type(query).__name__}, expected a string or a TextAndImage")
    extra_fields = {key: getattr(query, key) for key in _BESIDE if key in reads}
    for key, value in extra_fields.items():
        if not isinstance(value, str):
            raise ValueError(f"query {number} has a {key} of type {type(value).__name__}, expected a string")
    text, image = replace_surrogates(query.text or ""), query.image
    if image is not None and "image" not in reads:
        raise ValueError(f"query {number} has a picture, but knowledge base {name!r} is searched by text alone")
    if text.strip() and "text" not in reads:
        raise ValueError(f"query {number} has a text, but knowledge base {name!r} is searched by pictures alone")
    extra_fields = {key: replace_surrogates(value) for key, value in extra_fields.items()}
    return _simplified(TextAndImage(text=text or None, image=image, **extra_fields))


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
        whole = isinstance(k, int) and not isinstance(k, bool)
        shown = "a number of ten digits or more" if whole and abs(k) >= 10**9 else repr(k)  # 5,000 can't be printed
        if not whole or k < 1:
            raise ValueError(f"k={shown} must be a whole number of at least 1")
        if k > MOST_PASSAGES:
            raise ValueError(f"k={shown} is more than a search gives ({MOST_PASSAGES})")
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
        "reverse_image": f"{_HERE}.pictures:ReverseImageKB.open",
        "text_image": f"{_HERE}.pictures:TextImageKB.open",
        "tree": f"{_HERE}.tree:TreeKB.open",
        "web": f"{_HERE}.web.kb:open_web",
    },
)


T = TypeVar("T")


async def search_together(
    search: Callable[[Sequence[Query]], Awaitable[Sequence[T]]],
    parts: Sequence[Sequence[Query]],
    *,
    is_wanted: Callable[[int], bool] = lambda part: True,
    lost: type[Exception] | tuple[type[Exception], ...] = (),
) -> AsyncIterator[tuple[int, Sequence[T] | Exception]]:
    """Searches for the queries of all parts at once. If that raises, it searches for each part separately.

    Args:
      search: returns one result per query.
      parts: queries of different callers.
      is_wanted: called before a part is searched separately; False skips the part.
      lost: errors after which a separate search would not help either, such as that of a time limit.

    Yields:
      (part, its results or the error), as soon as they are known; nothing for a skipped part.
    """
    try:
        results = await search([query for part in parts for query in part])
    except Exception as error:
        failure = error
    else:
        start = 0
        for number, part in enumerate(parts):
            yield number, results[start : start + len(part)]
            start += len(part)
        return
    if len(parts) == 1 or isinstance(failure, lost):
        for number in range(len(parts)):
            yield number, failure
        return
    for number, part in enumerate(parts):
        if is_wanted(number):
            try:
                yield number, await search(part)
            except Exception as error:
                yield number, error
