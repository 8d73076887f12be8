"""Endpoints of other projects' retrieval servers. Their clients work after a change of the URL.

POST /retrieve  Search-R1 `search_r1/search/retrieval_server.py` (a14dc3a), verl: `queries`, `topk`, `return_scores`; SkyRL
                `examples/train/search` (a956457): one `query`. The reply's `result[i][j]` is `{document, score}`;
                `document.contents` is `"Title"\\ntext`.
POST /search    RouteRAG `retrieval_api.py` (244d30d): `queries` that may hold `[passage]` and `[graph]`, `topk`,
                `return_scores`, `return_times`; `result[i][j].document` is `Title\\ntext`, `time[i]` seconds of that query.
GET /search     VRAG `search_engine/search_engine_api.py` (24f8d05): `?queries=a&queries=b`; a list of lists of
                `{idx, image_file}`.
POST /queries   R1-Searcher `train/wiki_corpus_load.py` (631167c): `queries`, `k`; `answers[i][j]` is a line of the corpus.

Where a project's own server fails (Search-R1 and RouteRAG with `return_scores` false), these return what its code intends.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from routerl_jax.core.types import Passage, Query
from routerl_jax.extras.kb_server.requests import Limits, SearchRequest, invalid, read_k, read_object, read_queries
from routerl_jax.knowledge.base import TimedResults, as_read

PASSAGE = "passage"  # also accepted as the mode of a knowledge base without modes
_MODE = re.compile(r"\[(passage|graph)\]")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adapter:
    """One foreign endpoint.

    Attributes:
      name: name for metrics.
      read: (body, limits) -> the searches of the request, each with its indices in the reply. For a GET, the body is
        `{name: [values]}` of its query string.
      write: (body, results in order with the seconds of each) -> JSON.
    """

    name: str
    method: str
    path: str
    read: Callable[[Any, Limits], list[tuple[SearchRequest, list[int]]]]
    write: Callable[[Mapping[str, Any], TimedResults], Any]


def _read_search_r1(body: Any, limits: Limits) -> list[tuple[SearchRequest, list[int]]]:
    fields = read_object(body)
    if "query" in fields and "queries" not in fields:  # SkyRL
        if not isinstance(fields["query"], str):
            raise invalid(f"query must be a string, got {type(fields['query']).__name__}")
        fields = {**fields, "queries": [fields["query"]]}
    return _one_search(fields, "topk", 3, limits)


def _write_search_r1(body: Mapping[str, Any], results: TimedResults) -> Any:
    """`contents` begins with the title in quotation marks, as in the wiki-18 corpus that their prompts use."""

    def document(passage: Passage) -> dict[str, str]:
        contents = f'"{passage.title}"\n{passage.text}' if passage.title else passage.text
        return {"id": passage.id, "contents": contents, "title": passage.title, "text": passage.text}

    return {"result": _scored(body, results, document)}


def _read_routerag(body: Any, limits: Limits) -> list[tuple[SearchRequest, list[int]]]:
    fields = read_object(body)
    k = _topk(fields, "topk", 5, limits)
    by_mode: dict[str, tuple[list[Query], list[int]]] = {}
    for i, query in enumerate(read_queries(fields.get("queries"), limits)):
        query = as_read(query, ())
        if not isinstance(query, str):
            raise invalid(f"queries[{i}] must be a string")
        named = set(_MODE.findall(query))
        mode = "hybrid" if len(named) == 2 else "graph" if "graph" in named else PASSAGE
        queries, indices = by_mode.setdefault(mode, ([], []))
        queries.append(_MODE.sub("", query).strip())
        indices.append(i)
    return [
        (SearchRequest(queries=queries, k=k, mode=mode), positions) for mode, (queries, positions) in by_mode.items()
    ]


def _write_routerag(body: Mapping[str, Any], results: TimedResults) -> Any:
    times = results.seconds if body.get("return_times") else []
    return {"result": _scored(body, results, lambda passage: f"{passage.title}\n{passage.text}"), "time": times}


def _read_vrag(body: Any, limits: Limits) -> list[tuple[SearchRequest, list[int]]]:
    if not body.get("queries"):
        raise invalid("give at least one query: GET /search?queries=first&queries=second")
    k = body.get("k", ["0"])[-1]
    if not k.isdecimal() or len(k) > 9:
        raise invalid(f"k={k!r} must be a whole number of at least 1")
    return _one_search({"queries": body["queries"], "k": int(k)}, "k", 10, limits)


def _write_vrag(body: Mapping[str, Any], results: TimedResults) -> Any:
    """`idx` is the rank, as there. `image_file` is the path of the picture on the server, which their client opens."""
    return [
        [{"idx": rank, "image_file": passage.image} for rank, passage in enumerate(passages)] for passages in results
    ]


def _read_r1_searcher(body: Any, limits: Limits) -> list[tuple[SearchRequest, list[int]]]:
    return _one_search(read_object(body), "k", 3, limits)


def _write_r1_searcher(body: Mapping[str, Any], results: TimedResults) -> Any:
    """A passage is a line of their corpus: number, tab, then title and text; their client cuts the number off."""

    def line(passage: Passage, rank: int) -> str:
        number = passage.id if passage.id.isdecimal() else str(rank)
        return f"{number}\tTitle: {' '.join(passage.title.split())} Text: {' '.join(passage.text.split())}"

    answers = [[line(passage, rank) for rank, passage in enumerate(passages)] for passages in results]
    return {"queries": body["queries"], "answers": answers}


def _one_search(
    fields: Mapping[str, Any], key: str, default: int, limits: Limits
) -> list[tuple[SearchRequest, list[int]]]:
    queries = read_queries(fields.get("queries"), limits)
    return [(SearchRequest(queries=queries, k=_topk(fields, key, default, limits)), list(range(len(queries))))]


def _topk(fields: Mapping[str, Any], key: str, default: int, limits: Limits) -> int:
    """The number of passages. None and 0 mean the server's default, as in the other projects."""
    return read_k(fields.get(key) or limits.default(default), limits, key)


def _scored(
    body: Mapping[str, Any], results: Sequence[Sequence[Passage]], document: Callable[[Passage], Any]
) -> list[list[Any]]:
    if not body.get("return_scores"):
        return [[document(passage) for passage in passages] for passages in results]
    return [
        [{"document": document(passage), "score": float(passage.score)} for passage in passages] for passages in results
    ]


ADAPTERS = (
    Adapter(name="search_r1", method="POST", path="/retrieve", read=_read_search_r1, write=_write_search_r1),
    Adapter(name="routerag", method="POST", path="/search", read=_read_routerag, write=_write_routerag),
    Adapter(name="vrag", method="GET", path="/search", read=_read_vrag, write=_write_vrag),
    Adapter(name="r1_searcher", method="POST", path="/queries", read=_read_r1_searcher, write=_write_r1_searcher),
)
