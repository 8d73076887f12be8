"""The web as a knowledge base: all queries, pages and summaries of a call are processed concurrently.

Its directory has the configuration in kb.json, so that it is opened like any other.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import io
import json
import pathlib
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from absl import logging
from jax.sharding import Mesh

from routerl_jax.core.background import shared_loop
from routerl_jax.core.config import from_config_dict
from routerl_jax.core.time_limit import seconds_left
from routerl_jax.core.types import Passage, Query, TextAndImage
from routerl_jax.knowledge.base import Counts, KnowledgeBase, TimedResults, query_question, query_text, query_url
from routerl_jax.knowledge.builds import Builder, BuildReport, changes, write_settings
from routerl_jax.knowledge.encoders import TextEncoder
from routerl_jax.knowledge.store import MANIFEST, Store, nested
from routerl_jax.knowledge.web.config import SnapshotConfig, WebConfig
from routerl_jax.knowledge.web.snapshot import NotRecorded, Record, WebError
from routerl_jax.knowledge.web.stages import Hit, Stages
from routerl_jax.models.images import decode_image, image_digest, is_url
from routerl_jax.services.base import ChatModel
from routerl_jax.services.cache import MemoryCache, cache_key

# Seconds for which an answer or a failure is kept, because a failed batch is repeated query by query.
_REMEMBERED = 60.0


@dataclasses.dataclass
class _QueryState:
    """The state of a query: passages by the rank of their URL, and errors."""

    passages: dict[int, Passage] = dataclasses.field(default_factory=dict)
    problems: list[str] = dataclasses.field(default_factory=list)


class WebKB(KnowledgeBase):
    """Text search: search engine -> pages -> summaries. A passage is a page: its URL as id, its title, its summary.

    Queries are independent, and each has its own time. As soon as the URLs of a query are known, the wanted number of pages
    is read at once, and each page is summarised as soon as it is read. For each page that fails, the next URL is tried.
    After `deadline` seconds, the result is what is there. A passage's score is 1 / rank of its URL.

    A query that finds nothing because of errors raises a WebError, unless `failures="empty"`. The results of the call's other
    queries are kept, so that a repetition query by query gives each result or error at once.

    Args:
      config: the configuration.
      model: writes summaries, instead of the configured model.

    Raises:
      ValueError: an environment variable with a key is not set, or the snapshot does not fit.
    """

    reads: frozenset[str] = frozenset({"text"})

    def __init__(self, config: WebConfig, model: ChatModel | None = None) -> None:
        self.name, self.cost, self.config = config.name, config.cost, config
        self._stages = Stages(config, model)
        self._recent = MemoryCache(4096)
        if config.asks_model and config.summary.about == "question":
            # `reads` is a class attribute of other kinds; here it depends on the settings
            vars(self)["reads"] = self.reads | {"question"}
        self._about = cache_key(config.mode, config.pages, config.snippets, config.search.candidates)

    def __len__(self) -> int:
        """Number of recorded answers of the snapshot, because the pages of the web can't be counted."""
        return len(self._stages.snapshot) if self._stages.snapshot is not None else 0

    def __bool__(self) -> bool:
        return True

    def drop_failures(self) -> int:
        """Removes failures from the snapshot, so that they are tried again. Returns their number."""
        if self._stages.snapshot is None:
            raise ValueError("there is no snapshot: set snapshot.directory")
        self._recent = MemoryCache(4096)
        return self._stages.snapshot.drop_failures()

    def stage_counts(self) -> Counts:
        """Counts of queries and of the stages that answer them: search, page and summary (for pictures: search, picture and
        upload), and snapshot, whose failures are entries that a replay lacks. A request that joins a running one counts as a
        hit. A query that is repeated within a minute counts once."""
        return self._stages.counts()

    def close(self) -> None:
        """Cancels running work, and closes connections and files."""
        shared_loop().run(self._stages.close())

    def _search(self, queries: Sequence[Query], k: int) -> TimedResults:
        return shared_loop().run(self._search_all(queries, k))

    async def _search_all(self, queries: Sequence[Query], k: int) -> TimedResults:
        seconds = [0.0] * len(queries)

        async def timed(index: int) -> list[Passage]:
            started = time.perf_counter()
            try:
                return await self._answer(queries[index], k)
            finally:
                seconds[index] = time.perf_counter() - started

        outcomes = await asyncio.gather(*map(timed, range(len(queries))), return_exceptions=True)
        failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        for error in failures:
            if not isinstance(error, WebError):
                raise error
            missing = isinstance(error, NotRecorded)
            if (self.config.snapshot.missing if missing else self.config.failures) != "empty":
                if len(queries) == 1:
                    raise error
                raise WebError(f"{len(failures)} of {len(queries)} queries failed; the first: {error}") from error
        results = ([] if isinstance(outcome, BaseException) else outcome for outcome in outcomes)
        return TimedResults(results, seconds)

    async def _answer(self, query: Query, k: int) -> list[Passage]:
        """The passages of one query. Raises WebError."""
        text = await asyncio.to_thread(self._query_string, query)
        want, question = min(k, self.config.pages), query_question(query)
        key = cache_key("answer", self._about, want, text, *([question] if question else []))
        counts, cached = self._stages.counts, self._recent.get(key)
        if cached is not None:  # a repetition from a failed batch, which was counted before
            return _passages(Record(**json.loads(cached)))
        counts.add("query", asked=1, hits=self._stages.under_way(key))
        try:
            return _passages(await self._stages.once(key, lambda: self._recorded(key, query, text, want)))
        except WebError:
            counts.add("query", failures=1)
            raise

    async def _recorded(self, key: str, query: Query, query_string: str, want: int) -> Record:
        snapshot = self._stages.snapshot
        try:
            record = self._stages.recorded("answers", key, query_string)
        except NotRecorded:
            record = None  # if it was recorded with another k, its searches, pages and summaries can be used
        if record is not None:
            self._stages.counts.add("query", hits=1)
            self._remember(key, record)
            return record
        try:
            state = await self._find(query, query_string, want)
            rows = [dataclasses.asdict(state.passages[rank]) for rank in sorted(state.passages)]
            record = Record({"passages": rows, "problems": state.problems})
        except NotRecorded:
            raise
        except WebError as error:
            record = Record(error=str(error))
        if snapshot is not None:
            record = snapshot.put("answers", key, query_string, record)
        self._remember(key, record)
        return record

    def _remember(self, key: str, record: Record) -> None:
        self._recent.set(key, json.dumps(record._asdict()).encode(), _REMEMBERED)

    async def _find(self, query: Query, query_string: str, want: int) -> _QueryState:
        """Searches, and reads pages until `want` have succeeded, no results are left, or the time is up."""
        seconds = seconds_left(self.config.deadline)
        ends = time.monotonic() + seconds
        state = _QueryState()
        try:
            async with asyncio.timeout(seconds):
                hits = await self._stages.hits(query_string, lambda: self._target(query, query_string))
        except TimeoutError:
            raise WebError(f"no search results for {query_string[:100]!r} within {seconds:.3g} s") from None
        if self.config.snippets == "only" and self.config.mode == "text":
            state.passages = {rank: _snippet(rank, hit) for rank, hit in enumerate(hits[:want])}
            return state
        topic = query_question(query) or query_string
        await self._scatter(hits, want, ends, state, lambda rank, hit: self._passage(topic, rank, hit))
        if self.config.snippets == "fallback":
            for rank, hit in enumerate(hits):
                if len(state.passages) < want and rank not in state.passages and hit.snippet:
                    state.passages[rank] = _snippet(rank, hit)
        if state.problems:
            message = "web: %d of %d results of a query failed: %s"
            logging.log_first_n(logging.INFO, message, 20, len(state.problems), len(hits), state.problems[0])
        if hits and not state.passages:
            raise WebError(
                f"none of {len(hits)} results for {query_string[:100]!r} could be used: {'; '.join(state.problems[:3])}"
            )
        return state

    async def _scatter(
        self,
        hits: list[Hit],
        want: int,
        ends: float,
        state: _QueryState,
        work: Callable[[int, Hit], Awaitable[Passage]],
    ) -> None:
        """Works on as many results at once as are still wanted. After a failure, the next one starts."""
        waiting = collections.deque(enumerate(hits))
        running: dict[asyncio.Future[Passage], int] = {}
        try:
            while len(state.passages) < want and (waiting or running):
                while waiting and len(running) + len(state.passages) < want:
                    rank, hit = waiting.popleft()
                    task = asyncio.ensure_future(work(rank, hit))
                    task.add_done_callback(_retrieve_exception)
                    running[task] = rank
                done, _ = await asyncio.wait(
                    running, timeout=max(0.0, ends - time.monotonic()), return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    state.problems.append(f"{len(running)} pages were not done in time")
                    return
                for task in sorted(done, key=running.__getitem__):
                    rank = running.pop(task)
                    try:
                        state.passages[rank] = task.result()
                    except NotRecorded:
                        raise
                    except WebError as error:
                        state.problems.append(str(error))
        finally:
            for task in running:
                task.cancel()

    async def _passage(self, topic: str, rank: int, hit: Hit) -> Passage:
        page = await self._stages.page(hit.url)
        summary = await self._stages.summary(topic, page)
        return Passage(id=hit.url, title=page.title or hit.title, text=summary.text, score=1 / (rank + 1))

    def _query_string(self, query: Query) -> str:
        """The query as one string."""
        return query_text(query)

    async def _target(self, query: Query, query_string: str) -> str:
        """The query for the search engine."""
        return query_string


class WebImageKB(WebKB):
    """Reverse image search: pages that show the picture, as (thumbnail, title) pairs. Queries are pictures.

    If the picture's URL is known (given as `url` or as the picture itself), it is used for the search. Any other picture is
    first uploaded as `config.upload` says.
    """

    reads: frozenset[str] = frozenset({"image", "url"})

    def _query_string(self, query: Query) -> str:
        if url := query_url(query):
            return url
        picture = query.image if isinstance(query, TextAndImage) else None
        if isinstance(picture, str) and is_url(picture):
            return picture
        try:
            return f"sha256:{image_digest(picture)}"  # type: ignore[arg-type]
        except ValueError as error:
            name = f"{picture!r}: " if isinstance(picture, str) else ""
            raise WebError(f"{name[:200]}{error}") from error

    async def _target(self, query: Query, query_string: str) -> str:
        if not query_string.startswith("sha256:"):
            return query_string
        assert isinstance(query, TextAndImage)
        content = await asyncio.to_thread(_jpeg, query.image)
        return await self._stages.upload(content, f"{query_string.removeprefix('sha256:')}.jpg")

    async def _passage(self, topic: str, rank: int, hit: Hit) -> Passage:
        if not hit.thumbnail or not hit.title:
            raise WebError(f"{hit.url}: a result without thumbnail or title")
        picture = await self._stages.picture(hit.thumbnail)
        return Passage(id=hit.url, title=hit.title, text=hit.snippet, score=1 / (rank + 1), image=picture)


def web_kb(config: WebConfig, model: ChatModel | None = None) -> WebKB:
    """The web knowledge base that a configuration describes."""
    return (WebImageKB if config.mode == "image" else WebKB)(config, model)


def _passages(record: Record) -> list[Passage]:
    return [Passage(**row) for row in record.result()["passages"]]


def _retrieve_exception(task: asyncio.Future[Passage]) -> None:
    """Marks an exception as retrieved, because nobody may be waiting for it."""
    if not task.cancelled():
        task.exception()


def _snippet(rank: int, hit: Hit) -> Passage:
    return Passage(id=hit.url, title=hit.title, text=hit.snippet, score=1 / (rank + 1))


def _jpeg(picture: Any) -> bytes:
    try:
        image = decode_image(picture)
    except ValueError as error:
        raise WebError(str(error)) from error
    out = io.BytesIO()
    image.save(out, "JPEG", quality=92)
    return out.getvalue()


def build_web(config: WebConfig, directory: str | pathlib.Path, *, progress: bool = True) -> BuildReport:
    """Writes a directory that `load_kb` opens as this web knowledge base. It contains no API keys.

    Raises:
      ValueError: the directory has other content than a web knowledge base.
    """
    settings = {key: value for key, value in changes(config).items() if key != "kind"}
    manifest = write_settings(config, directory, settings, overwrite=True)
    notes = {"not defaults": ", ".join(f"{key}={value!r}" for key, value in settings.items()) or "none"}
    return BuildReport(name=manifest.name, kind="web", directory=str(directory), notes=notes)


def open_web(
    store: Store,
    *,
    mesh: Mesh | None = None,
    index: str | None = None,
    encoder: str | TextEncoder | None = None,
    snapshot: SnapshotConfig | None = None,
) -> WebKB:
    """Opens a directory of `build_web`. API keys are read from their environment variables.

    Args:
      snapshot: its directory and mode replace those of kb.json.

    Raises:
      ValueError: kb.json has an unknown key, a variable is not set, or an index or encoder is given, which the web does not
        have.
    """
    if index is not None or encoder is not None:
        raise ValueError(f"{store.directory}: a web knowledge base has neither index nor encoder")
    settings = nested(store.manifest.settings)
    config = from_config_dict(WebConfig, settings, path=f"{store.directory / MANIFEST}: settings")
    if snapshot is not None:
        frozen = dataclasses.replace(config.snapshot, directory=snapshot.directory, mode=snapshot.mode)
        config = dataclasses.replace(config, snapshot=frozen)
    return web_kb(config)


BUILDER = Builder(WebConfig, build_web)
