"""The ASGI application that serves policies by the OpenAI protocol: models, chats, texts, each whole or in chunks."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from absl import logging

from routerl_jax.core.packages import needs
from routerl_jax.extras.policy_server.protocol import ApiError, error_body
from routerl_jax.services.asgi import (
    LOOPBACK,
    Refusal,
    SameSite,
    TokenCheck,
    client_gone,
    disconnected,
    json_bytes,
    json_reply,
    read_json,
)

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

_OPEN = frozenset({"/healthz", "/readyz"})  # need no token


class Reply(Protocol):
    """The reply to one request. The server always runs `chunks` to its end, and may then call `whole`."""

    @property
    def stream(self) -> bool:
        """Whether the client wants chunks."""
        ...

    def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """The JSON of each chunk of a streamed reply, as soon as it is there."""
        ...

    def whole(self) -> dict[str, Any]:
        """The JSON of a reply that is not streamed."""
        ...


class Model(Protocol):
    """A policy under a name, alone (`policy_server.policy`) or with its searches (`policy_server.answerer`)."""

    @property
    def about(self) -> Mapping[str, Any]:
        """The model's fields in the list of models, except its name."""
        ...

    def chat(self, body: Any) -> Reply:
        """The reply to a request to /v1/chat/completions. Raises ApiError."""
        ...

    def text(self, body: Any) -> Reply:
        """The reply to a request to /v1/completions. Raises ApiError."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Served:
    """The policies of a server.

    Attributes:
      models: the policies by name.
      busy: gives the reason why no further request should be sent here; "" if there is none.
      body_bytes: the most bytes that a request may have.
      close: called when the server ends.
    """

    models: Mapping[str, Model]
    busy: Callable[[], str]
    body_bytes: int
    close: Callable[[], None]
    started: int = dataclasses.field(default_factory=lambda: int(time.time()))

    def named(self, name: Any) -> Model:
        """The model of that name. Raises ApiError."""
        if not isinstance(name, str) or not name:
            raise ApiError(400, "missing_required_parameter", "model must be a string", "model")
        if name not in self.models:
            names = ", ".join(self.models)
            raise ApiError(404, "model_not_found", f"there is no model {name!r} here; there is: {names}", "model")
        return self.models[name]

    def describe(self, name: str) -> dict[str, Any]:
        """The entry of a model in /v1/models."""
        head = {"id": name, "object": "model", "created": self.started, "owned_by": "routerl_jax"}
        return {**head, **self.named(name).about}


def create_app(served: Served, *, token: str = "", hosts: Collection[str] = LOOPBACK) -> Starlette:
    """The application.

    Args:
      token: every client must give it. With "", which asks for none, pages of other sites are refused
        (`services.asgi.SameSite`).
      hosts: names under which the server may be asked without a token; "*" for any.
    """
    with needs("serving", "serve"):
        from starlette.applications import Starlette
        from starlette.middleware import Middleware
        from starlette.routing import Route

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await asyncio.to_thread(served.close)

    def route(path: str, method: str, endpoint: _Endpoint) -> Route:
        return Route(path, functools.partial(_respond, served, endpoint), methods=[method])

    routes = [
        route("/v1/models", "GET", _models),
        route("/v1/models/{model:path}", "GET", _model),
        route("/v1/chat/completions", "POST", functools.partial(_generated, "chat")),
        route("/v1/completions", "POST", functools.partial(_generated, "text")),
        route("/healthz", "GET", _healthz),
        route("/readyz", "GET", _readyz),
    ]
    same_site = Middleware(SameSite, hosts=hosts, write=error_body)
    middleware = [Middleware(TokenCheck, token=token, unguarded=_OPEN, write=error_body) if token else same_site]
    handlers = {404: _no_such_path, 405: _wrong_method}
    return Starlette(routes=routes, lifespan=lifespan, middleware=middleware, exception_handlers=handlers)


_Endpoint = Callable[[Served, "Request"], Awaitable["Response"]]


async def _respond(served: Served, endpoint: _Endpoint, request: Request) -> Response:
    """The response to a request; for a stream, its beginning. Whatever goes wrong becomes an error of the protocol."""
    try:
        return await endpoint(served, request)
    except Refusal as error:
        return _refused(error)
    except asyncio.CancelledError:  # by uvicorn, after its `timeout_graceful_shutdown`
        return _refused(ApiError(503, "shutting_down", "the server is shutting down", headers={"Retry-After": "1"}))
    except Exception as error:  # a bug here; the server goes on
        logging.exception("request to %s failed", request.url.path)
        return _refused(ApiError(500, "internal", f"{type(error).__name__}: {error}"))


async def _models(served: Served, request: Request) -> Response:
    return json_reply({"object": "list", "data": [served.describe(name) for name in served.models]})


async def _model(served: Served, request: Request) -> Response:
    return json_reply(served.describe(request.path_params["model"]))


async def _healthz(served: Served, request: Request) -> Response:
    return json_reply({"status": "alive"})


async def _readyz(served: Served, request: Request) -> Response:
    reason = served.busy()
    return json_reply({"status": reason or "ready"}, 503 if reason else 200)


async def _generated(kind: str, served: Served, request: Request) -> Response:
    from starlette.responses import StreamingResponse

    body = await read_json(request, served.body_bytes)
    model = served.named(body.get("model") if isinstance(body, dict) else None)
    reply = await asyncio.to_thread(model.chat if kind == "chat" else model.text, body)
    chunks = while_connected(reply.chunks(), request)
    if not reply.stream:
        async for _ in chunks:
            pass
        return json_reply(reply.whole())
    # The first chunk shows that the request is valid. An error before it is a reply of its own, and no event of the stream.
    first = await anext(chunks, None)
    events = _events(first, chunks)
    return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


async def _events(first: dict[str, Any] | None, chunks: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    try:
        if first is not None:
            yield _event(first)
        async for chunk in chunks:
            yield _event(chunk)
        yield b"data: [DONE]\n\n"
    except Refusal as error:
        if error.status != 499:
            yield _event(error_body(error))
    except Exception as error:  # a bug here
        logging.exception("a reply failed while it was sent")
        yield _event(error_body(ApiError(500, "internal", f"{type(error).__name__}: {error}")))


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + json_bytes(value) + b"\n\n"


async def while_connected(chunks: AsyncIterator[dict[str, Any]], request: Request) -> AsyncIterator[dict[str, Any]]:
    """The chunks, until the client has gone. Then the iteration ends, so that generation stops and its rows are free.

    Raises:
      Refusal: the client has gone, and whatever the chunks raise.
    """
    disconnection = asyncio.ensure_future(disconnected(request))
    following: asyncio.Future[dict[str, Any] | None] | None = None
    try:
        while True:
            following = asyncio.ensure_future(anext(chunks, None))
            await asyncio.wait({following, disconnection}, return_when=asyncio.FIRST_COMPLETED)
            if not following.done():
                raise client_gone()
            chunk = following.result()
            if chunk is None:
                return
            yield chunk
    finally:
        disconnection.cancel()
        if following is not None and not following.done():
            following.cancel()
            await asyncio.wait({following})
        await chunks.aclose()  # type: ignore[attr-defined]


async def _no_such_path(request: Request, error: Exception) -> Response:
    message = f"there is nothing at {request.url.path}; POST /v1/chat/completions, /v1/completions, GET /v1/models"
    return _refused(Refusal(404, "unknown_path", message))


async def _wrong_method(request: Request, error: Exception) -> Response:
    headers = dict(getattr(error, "headers", None) or {})
    message = f"{request.url.path} does not take {request.method}; it takes {headers.get('Allow', 'another method')}"
    return _refused(Refusal(405, "wrong_method", message, headers))


def _refused(refusal: Refusal) -> Response:
    return json_reply(error_body(refusal), refusal.status, refusal.headers)
