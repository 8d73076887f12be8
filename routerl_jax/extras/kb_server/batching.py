"""Dynamic batching: the queries that wait while a knowledge base is busy become its next call."""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import dataclasses
import math
import time
from collections.abc import Sequence
from typing import Any

from absl import logging

from routerl_jax.core.config import NonNegative, Size, checked
from routerl_jax.core.types import Passage, Query, Walk
from routerl_jax.knowledge.base import TimedResults, search_together, timed_search
from routerl_jax.knowledge.cassette import Searchable
from routerl_jax.services.asgi import Refusal


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class BatchConfig:
    """How the queries of many requests become calls of a knowledge base.

    Attributes:
      max_batch: most queries in one call; a larger request is searched in several calls.
      max_wait_ms: how long an idle knowledge base waits for further queries; 0: a single query never waits.
      max_queue: most queries that may wait per knowledge base; more are refused with 503 and Retry-After.
    """

    max_batch: Size = 128
    max_wait_ms: NonNegative = 0.0
    max_queue: Size = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchMetrics:
    """A batcher's metrics of Prometheus: queries of a call of the knowledge base, seconds of a call, queries that wait."""

    sizes: Any
    seconds: Any
    queue: Any


@dataclasses.dataclass(eq=False)
class _Request:
    queries: Sequence[Query]
    k: int
    future: asyncio.Future[TimedResults]
    results: list[list[Passage]]
    seconds: list[float]
    walks: list[Walk]
    dispatched: int = 0  # queries that are in a call already
    missing: int = 0

    @property
    def waiting(self) -> int:
        return len(self.queries) - self.dispatched


_Piece = tuple[_Request, int, int]  # a request, and a range (start, stop) of its queries


class Batcher:
    """Searches for many requests in few calls of one knowledge base, on one thread.

    If the knowledge base is idle, a request is searched at once and alone, unless `max_wait_ms` is set. Requests that arrive
    meanwhile wait in order of arrival and are searched together, up to `max_batch` queries with the same k, because the
    index may find other results with another k. So every query gets the results that it would get alone.
    """

    def __init__(
        self, kb: Searchable, config: BatchConfig | None = None, *, metrics: BatchMetrics | None = None
    ) -> None:
        self.kb, self._config, self._metrics = kb, config or BatchConfig(), metrics
        self._requests: collections.deque[_Request] = collections.deque()
        self._arrived = asyncio.Event()
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="search")
        self._worker: asyncio.Task[None] | None = None
        self._unfinished = 0  # requests without a result
        self._rate = 0.0  # queries per second of recent calls, for Retry-After
        self.waiting = 0  # number of waiting queries
        self.searching = False  # whether the thread is in a call

    async def search(self, queries: Sequence[Query], k: int) -> TimedResults:
        """The results of one request, with the time of each query alone, without its wait.

        If this is cancelled, the request's waiting queries leave the queue.

        Raises:
          Refusal: 503 if too many queries are waiting.
          Exception: an error of the knowledge base on this request's queries.
        """
        if not queries:
            return TimedResults([], [])
        if self.waiting and self.waiting + len(queries) > self._config.max_queue:
            seconds = min(60, max(1, math.ceil(self.waiting / self._rate))) if self._rate else 1
            message = f"{self.waiting} queries are waiting, {self._config.max_queue} may; try again in {seconds} s"
            raise Refusal(503, "overloaded", message, {"Retry-After": str(seconds)})
        future: asyncio.Future[TimedResults] = asyncio.get_running_loop().create_future()
        nothing = [[] for _ in queries]
        seconds, walks = [0.0] * len(queries), [Walk()] * len(queries)
        request = _Request(queries, k, future, nothing, seconds, walks, missing=len(queries))
        future.add_done_callback(lambda _: self._forget(request))
        self._requests.append(request)
        self._unfinished += 1
        self.waiting += len(queries)
        self._start().set()
        self._report_queue()
        return await future

    def _forget(self, request: _Request) -> None:
        """Removes the waiting queries of a request that has ended (its client disconnected, or a part of it failed)."""
        self._unfinished -= 1
        self.waiting -= request.waiting
        request.dispatched = len(request.queries)

    async def close(self) -> None:
        """Finishes waiting and running queries, then ends the thread."""
        while self._unfinished and self._worker is not None and not self._worker.done():
            await asyncio.sleep(0.01)
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _start(self) -> asyncio.Event:
        """The event that wakes the worker. Starts the worker on this event loop if it does not run yet."""
        loop = asyncio.get_running_loop()
        if self._worker is None or self._worker.done() or self._worker.get_loop() is not loop:
            self._arrived = asyncio.Event()
            self._worker = loop.create_task(self._work(self._arrived))
        return self._arrived

    async def _work(self, arrived: asyncio.Event) -> None:
        idle = True
        while True:
            if not self._requests:
                idle = True
                arrived.clear()
                await arrived.wait()
            if idle and self._config.max_wait_ms:
                await self._fill(arrived)
            idle = False
            pieces = self._next_batch()
            if pieces:
                await self._call(pieces)
            self._report_queue()

    async def _fill(self, arrived: asyncio.Event) -> None:
        """Waits for a full batch, at most `max_wait_ms`."""
        until = time.monotonic() + self._config.max_wait_ms / 1000
        while self.waiting < self._config.max_batch and (seconds := until - time.monotonic()) > 0:
            arrived.clear()
            try:
                await asyncio.wait_for(arrived.wait(), seconds)
            except TimeoutError:
                return

    def _next_batch(self) -> list[_Piece]:
        """The longest waiting queries that fit into one call. Drops requests whose clients have disconnected."""
        pieces: list[_Piece] = []
        room, k, waiting = self._config.max_batch, None, collections.deque()
        while self._requests:
            request = self._requests.popleft()
            if request.future.done() or not request.waiting:
                continue
            if room and k in (None, request.k):
                k = request.k
                stop = min(request.dispatched + room, len(request.queries))
                pieces.append((request, request.dispatched, stop))
                room -= stop - request.dispatched
                request.dispatched = stop
                self.waiting -= stop - pieces[-1][1]
            if request.waiting:
                waiting.append(request)
        self._requests = waiting
        return pieces

    async def _call(self, pieces: list[_Piece]) -> None:
        """Searches for these queries. A bad query harms no other request."""
        k = pieces[0][0].k
        async for number, results in search_together(
            lambda queries: self._timed(queries, k),
            [request.queries[start:stop] for request, start, stop in pieces],
            is_wanted=lambda number: not pieces[number][0].future.done(),
        ):
            request, start, stop = pieces[number]
            if isinstance(results, Exception):
                if not isinstance(results, ValueError):
                    logging.warning("a search failed: %s: %s", type(results).__name__, results)
                if not request.future.done():
                    request.future.set_exception(results)
                continue
            request.results[start:stop] = [passages for passages, _, _ in results]
            request.seconds[start:stop] = [seconds for _, seconds, _ in results]
            request.walks[start:stop] = [walk for _, _, walk in results]
            request.missing -= stop - start
            if not request.missing and not request.future.done():
                request.future.set_result(TimedResults(request.results, request.seconds, request.walks))

    async def _timed(self, queries: Sequence[Query], k: int) -> list[tuple[list[Passage], float, Walk]]:
        """Makes one call. Per query: its passages, its seconds and its walk."""
        started = time.perf_counter()
        loop = asyncio.get_running_loop()
        results, times = await loop.run_in_executor(self._thread, self._search, list(queries), k)
        seconds = time.perf_counter() - started
        rate = len(queries) / max(seconds, 1e-6)
        self._rate = 0.8 * self._rate + 0.2 * rate if self._rate else rate
        if self._metrics:
            self._metrics.sizes.observe(len(queries))
            self._metrics.seconds.observe(seconds)
        walks = results.walks if isinstance(results, TimedResults) else [Walk()] * len(queries)
        return list(zip(results, times, walks))

    def _search(self, queries: list[Query], k: int) -> tuple[list[list[Passage]], list[float]]:
        self.searching = True
        try:
            results, seconds = timed_search(self.kb.search, queries, k)
        except BaseException as error:
            if isinstance(error, Exception):
                raise
            # A Rust panic (as in tokenizers) would end the worker, and no request would get a reply.
            raise RuntimeError(f"{type(error).__name__}: {error}") from error
        finally:
            self.searching = False
        if len(results) != len(queries):
            raise RuntimeError(f"the knowledge base gave {len(results)} results for {len(queries)} queries")
        return results, seconds

    def _report_queue(self) -> None:
        if self._metrics:
            self._metrics.queue.set(self.waiting)


# --- Counters of a server, for Prometheus. ---


_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
_QUERIES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Metrics:
    """All counters of a server, in a separate registry, because a process may have several servers."""

    def __init__(self) -> None:
        import prometheus_client as prometheus

        self._write = prometheus.generate_latest
        self.content_type = prometheus.CONTENT_TYPE_LATEST
        self.registry = registry = prometheus.CollectorRegistry()
        self._requests = prometheus.Counter(
            "kb_requests", "Requests, by status of the reply.", ["kb", "endpoint", "status"], registry=registry
        )
        self._latency = prometheus.Histogram(
            "kb_request_seconds", "From request to reply.", ["kb", "endpoint"], buckets=_SECONDS, registry=registry
        )
        self._errors = prometheus.Counter("kb_errors", "Refused or failed requests.", ["kb", "type"], registry=registry)
        self._batches = prometheus.Histogram(
            "kb_batch_queries",
            "Queries per call of a knowledge base.",
            ["kb", "mode"],
            buckets=_QUERIES,
            registry=registry,
        )
        self._searches = prometheus.Histogram(
            "kb_search_seconds", "Time of such a call.", ["kb", "mode"], buckets=_SECONDS, registry=registry
        )
        self._queue = prometheus.Gauge("kb_queue_queries", "Queries that wait.", ["kb", "mode"], registry=registry)
        self.in_flight = prometheus.Gauge("kb_requests_in_flight", "Requests being answered.", registry=registry)
        self._labelled: dict[tuple[str, ...], Any] = {}

    def request(self, kb: str, endpoint: str, status: int, seconds: float, error: str = "") -> None:
        """Counts an answered request."""
        self._child(self._requests, kb, endpoint, str(status)).inc()
        self._child(self._latency, kb, endpoint).observe(seconds)
        if error:
            self._child(self._errors, kb, error).inc()

    def of_batches(self, kb: str, mode: str) -> BatchMetrics:
        """Those of one batcher."""
        return BatchMetrics(
            sizes=self._batches.labels(kb, mode),
            seconds=self._searches.labels(kb, mode),
            queue=self._queue.labels(kb, mode),
        )

    def text(self) -> bytes:
        """All counters in Prometheus' text format."""
        return self._write(self.registry)

    def _child(self, metric: Any, *labels: str) -> Any:
        """`metric.labels`, cached, because that takes a lock and makes checks."""
        key = (metric._name, *labels)
        if key not in self._labelled:
            self._labelled[key] = metric.labels(*labels)
        return self._labelled[key]
