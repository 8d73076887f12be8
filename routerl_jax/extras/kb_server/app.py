"""The server of knowledge bases (`launch.serve_kb`): our own schema, other projects' endpoints, health and metrics; its
configuration.

Every knowledge base is served under its name, `/NAME/v1/search`; the first one also at the root, `/v1/search`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import os
import pathlib
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from absl import logging

from routerl_jax.core.config import checked
from routerl_jax.core.packages import needs
from routerl_jax.extras.kb_server.adapters import ADAPTERS, PASSAGE, Adapter
from routerl_jax.extras.kb_server.batching import BatchConfig, Batcher, Metrics
from routerl_jax.extras.kb_server.requests import (
    Limits,
    SearchRequest,
    invalid,
    read_pictures,
    read_request,
    reply_json,
)
from routerl_jax.knowledge.base import KnowledgeBase, TimedResults
from routerl_jax.knowledge.cassette import Searchable
from routerl_jax.knowledge.client.schema import portable_image
from routerl_jax.services.asgi import (
    LOOPBACK,
    Address,
    Refusal,
    application,
    bound_hosts,
    json_reply,
    read_json,
    read_token,
    refusing,
    run_server,
    while_connected,
)

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

_PAGE = pathlib.Path(__file__).with_name("page.html")
_RESERVED = frozenset({"v1", "healthz", "readyz", "metrics", "mcp", "retrieve", "search", "queries"})
_WARM_WORDS = (6, 20, 36, 52)  # lengths of queries for which encoders are compiled at the start


@dataclasses.dataclass(frozen=True)
class Served:
    """A knowledge base with a name, in one or more modes. The first mode is the default.

    `Served("wiki", {"passage": dense, "graph": graph, "hybrid": fused})`, or `Served("wiki", {"default": kb})`.
    """

    name: str
    modes: Mapping[str, Searchable]

    def __post_init__(self) -> None:
        if not self.name or not all(c.isalnum() or c in "-_." for c in self.name) or self.name in _RESERVED:
            raise ValueError(
                f"a served knowledge base can't be called {self.name!r}: letters, digits, - _ . and none of "
                f"{', '.join(sorted(_RESERVED))}"
            )
        if not self.modes:
            raise ValueError(f"knowledge base {self.name!r} has no modes")

    def mode(self, name: str | None) -> tuple[str, Searchable]:
        """The mode of this name, or the default. Raises Refusal 400 if there is none."""
        name = name or next(iter(self.modes))
        if name not in self.modes:
            raise Refusal(400, "unknown_mode", f"{self.name!r} has no mode {name!r}; it has: {', '.join(self.modes)}")
        return name, self.modes[name]

    def describe(self) -> dict[str, Any]:
        """The description for `/v1/kbs`."""
        modes = {}
        for mode, kb in self.modes.items():
            try:
                size = len(kb)  # type: ignore[arg-type]
            except (TypeError, NotImplementedError):
                size = None  # the web
            reads = sorted(getattr(kb, "reads", {"text"}))
            modes[mode] = {
                "size": size,
                "cost": float(getattr(kb, "cost", 1.0)),
                "reads": reads,
                "pictures": _has_pictures(kb),
            }
        default = next(iter(self.modes))
        return {"name": self.name, "default_mode": default, **modes[default], "modes": modes}


def _has_pictures(kb: Searchable) -> bool:
    return bool(getattr(kb, "has_pictures", False))


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class ServerSettings(BatchConfig):
    """How requests are batched, and the limits of each (`limits`)."""

    limits: Limits = Limits()


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class ServeConfig(ServerSettings, Address):
    """Configuration of a server. Further settings are those of `ServerSettings`, `BatchConfig`, `Address` and `Limits`.

    Attributes:
      knowledge_bases: NAME or NAME:MODE -> directory (or URL, which makes this server a gateway). The first name is also
        served at the root; the first mode of a name is its default.
      mcp: "http" also offers the knowledge bases as MCP tools at /mcp; "stdio" offers only these, on standard input and
        output, without HTTP.
      warm_up: make a few searches at the start, so that no client waits for compilation.
      index: search with this backend instead of those of the builds. Knowledge bases without an index (bm25, graph, served
        ones) are not affected.
    """

    knowledge_bases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    mcp: Literal["off", "http", "stdio"] = "off"
    warm_up: bool = True
    index: str | None = None


class Server:
    """The state of the application: knowledge bases, their batchers, counters."""

    def __init__(self, served: Sequence[Served], settings: ServerSettings) -> None:
        if not served:
            raise ValueError("there is no knowledge base to serve")
        self.served = {entry.name: entry for entry in served}
        if len(self.served) < len(served):
            raise ValueError("two served knowledge bases have the same name")
        self.default = served[0].name
        self.settings = settings
        self.metrics = Metrics()
        self.closing = False
        self._batchers: dict[int, Batcher] = {}  # one per knowledge base, even if it has several names
        for entry in served:
            for mode, kb in entry.modes.items():
                if id(kb) not in self._batchers:
                    self._batchers[id(kb)] = Batcher(kb, settings, metrics=self.metrics.of_batches(entry.name, mode))

    def named(self, name: str) -> Served:
        """The knowledge base of this name. Raises Refusal 404 if there is none."""
        if name in _RESERVED:
            raise Refusal(405, "wrong_method", "this path does not take that method; POST /v1/search, GET /v1/kbs")
        if name not in self.served:
            names = ", ".join(self.served)
            raise Refusal(404, "unknown_kb", f"there is no knowledge base {name!r} here; there are: {names}")
        return self.served[name]

    async def search(self, served: Served, request: SearchRequest) -> tuple[str, Searchable, TimedResults]:
        """The mode that was searched, its knowledge base, and the results. Raises Refusal."""
        mode, kb = served.mode(request.mode)
        try:
            return mode, kb, await self._batchers[id(kb)].search(request.queries, request.k)
        except Refusal:
            raise
        except ValueError as error:
            raise invalid(str(error)) from error
        except Exception as error:
            raise Refusal(500, "search_failed", f"{type(error).__name__}: {error}") from error

    def busy(self) -> str:
        """Why no further request should be sent to this server; "" if it is ready."""
        if self.closing:
            return "the server is shutting down"
        waiting = max(batcher.waiting for batcher in self._batchers.values())
        return f"{waiting} queries are waiting" if waiting >= self.settings.max_queue else ""

    @property
    def searching(self) -> bool:
        """Whether a knowledge base is being searched, even for a client that has disconnected."""
        return any(batcher.searching for batcher in self._batchers.values())

    async def close(self) -> None:
        """Finishes waiting requests."""
        self.closing = True
        await asyncio.gather(*(batcher.close() for batcher in self._batchers.values()))


def create_app(
    served: Sequence[Served],
    settings: ServerSettings | None = None,
    *,
    token: str = "",
    hosts: Collection[str] = LOOPBACK,
    mcp: Callable[[Server], Starlette] | None = None,
) -> Starlette:
    """The application.

    Args:
      token: required of every client. With "", for none, pages of other sites are refused (`services.asgi.SameSite`).
      hosts: names under which the server may be asked without a token; "*" for any.
      mcp: makes the application of an MCP server, whose routes and lifespan are included (`kb_server.mcp.http_app`).
    """
    with needs("serving", "serve"):
        from starlette.responses import FileResponse, Response
        from starlette.routing import Route
    server = Server(served, settings or ServerSettings())
    mcp_app = mcp(server) if mcp is not None else None

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            if mcp_app is not None:
                await stack.enter_async_context(mcp_app.router.lifespan_context(mcp_app))
            try:
                yield
            finally:
                await server.close()

    def route(path: str, method: str, name: str, answer: _Answer) -> list[Route]:
        endpoint = functools.partial(_respond, server, name, answer)
        return [Route(path, endpoint, methods=[method]), Route(f"/{{kb}}{path}", endpoint, methods=[method])]

    def metrics(request: Request) -> Response:
        return Response(server.metrics.text(), media_type=server.metrics.content_type)

    routes = [
        Route("/", lambda _: FileResponse(_PAGE)),
        Route("/metrics", metrics),
        *route("/v1/search", "POST", "v1", _native),
        *route("/v1/pictures", "POST", "pictures", _pictures),
        *route("/v1/kbs", "GET", "kbs", _listing),
    ]
    for adapter in ADAPTERS:
        routes += route(adapter.path, adapter.method, adapter.name, functools.partial(_foreign, adapter))
    routes += [] if mcp_app is None else mcp_app.routes
    hint = "POST /v1/search, GET /v1/kbs"
    app = application(routes, lifespan, token=token, hosts=hosts, busy=server.busy, hint=hint)
    app.state.server = server
    return app


_Answer = Callable[[Server, Served, "Request"], Awaitable[Any]]


async def _respond(server: Server, endpoint: str, answer: _Answer, request: Request) -> Response:
    """Answers one request and counts it. Raises Refusal, whatever goes wrong."""
    name = request.path_params.get("kb", server.default)
    started = time.perf_counter()
    server.metrics.in_flight.inc()
    status, error = 200, ""
    try:
        with refusing(request):
            return json_reply(await answer(server, server.named(name), request))
    except Refusal as refusal:
        status, error = refusal.status, refusal.kind
        raise
    finally:
        server.metrics.in_flight.dec()
        label = name if name in server.served else ""
        server.metrics.request(label, endpoint, status, time.perf_counter() - started, error)


async def _native(server: Server, served: Served, request: Request) -> dict[str, Any]:
    started = time.perf_counter()
    search = read_request(await read_json(request, server.settings.limits.body_bytes), server.settings.limits)
    mode, kb, results = await _in_time(server, request, server.search(served, search))
    write = functools.partial(
        reply_json,
        results,
        seconds=time.perf_counter() - started,
        cost=float(getattr(kb, "cost", 1.0)) * len(search.queries),
        mode=mode,
        images=search.images,
    )
    files = search.images and any(passage.image for passages in results for passage in passages)
    return await asyncio.to_thread(write) if files else write()


async def _pictures(server: Server, served: Served, request: Request) -> dict[str, Any]:
    pictures_request = read_pictures(
        await read_json(request, server.settings.limits.body_bytes), server.settings.limits
    )
    mode, kb = served.mode(pictures_request.mode)
    if not isinstance(kb, KnowledgeBase) or not _has_pictures(kb):
        raise invalid(f"mode {mode!r} of {served.name!r} gives no pictures by ids; its searches bring them")

    def read() -> list[str]:
        return [portable_image(image) for image in kb.pictures(pictures_request.ids)]

    try:
        return {"images": await _in_time(server, request, asyncio.to_thread(read))}
    except ValueError as error:
        raise invalid(str(error)) from error


async def _listing(server: Server, served: Served, request: Request) -> dict[str, Any]:
    if "kb" in request.path_params:
        return served.describe()
    return {"kbs": [entry.describe() for entry in server.served.values()]}


async def _foreign(adapter: Adapter, server: Server, served: Served, request: Request) -> Any:
    if adapter.method == "GET":
        body: Any = {key: request.query_params.getlist(key) for key in request.query_params}
    else:
        body = await read_json(request, server.settings.limits.body_bytes)
    searches = adapter.read(body, server.settings.limits)
    if PASSAGE not in served.modes:
        searches = [
            (dataclasses.replace(search, mode=None) if search.mode == PASSAGE else search, indices)
            for search, indices in searches
        ]

    async def search_all() -> TimedResults:
        replies = await asyncio.gather(*(server.search(served, search) for search, _ in searches))
        by_index = {
            i: result
            for (_, indices), (_, _, results) in zip(searches, replies)
            for i, result in zip(indices, zip(results, results.seconds))
        }
        in_order = [by_index[i] for i in range(len(by_index))]
        return TimedResults((passages for passages, _ in in_order), (seconds for _, seconds in in_order))

    return adapter.write(body, await _in_time(server, request, search_all()))


async def _in_time(server: Server, request: Request, work: Awaitable[Any]) -> Any:
    """The result of `work`. It is cancelled when the client disconnects or the time is up."""
    seconds = server.settings.limits.seconds
    if (header := request.headers.get("x-timeout-seconds")) is not None:
        with contextlib.suppress(ValueError):
            seconds = min(seconds, max(float(header), 0.0))
    return await while_connected(work, request, seconds)


# --- a server by its configuration ---


def open_served(config: ServeConfig) -> list[Served]:
    """Opens all knowledge bases. The same directory under two names is opened once. Raises ValueError like `load_kb`."""
    from routerl_jax.knowledge.load import has_index, load_kb

    if not config.knowledge_bases:
        raise ValueError("there is nothing to serve: give --kb=NAME=DIRECTORY, or knowledge_bases in the configuration")
    sources: dict[str, dict[str, str]] = {}
    for key, source in config.knowledge_bases.items():
        name, _, mode = key.partition(":")
        modes = sources.setdefault(name, {})
        if (mode := mode or "default") in modes:
            raise ValueError(f"knowledge base {name!r} has two modes {mode!r}")
        modes[mode] = source
    opened: dict[str, KnowledgeBase] = {}
    for source in dict.fromkeys(path for modes in sources.values() for path in modes.values()):
        remote = "://" in source
        opened[source] = load_kb(source, index=config.index if config.index and has_index(source) else None)
        if config.warm_up and not remote:
            warm_up(opened[source])
    return [Served(name, {mode: opened[path] for mode, path in modes.items()}) for name, modes in sources.items()]


def warm_up(kb: KnowledgeBase) -> None:
    """Searches for texts of common lengths. Errors are ignored; clients will see them."""
    if "text" not in kb.reads:
        return
    for words in _WARM_WORDS:
        try:
            kb.search([" ".join(["warm"] * words)], 5)
        except Exception as error:
            logging.warning("knowledge base %r failed in the warm-up: %s: %s", kb.name, type(error).__name__, error)
            return


def serve(served: Sequence[Served], config: ServeConfig, mcp: Callable[[Server], Starlette] | None = None) -> None:
    """Serves until SIGTERM or SIGINT. `mcp`: as for `create_app`.

    Raises:
      ValueError: the port is taken or a package is missing.
    """
    app = create_app(served, config, token=read_token(config.token_file), hosts=bound_hosts(config.host), mcp=mcp)
    try:
        run_server(app, config, functools.partial(_greeting, served, config))
    finally:
        if app.state.server.searching:  # Python would wait for its thread at exit, perhaps forever
            print("a search that does not end is given up", file=sys.stderr, flush=True)
            os._exit(1)


def _greeting(served: Sequence[Served], config: ServeConfig, url: str) -> str:
    lines = [f"serving at {url} (a page to try it: {url}/)"]
    for entry in served:
        description = entry.describe()
        size = "" if description["size"] is None else f", {description['size']:,} passages"
        modes = f" (modes {', '.join(entry.modes)})" if len(entry.modes) > 1 else ""
        lines.append(f"  {entry.name}{modes}{size}    rj.load_kb({f'{url}/{entry.name}'!r})")
    token = ' -H "Authorization: Bearer $(cat TOKEN_FILE)"' if config.token_file else ""
    body = """'{"queries": ["Who directed Doctor Strange?"], "k": 3}'"""
    lines.append(f"  curl{token} -H 'Content-Type: application/json' -d {body} {url}/v1/search")
    lines.append(
        "  Search-R1, verl, SkyRL: /retrieve; RouteRAG: POST /search; VRAG: GET /search; R1-Searcher: /queries"
    )
    if config.mcp == "http":
        lines.append(f"  MCP: {url}/mcp")
    return "\n".join(lines)
