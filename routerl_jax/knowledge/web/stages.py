"""The stages of a web query: searches, pages, thumbnails and summaries. Each result is requested once, and kept in snapshot and
cache."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from routerl_jax.knowledge.base import StageCounts
from routerl_jax.knowledge.web.config import ReaderConfig, SearchConfig, WebConfig
from routerl_jax.knowledge.web.reading import Fetcher, JinaReader, LocalReader, Page, Reader, networks
from routerl_jax.knowledge.web.search import SEARCH_ENGINES, Hit, SearchEngine, WebError
from routerl_jax.knowledge.web.snapshot import NotRecorded, Record, Snapshot
from routerl_jax.knowledge.web.summary import PROMPT_VERSION, Summariser, Summary
from routerl_jax.services.base import ChatModel
from routerl_jax.services.cache import LayeredCache, cache_key, open_cache
from routerl_jax.services.http import HttpClient, secret
from routerl_jax.services.limits import acquire_async, open_limiter
from routerl_jax.services.load import chat_model

_TABLES = {
    "search": "searches",
    "page": "pages",
    "picture": "pages",
    "summary": "summaries",
}  # tables of a snapshot, by stage


class Stages:
    """The requests of a web knowledge base to services. For coroutines of the shared background loop.

    A result comes from the snapshot, else from the cache, else from the service, and is then kept in both. Failures are kept
    only in the snapshot. Equal requests at the same time are joined to one, which continues even if its callers give up.

    Args:
      model: writes summaries, instead of the configured model.

    Raises:
      ValueError: an environment variable is not set, the snapshot does not fit, or the engine is unknown.
      ImportError: a package is missing (a replay needs none).
    """

    def __init__(self, config: WebConfig, model: ChatModel | None = None) -> None:
        self._config = config
        self._made_with = made_with(config, model)
        self._flights: dict[str, asyncio.Task[Any]] = {}
        self.counts = StageCounts(*_counted(config), uncached=("upload",) if config.mode == "image" else ())
        self.snapshot: Snapshot | None = None
        if config.snapshot.directory:
            self.snapshot = Snapshot(config.snapshot.directory, config.snapshot.mode, self._made_with)
        self._cache: LayeredCache | None = None
        self._live: _Live | None = None
        if self.snapshot is None or self.snapshot.mode != "replay":
            redis = secret(config.cache.redis_env)
            self._live = _Live(config, model, redis)
            self._cache = open_cache(config.cache.path if config.cache.disk else None, redis)

    async def hits(self, query: str, target: Callable[[], Awaitable[str]]) -> list[Hit]:
        """The search engine's results for a query. `target` returns the query for the engine. Raises WebError."""
        kind, count = self._config.mode, self._config.search.candidates

        async def ask() -> Any:
            hits = await self.live.engine.search(await target(), count, kind)
            return [dataclasses.asdict(hit) for hit in hits]

        key = self._key("search", kind, count, query)
        rows = await self._cached("search", key, query, self._config.cache.search_seconds, ask)
        return [Hit(**row) for row in rows]

    async def page(self, url: str) -> Page:
        """A page from the reader. Raises WebError."""

        async def ask() -> Any:
            return dataclasses.asdict(await self.live.reader.read(url))

        key = self._key("reader", "page", url)
        return Page(**await self._cached("page", key, url, self._config.cache.page_seconds, ask))

    async def picture(self, url: str) -> str:
        """A thumbnail as a data URI. Raises WebError, also if it is no picture."""

        async def ask() -> Any:
            if url.startswith("data:"):
                return await asyncio.to_thread(_checked_picture, url)
            kind, content = await self.live.fetcher.picture(url)
            uri = f"data:{kind};base64,{base64.b64encode(content).decode()}"
            return await asyncio.to_thread(_checked_picture, uri)

        key = cache_key("picture", url)
        return await self._cached("picture", key, url[:2000], self._config.cache.page_seconds, ask)

    async def summary(self, query: str, page: Page) -> Summary:
        """A page's summary for a query. Errors of the summariser are never raised."""

        async def ask() -> Any:
            return dataclasses.asdict(await self.live.summariser.summarise(query, page))

        key = self._key("summary", query, page.url, page.title, page.text)
        about = f"{query} | {page.url}"
        record = await self._cached(
            "summary", key, about, self._config.cache.summary_seconds, ask, keep=lambda value: not value["problem"]
        )
        if record["problem"]:
            self.counts.add("summary", failures=1)
        return Summary(**record)

    async def upload(self, content: bytes, name: str) -> str:
        """Uploads a picture so that the search engine can see it. Returns its URL. Raises WebError."""
        self.counts.add("upload", asked=1)
        try:
            return await self.live.upload(content, name)
        except WebError:
            self.counts.add("upload", failures=1)
            raise

    def recorded(self, table: str, key: str, about: str) -> Record | None:
        """The snapshot's entry; None if there is none, or no snapshot. Raises NotRecorded for a missing entry in a replay."""
        if self.snapshot is None:
            return None
        try:
            record = self.snapshot.get(table, key, about)
        except NotRecorded:
            self.counts.add("snapshot", asked=1, failures=1)
            raise
        self.counts.add("snapshot", asked=1, hits=record is not None)
        return record

    async def close(self) -> None:
        """Cancels running work, and closes connections and files."""
        for task in list(self._flights.values()):
            task.cancel()
        await asyncio.gather(*self._flights.values(), return_exceptions=True)
        if self._live is not None:
            await self._live.close()
        if self._cache is not None:
            self._cache.close()
        if self.snapshot is not None:
            self.snapshot.close()

    @property
    def live(self) -> _Live:
        """The services. A replay never needs them."""
        assert self._live is not None
        return self._live

    def _key(self, stage: str, *parts: Any) -> str:
        return cache_key("web", stage, self._made_with[stage], *parts)

    async def _cached(
        self,
        stage: str,
        key: str,
        about: str,
        ttl: float,
        ask: Callable[[], Awaitable[Any]],
        keep: Callable[[Any], bool] = lambda value: True,
    ) -> Any:
        if self.under_way(key):
            self.counts.add(stage, asked=1, hits=1)
        try:
            return await self.once(key, lambda: self._look_up(stage, key, about, ttl, ask, keep))
        except WebError:
            self.counts.add(stage, failures=1)
            raise

    def under_way(self, key: str) -> bool:
        """Whether a request with this key is already running."""
        return key in self._flights

    async def once(self, key: str, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """The result of the running work with this key; starts it if there is none."""
        task = self._flights.get(key)
        if task is None:
            task = asyncio.ensure_future(work())
            self._flights[key] = task
            task.add_done_callback(lambda finished: self._finish(key, finished))
        return await asyncio.shield(task)

    def _finish(self, key: str, task: asyncio.Task[Any]) -> None:
        self._flights.pop(key, None)
        if not task.cancelled():
            task.exception()  # marks it as retrieved, because its callers may have given up

    async def _look_up(self, stage: str, key: str, about: str, ttl: float, ask: Any, keep: Any) -> Any:
        table = _TABLES[stage]
        try:
            record = self.recorded(table, key, about)
        except NotRecorded:
            self.counts.add(stage, asked=1)
            raise
        if record is not None:
            self.counts.add(stage, asked=1, hits=1)
            return _value(record)
        value = None
        if self._cache is not None:
            cached = await self._on_thread(self._cache.get, key)
            value = None if cached is None else json.loads(cached)
        self.counts.add(stage, asked=1, hits=value is not None)
        if value is None:
            try:
                value = await ask()
            except WebError as error:
                if self.snapshot is None:
                    raise
                return _value(self.snapshot.put(table, key, about, Record(error=str(error))))
            if self._cache is not None and keep(value):
                await self._on_thread(self._cache.set, key, json.dumps(value).encode(), ttl)
        return value if self.snapshot is None else _value(self.snapshot.put(table, key, about, Record(value)))

    async def _on_thread(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Runs work of the cache on a thread, unless the cache is only in memory."""
        assert self._cache is not None
        return await asyncio.to_thread(work, *arguments) if len(self._cache.layers) > 1 else work(*arguments)


class _Live:
    """The configured services."""

    def __init__(self, config: WebConfig, model: ChatModel | None, redis: str) -> None:
        self._config = config
        self.engine = _engine(config.search, redis)
        self.fetcher = Fetcher(config.reader)
        reads = config.mode == "text" and config.snippets != "only"
        self.reader: Reader = _reader(config.reader, self.fetcher, redis) if reads else _NoReader()
        summary = config.summary
        self._own_model: Any = None
        if model is None and reads and summary.kind == "model":
            model = self._own_model = chat_model(summary.model)
        self.summariser = Summariser(model if summary.kind == "model" else None, summary)
        authorization = secret(config.upload.authorization_env)
        self._upload = HttpClient(timeout=config.search.timeout, secret=authorization)
        self._upload_headers = {"Authorization": authorization} if authorization else {}

    async def upload(self, content: bytes, name: str) -> str:
        upload = self._config.upload
        if not upload.url:
            raise WebError(
                "the search engine sees pictures by their URL: give http(s) URLs, or set upload.url to a place that takes PUT"
            )
        headers = {"Content-Type": "image/jpeg", **self._upload_headers}
        try:
            await self._upload.request("PUT", f"{upload.url.rstrip('/')}/{name}", headers=headers, body=content)
        except Exception as error:
            raise WebError(f"the picture could not be uploaded: {error}") from error
        return f"{(upload.public_url or upload.url).rstrip('/')}/{name}"

    async def close(self) -> None:
        await self.engine.close()
        await self.reader.close()
        await self.fetcher.close()
        await self._upload.close()
        self.summariser.close()
        if hasattr(self._own_model, "close"):
            await asyncio.to_thread(self._own_model.close)


class _NoReader:
    name = "none"

    async def read(self, url: str) -> Page:
        raise WebError(f"{url}: this knowledge base reads no pages")

    async def close(self) -> None:
        return


def _counted(config: WebConfig) -> list[str]:
    """The stages of a knowledge base that keep their answers."""
    reading = ["picture"] if config.mode == "image" else [] if config.snippets == "only" else ["page", "summary"]
    return ["query", "search", *reading, *(["snapshot"] if config.snapshot.directory else [])]


def made_with(config: WebConfig, model: ChatModel | None = None) -> dict[str, dict[str, Any]]:
    """The settings on which the results of each stage depend. They are part of cache keys and of a snapshot's manifest."""
    search, reader, summary = config.search, config.reader, config.summary
    writer: dict[str, Any] = {
        "kind": summary.kind,
        "extract_chars": summary.extract_chars,
        "sentences": summary.sentences,
    }
    if summary.kind == "model":
        writer |= {
            "model": model.name if model is not None else summary.model.model,
            "extra": dict(summary.model.extra if model is None else model.settings),
            "prompt": PROMPT_VERSION,
            "max_chars": summary.max_chars,
            "max_tokens": summary.max_tokens,
        }
        # only where they are not the defaults: what was kept before there was a choice stays good
        writer |= {
            key: value
            for key, usual in (("instruction", "relevant"), ("about", "query"))
            if (value := getattr(summary, key)) != usual
        }
    return {
        "search": {"engine": search.engine, "country": search.country, "language": search.language},
        "reader": {"kind": reader.kind, "max_chars": reader.max_chars},
        "summary": writer,
    }


def _engine(config: SearchConfig, redis: str) -> SearchEngine:
    key, http = _service(config, redis, f"search:{config.engine}:{config.url}")
    engine_class = SEARCH_ENGINES.get(config.engine)
    return engine_class(http, key, config.url, country=config.country, language=config.language)


def _reader(config: ReaderConfig, fetcher: Fetcher, redis: str) -> Reader:
    if config.kind == "local":
        return LocalReader(fetcher, max_chars=config.max_chars)
    key, http = _service(config, redis, f"reader:jina:{config.url}")
    return JinaReader(http, key, config.url, max_chars=config.max_chars, allowed=networks(config.allow_networks))


def _service(config: SearchConfig | ReaderConfig, redis: str, name: str) -> tuple[str, HttpClient]:
    """A service's API key, and a client with its limits."""
    key = secret(config.api_key_env)
    limiter = open_limiter(config.rate, redis=redis) if config.rate else None
    turn = None if limiter is None else lambda: acquire_async(limiter, name)
    client = HttpClient(
        timeout=config.timeout, retries=config.retries, concurrency=config.concurrency, secret=key, turn=turn
    )
    return key, client


def _value(record: Record) -> Any:
    if record.error is not None:
        raise WebError(record.error)
    return record.value


def _checked_picture(uri: str) -> str:
    from routerl_jax.models.images import decode_image

    try:
        decode_image(uri, name="thumbnail")
    except ValueError as error:
        raise WebError(str(error)) from error
    return uri
