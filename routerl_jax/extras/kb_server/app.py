"""The ASGI application that serves knowledge bases: our own schema, other projects' endpoints, health and metrics.

Every knowledge base is served under its name, `/NAME/v1/search`; the first one also at the root, `/v1/search`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import pathlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

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
    Refusal,
    SameSite,
    TokenCheck,
    client_gone,
    disconnected,
    json_bytes,
    json_reply,
    raw_reply,
    read_json,
)

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

_OPEN = frozenset({"/", "/healthz", "/readyz"})  # paths that need no token


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


_RESERVED = frozenset({"v1", "healthz", "readyz", "metrics", "mcp", "retrieve", "search", "queries"})


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class ServerSettings(BatchConfig):
    """How requests are batched, and the limits of each (`limits`)."""

    limits: Limits = Limits()


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
                    self._batchers[id(kb)] = Batcher(kb, settings, observer=self.metrics.of_batches(entry.name, mode))

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
        from starlette.applications import Starlette
        from starlette.middleware import Middleware
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

    routes = [
        Route("/", functools.partial(_page, server)),
        Route("/healthz", _healthz),
        Route("/readyz", functools.partial(_readyz, server)),
        Route("/metrics", functools.partial(_metrics, server)),
        *route("/v1/search", "POST", "v1", _native),
        *route("/v1/pictures", "POST", "pictures", _pictures),
        *route("/v1/kbs", "GET", "kbs", _listing),
    ]
    for adapter in ADAPTERS:
        routes += route(adapter.path, adapter.method, adapter.name, functools.partial(_foreign, adapter))
    if mcp_app is not None:
        routes += mcp_app.routes
    same_site = Middleware(SameSite, hosts=hosts)
    middleware = [Middleware(TokenCheck, token=token, unguarded=_OPEN) if token else same_site]
    handlers = {404: _no_such_path, 405: _wrong_method}
    app = Starlette(routes=routes, lifespan=lifespan, middleware=middleware, exception_handlers=handlers)
    app.state.server = server
    return app


_Answer = Callable[[Server, Served, "Request"], Awaitable[Any]]


async def _respond(server: Server, endpoint: str, answer: _Answer, request: Request) -> Response:
    """Runs one request and counts it. Every outcome gives a reply."""
    name = request.path_params.get("kb", server.default)
    started = time.perf_counter()
    server.metrics.in_flight.inc()
    refusal: Refusal | None = None
    body = b""
    try:
        body = json_bytes(await answer(server, server.named(name), request))
    except Refusal as error:
        refusal = error
    except asyncio.CancelledError:  # by uvicorn, after its `timeout_graceful_shutdown`
        refusal = Refusal(503, "shutting_down", "the server is shutting down", {"Retry-After": "1"})
    except Exception as error:  # a bug in this server, which continues to serve
        logging.exception("request to %s failed", request.url.path)
        refusal = Refusal(500, "internal", f"{type(error).__name__}: {error}")
    finally:
        server.metrics.in_flight.dec()
    status = refusal.status if refusal else 200
    seconds = time.perf_counter() - started
    label = name if name in server.served else ""
    server.metrics.request(label, endpoint, status, seconds, refusal.kind if refusal else "")
    return json_reply(refusal.body(), status, refusal.headers) if refusal else raw_reply(body)


async def _native(server: Server, served: Served, request: Request) -> dict[str, Any]:
    started = time.perf_counter()
    search = read_request(await read_json(request, server.settings.limits.body_bytes), server.settings.limits)
    mode, kb, results = await _while_connected(server, request, server.search(served, search))
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
        return {"images": await _while_connected(server, request, asyncio.to_thread(read))}
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

    async def search_all() -> TimedResults:
        replies = await asyncio.gather(*(server.search(served, _with_mode(served, search)) for search, _ in searches))
        by_index = {
            i: result
            for (_, indices), (_, _, results) in zip(searches, replies)
            for i, result in zip(indices, zip(results, results.seconds))
        }
        in_order = [by_index[i] for i in range(len(by_index))]
        return TimedResults((passages for passages, _ in in_order), (seconds for _, seconds in in_order))

    return adapter.write(body, await _while_connected(server, request, search_all()))


def _with_mode(served: Served, search: SearchRequest) -> SearchRequest:
    if search.mode == PASSAGE and PASSAGE not in served.modes:
        return dataclasses.replace(search, mode=None)
    return search


async def _while_connected(server: Server, request: Request, work: Awaitable[Any]) -> Any:
    """The result of `work`. It is cancelled when the client disconnects or the time is up."""
    seconds = server.settings.limits.seconds
    header = request.headers.get("x-timeout-seconds")
    if header is not None:
        with contextlib.suppress(ValueError):
            seconds = min(seconds, max(float(header), 0.0))
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(disconnected(request))
    try:
        await asyncio.wait({task, gone}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if gone.done():
            raise client_gone()
        raise Refusal(504, "timeout", f"no result within {seconds:g} s")
    finally:
        task.cancel()
        gone.cancel()


async def _page(server: Server, request: Request) -> Response:
    from starlette.responses import HTMLResponse

    return HTMLResponse(await asyncio.to_thread(_PAGE.read_text, "utf-8"))


_PAGE = pathlib.Path(__file__).with_name("page.html")


async def _healthz(request: Request) -> Response:
    return json_reply({"status": "alive"})


async def _readyz(server: Server, request: Request) -> Response:
    reason = server.busy()
    return json_reply({"status": reason or "ready"}, 503 if reason else 200)


async def _metrics(server: Server, request: Request) -> Response:
    from starlette.responses import Response

    return Response(server.metrics.text(), media_type=server.metrics.content_type)


async def _no_such_path(request: Request, error: Exception) -> Response:
    message = f"there is nothing at {request.url.path}; POST /v1/search, GET /v1/kbs"
    return json_reply(Refusal(404, "unknown_path", message).body(), 404)


async def _wrong_method(request: Request, error: Exception) -> Response:
    headers = dict(getattr(error, "headers", None) or {})
    message = f"{request.url.path} does not take {request.method}; it takes {headers.get('Allow', 'another method')}"
    return json_reply(Refusal(405, "wrong_method", message).body(), 405, headers)
