"""Clients of knowledge bases that `launch.serve_kb` serves, and of servers with Search-R1's protocol (`POST /retrieve`).

That protocol is the one of Search-R1's `search_r1/search/retrieval_server.py` (a14dc3a); verl's and SkyRL's search tools use it
too. For a server of this project, use `HttpKB`, whose `/v1/search` also has sizes and modes.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import time
import urllib.parse
from collections.abc import Callable, Sequence
from typing import Any

from routerl_jax.core.background import gather_bounded, shared_loop
from routerl_jax.core.files import parse_json
from routerl_jax.core.secrets import remember
from routerl_jax.core.time_limit import seconds_left
from routerl_jax.core.types import Passage, Query, Walk
from routerl_jax.knowledge.base import Counts, KnowledgeBase, StageCounts, TimedResults, query_key
from routerl_jax.knowledge.client.schema import Documents, document_passage, passage_json, passage_of
from routerl_jax.knowledge.client.transport import CircuitBreaker, Connection, Retries, Timeouts, Unavailable
from routerl_jax.models.images import image_uri
from routerl_jax.services.cache import Cache
from routerl_jax.services.limits import RateLimiter


class _RemoteKB(KnowledgeBase):
    """What both clients share: connections, and counts of queries to the server.

    Args:
      urls: of one server or of several equal ones.
      stages: stages with a cache, to be counted.
      settings: further settings of `Transport`.
    """

    def __init__(
        self,
        urls: Sequence[str],
        token: str | None,
        timeouts: Timeouts | None,
        retries: Retries | None,
        breaker: Callable[[], CircuitBreaker] = CircuitBreaker,
        stages: tuple[str, ...] = (),
        **settings: Any,
    ) -> None:
        self._timeouts = timeouts or Timeouts()
        self._counts = StageCounts(*stages, uncached=("server",))
        token = os.environ.get("ROUTERL_KB_TOKEN", "") if token is None else token
        remember(token)
        settings |= {
            "token": token,
            "timeouts": self._timeouts,
            "retries": retries or Retries(),
            "breaker": breaker,
        }
        self._connection = Connection(urls, settings)

    def stage_counts(self) -> Counts:
        """Counts of queries to the server, and to the cache, if there is one; equal queries of a call count once."""
        return self._counts()

    def close(self) -> None:
        """Closes the connections. The next search opens new ones."""
        self._connection.close()


class HttpKB(_RemoteKB):
    """A served knowledge base. Safe to use from several threads.

    The time of a query is the server's measurement, which is also cached. If the server gives none, the time of the request is
    divided by its number of queries.

    Args:
      urls: `http://host:port/NAME`, of one server or of several equal ones; without NAME, the server's first knowledge base. A
        mode may be given as `?mode=graph`.
      token: default: ROUTERL_KB_TOKEN in the environment.
      timeouts, retries: time limits, and attempts per request.
      hedge: send a second request when an answer takes longer than 95 % of them do.
      batch: queries per request; longer lists are sent in several requests, `concurrency` at a time.
      cache: cache of answers, kept for `ttl` seconds (None: forever). The key of an answer has the URL, the number of passages
        there, mode, k and query; that of a picture has the passage's id.
      limiter: grants one permit per query, under the key `kb:NAME`.
      breaker: makes the circuit breaker of a server.

    Raises:
      ValueError: a URL is malformed, the server has nothing of this name or mode, or the token is wrong.
      Unavailable: no server answered.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        token: str | None = None,
        timeouts: Timeouts | None = None,
        retries: Retries | None = None,
        hedge: bool = False,
        batch: int = 64,
        concurrency: int = 8,
        cache: Cache | None = None,
        ttl: float | None = 86_400.0,
        limiter: RateLimiter | None = None,
        breaker: Callable[[], CircuitBreaker] = CircuitBreaker,
    ) -> None:
        addresses = [_parse(url) for url in ([urls] if isinstance(urls, str) else urls)]
        if not addresses or batch < 1 or concurrency < 1:
            raise ValueError(f"HttpKB needs a URL, batch={batch} and concurrency={concurrency} of at least 1")
        modes = {mode for _, mode in addresses}
        if len(modes) > 1:
            raise ValueError(f"the URLs name different modes: {', '.join(map(str, sorted(modes, key=str)))}")
        self._bases = [base for base, _ in addresses]
        self._mode: str | None = modes.pop()
        self._batch, self._concurrency = batch, concurrency
        self._cache, self._ttl, self._limiter = cache, ttl, limiter
        stages = () if cache is None else ("cache",)
        connections = max(concurrency * 4, 16)
        super().__init__(self._bases, token, timeouts, retries, breaker, stages, hedge=hedge, connections=connections)
        self._documents = Documents(self._bases[0], self._counts, lambda fields, rank: passage_of(fields))
        self._pictured = True  # whether searches fetch pictures
        self._describe(shared_loop().run(self._connection.request("GET", "/v1/kbs")))

    def __len__(self) -> int:
        if self._size is None:
            raise TypeError(f"{self._bases[0]}: nobody knows how many passages it has")
        return self._size

    def _describe(self, description: Any) -> None:
        if isinstance(description, dict) and "kbs" in description:  # a server's URL: use its first knowledge base
            description = next(iter(description["kbs"]), None)
        try:
            self.name = str(description["name"])
            mode = self._mode or description["default_mode"]
            if mode not in description["modes"]:
                raise ValueError(f"{self._bases[0]} has no mode {mode!r}; it has: {', '.join(description['modes'])}")
            about = description["modes"][mode]
            self._size: int | None = about["size"]
            self.cost = float(about["cost"])
            # `reads` is a class attribute of other kinds; here it depends on the server
            vars(self)["reads"] = frozenset(about["reads"])
            self.has_pictures = about.get("pictures") is True  # searches of an older server always return pictures
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{self._bases[0]}: not a server of knowledge bases (GET /v1/kbs gave {str(description)[:100]!r})"
            ) from error

    @property
    def listing(self) -> KnowledgeBase:
        """The same, but searches return no pictures. `self` if the server can't send pictures separately."""
        if not self.has_pictures or not self._pictured:
            return self
        listing = copy.copy(self)  # connection, cache and counts are shared
        listing._pictured = False
        return listing

    def pictures(self, ids: Sequence[str]) -> list[str]:
        """The pictures of passages, as data URIs. Raises ValueError if the server sends none, or has no such passage."""
        if not self.has_pictures:
            return super().pictures(ids)
        keys = {id: self._digest("picture", id) for id in ids}
        packed = {} if self._cache is None else self._cache.get_many(list(keys.values()))
        images = {id: packed[key].decode() for id, key in keys.items() if key in packed}
        if missing := [id for id in keys if id not in images]:
            chunks = [missing[start : start + _PICTURES] for start in range(0, len(missing), _PICTURES)]
            beside = {} if self._mode is None else {"mode": self._mode}
            bodies = [("/v1/pictures", {"ids": chunk, **beside}) for chunk in chunks]
            replies = shared_loop().run(gather_bounded(self._send, bodies, self._concurrency))
            fresh = {
                id: image
                for chunk, (reply, _) in zip(chunks, replies)
                for id, image in self._checked_pictures(reply, chunk)
            }
            if self._cache is not None:
                self._cache.set_many({keys[id]: image.encode() for id, image in fresh.items()}, self._ttl)
            images |= fresh
        return [images[id] for id in ids]

    def _checked_pictures(self, reply: Any, ids: Sequence[str]) -> list[tuple[str, str]]:
        """Checks the reply to a request for pictures. A path is refused, because it would be read on this machine."""
        images = reply.get("images") if isinstance(reply, dict) else None
        if not isinstance(images, list) or len(images) != len(ids):
            raise Unavailable(
                f"{self._bases[0]}: a reply in another form than /v1/pictures gives ({str(reply)[:100]!r})"
            )
        if wrong := [image for image in images if image != "" and not str(image).startswith("data:")]:
            raise Unavailable(f"{self._bases[0]}: a picture that is no data URI ({str(wrong[0])[:100]!r})")
        return list(zip(ids, images))

    def _search(self, queries: list[Query], k: int) -> TimedResults:
        listing = () if self._pictured else ("listing",)
        keys = [self._digest(k, query_key(query), *listing) for query in queries]
        distinct = dict(zip(keys, queries))
        results = self._cached(list(distinct))
        missing = [key for key in distinct if key not in results]
        if self._cache is not None:
            self._counts.add("cache", asked=len(distinct), hits=len(results))
        if missing:
            self._counts.add("server", asked=len(missing))
            try:
                fresh = self._ask([distinct[key] for key in missing], k)
            except Exception:
                self._counts.add("server", failures=len(missing))
                raise
            results |= dict(zip(missing, fresh))
            if self._cache is not None:
                packed = {}
                for key, (passages, seconds, walk) in zip(missing, fresh):
                    rows = [passage_json(passage) for passage in passages]
                    entry = {"passages": rows, "seconds": seconds, "walk": walk._asdict()}
                    packed[key] = json.dumps(entry).encode()
                self._cache.set_many(packed, self._ttl)
        entries = [results[key] for key in keys]
        copies = (list(passages) for passages, _, _ in entries)
        return TimedResults(copies, (seconds for _, seconds, _ in entries), (walk for _, _, walk in entries))

    def _digest(self, *about: Any) -> str:
        parts = json.dumps([self._bases[0], self._size, self._mode, *about])
        return f"kb:{hashlib.sha256(parts.encode('utf-8', 'surrogatepass')).hexdigest()}"

    def _cached(self, keys: list[str]) -> dict[str, _QueryResult]:
        if self._cache is None:
            return {}
        results = {}
        for key, packed in self._cache.get_many(keys).items():
            try:
                entry = parse_json(packed)
                passages = [passage_of(fields) for fields in entry["passages"]]
                results[key] = passages, float(entry["seconds"]), Walk.from_json(entry.get("walk", {}))
            except (ValueError, TypeError, KeyError):  # not an entry of this client; ask the server
                continue
        return results

    def _ask(self, queries: list[Query], k: int) -> list[_QueryResult]:
        chunks = [queries[start : start + self._batch] for start in range(0, len(queries), self._batch)]
        for chunk in chunks:
            seconds, n = seconds_left(self._timeouts.total), len(chunk)
            if self._limiter is not None and not self._limiter.acquire(f"kb:{self.name}", n, timeout=seconds):
                raise Unavailable(f"{self.name}: no permit for {n} queries within {seconds:.3g} s (rate limit)")
        beside = ({} if self._pictured else {"images": False}) | ({} if self._mode is None else {"mode": self._mode})
        bodies = [("/v1/search", {"queries": list(map(_query_json, chunk)), "k": k, **beside}) for chunk in chunks]
        replies = shared_loop().run(gather_bounded(self._send, bodies, self._concurrency))
        return [
            result
            for chunk, (reply, seconds) in zip(chunks, replies)
            for result in self._results(reply, len(chunk), k, seconds / len(chunk))
        ]

    async def _send(self, request: tuple[str, dict[str, Any]]) -> tuple[Any, float]:
        """The reply to a request (path, body), and its seconds."""
        started = time.perf_counter()
        reply = await self._connection.request("POST", *request)
        return reply, time.perf_counter() - started

    def _results(self, reply: Any, count: int, k: int, part: float) -> list[_QueryResult]:
        """Passages, seconds and walk of each query. `part`: seconds per query if the server gives none."""
        try:
            results = self._documents(reply["results"], k)
            walks = [Walk.from_json(fields) for fields in reply.get("walks", ())]
            timed = TimedResults(results, reply.get("query_seconds") or [part] * len(results), walks)
        except (KeyError, TypeError, ValueError) as error:
            raise Unavailable(f"{self._bases[0]}: a reply in another form than /v1/search gives ({error})") from error
        if len(results) != count:
            raise Unavailable(f"{self._bases[0]}: {len(results)} results for {count} queries")
        return list(zip(timed, timed.seconds, timed.walks))


_PICTURES = 8  # pictures per request; a page may have several megabytes
_QueryResult = tuple[list[Passage], float, Walk]  # passages of a query, its seconds, and its walk over a graph


def _parse(url: str) -> tuple[str, str | None]:
    """(URL without query string, mode)."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} is not the URL of a served knowledge base: http://host:port/NAME")
    options = urllib.parse.parse_qs(parts.query, strict_parsing=bool(parts.query))
    unknown = sorted(set(options) - {"mode"})
    if unknown or parts.fragment:
        raise ValueError(f"{url}: only ?mode=.. may follow the name, not {unknown[0] if unknown else parts.fragment!r}")
    base = urllib.parse.urlunsplit((parts.scheme, parts.netloc, parts.path.rstrip("/"), "", ""))
    return base, options["mode"][-1] if "mode" in options else None


def _query_json(query: Query) -> Any:
    if isinstance(query, str):
        return query
    body = {} if query.text is None else {"text": query.text}
    if query.image is not None:
        body["image"] = image_uri(query.image)
    beside = {"question": query.question, "url": query.url}
    return body | {key: value for key, value in beside.items() if value}


_PATH = "/retrieve"


class RetrieveKB(_RemoteKB):
    """Passages behind `POST /retrieve {queries, topk, return_scores}`. Safe to use from several threads.

    Args:
      urls: `http://host:port/retrieve`, of one server or of several equal ones.
      token: default: ROUTERL_KB_TOKEN in the environment.
      timeouts, retries: time limits, and attempts per request.
      batch: queries per request; longer lists are sent in several requests, `concurrency` at a time.

    Raises:
      ValueError: a URL has another form.
      Unavailable: while searching: no server answered in this protocol.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        token: str | None = None,
        timeouts: Timeouts | None = None,
        retries: Retries | None = None,
        batch: int = 256,
        concurrency: int = 4,
    ) -> None:
        addresses = [urls] if isinstance(urls, str) else list(urls)
        for url in addresses:
            if not url.startswith(("http://", "https://")) or not url.rstrip("/").endswith(_PATH):
                raise ValueError(f"{url!r} is no address of Search-R1's protocol: http://host:port{_PATH}")
        if not addresses or batch < 1 or concurrency < 1:
            raise ValueError(f"RetrieveKB needs a URL, batch={batch} and concurrency={concurrency} of at least 1")
        self.name = addresses[0]
        self._batch, self._concurrency = batch, concurrency
        super().__init__(addresses, token, timeouts, retries)
        self._documents = Documents(self.name, self._counts, lambda item, rank: document_passage(item))

    def __len__(self) -> int:
        raise TypeError(f"{self.name}: the protocol does not tell how many passages there are")

    def _search(self, queries: list[Any], k: int) -> list[list[Passage]]:
        parts = [queries[i : i + self._batch] for i in range(0, len(queries), self._batch)]

        async def ask(queries: list[str]) -> Any:
            body = {"queries": queries, "topk": k, "return_scores": True}
            return await self._connection.request("POST", "", body)

        def results(reply: Any, count: int) -> list[list[Passage]]:
            try:
                read = self._documents(reply["result"], k)
            except (KeyError, TypeError, ValueError) as error:
                raise Unavailable(
                    f"{self.name}: a reply in another form than Search-R1's protocol ({error!r})"
                ) from error
            if len(read) != count:
                raise Unavailable(f"{self.name}: {len(read)} results for {count} queries")
            return read

        self._counts.add("server", asked=len(queries))
        try:
            replies = shared_loop().run(gather_bounded(ask, parts, self._concurrency))
            return [result for reply, part in zip(replies, parts) for result in results(reply, len(part))]
        except Exception:
            self._counts.add("server", failures=len(queries))
            raise
