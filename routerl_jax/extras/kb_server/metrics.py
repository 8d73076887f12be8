"""Counters of a server, for Prometheus."""

from __future__ import annotations

from typing import Any

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
        """The observer of one batcher."""
        return BatchMetrics(
            self._batches.labels(kb, mode), self._searches.labels(kb, mode), self._queue.labels(kb, mode)
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


class BatchMetrics:
    """Counters for the reports of `batching.Batcher`."""

    def __init__(self, sizes: Any, seconds: Any, queue: Any) -> None:
        self._sizes, self._seconds, self._queue = sizes, seconds, queue

    def batch(self, queries: int, seconds: float) -> None:
        """Counts a call of the knowledge base."""
        self._sizes.observe(queries)
        self._seconds.observe(seconds)

    def queue(self, queries: int) -> None:
        """Sets the number of waiting queries."""
        self._queue.set(queries)
