"""What this package's HTTP servers share: the application around their routes, errors, disconnected clients, JSON, who may
ask (a token, or else no page of another site), and uvicorn.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hmac
import pathlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from absl import logging

from routerl_jax.core.config import Count, Range, checked
from routerl_jax.core.files import check_depth
from routerl_jax.core.packages import needs
from routerl_jax.core.secrets import masked
from routerl_jax.services.http import check_values

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import BaseRoute
    from starlette.types import ASGIApp, Lifespan, Receive, Scope, Send

T = TypeVar("T")

LOOPBACK = ("127.0.0.1", "localhost", "::1")  # names of this machine that no other machine can have
_OPEN = frozenset({"/", "/healthz", "/readyz"})  # paths that need no token


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class Address:
    """Where a server listens, and whom it answers.

    Attributes:
      host, port: address to listen at. 0.0.0.0 means all interfaces; set a token then.
      token_file: file with the token that clients must give (`Authorization: Bearer`, the API key of OpenAI's clients); "" for
        none.
      shutdown_seconds: seconds that requests may still take after SIGTERM.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Range(least=0, most=65_535)] = 8000
    token_file: str = ""
    shutdown_seconds: Count = 30


class Refusal(Exception):
    """A request is answered with an error, whose message is sent without secrets.

    Attributes:
      status: the HTTP status.
      kind: the error's type, a fixed word that programs may compare with.
      headers: headers of the reply, such as Retry-After.
    """

    def __init__(self, status: int, kind: str, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(masked(message))
        self.status, self.kind, self.headers = status, kind, dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The JSON of the reply."""
        return {"error": {"type": self.kind, "message": str(self)}}


# --- the application ---


def application(
    routes: Sequence[BaseRoute],
    lifespan: Lifespan[Starlette],
    *,
    token: str = "",
    hosts: Collection[str] = LOOPBACK,
    busy: Callable[[], str] | None = None,
    hint: str = "",
    write: Callable[[Refusal], Any] = Refusal.body,
) -> Starlette:
    """The application of a server. Endpoints raise Refusal, which becomes the reply.

    Args:
      token: required of every client. With "", for none, pages of other sites are refused (`SameSite`).
      hosts: names under which the server may be asked without a token; "*" for any.
      busy: gives the reason why no further request should be sent to this server, "" if there is none. With it there are
        /healthz (the server is alive) and /readyz.
      hint: what can be asked, for requests to an unknown path.
      write: makes the JSON of a refusal.
    """
    with needs("serving", "serve"):
        from starlette.applications import Starlette
        from starlette.middleware import Middleware
        from starlette.routing import Route

    def reply(refusal: Refusal) -> Response:
        return json_reply(write(refusal), refusal.status, refusal.headers)

    async def refused(request: Request, error: Any) -> Response:
        return reply(error)

    async def unknown_path(request: Request, error: Exception) -> Response:
        return reply(Refusal(404, "unknown_path", f"there is nothing at {request.url.path}{hint and f'; {hint}'}"))

    async def wrong_method(request: Request, error: Exception) -> Response:
        headers = dict(getattr(error, "headers", None) or {})
        allowed = headers.get("Allow", "another method")
        message = f"{request.url.path} does not take {request.method}; it takes {allowed}"
        return reply(Refusal(405, "wrong_method", message, headers))

    async def alive(request: Request) -> Response:
        return json_reply({"status": "alive"})

    async def ready(request: Request) -> Response:
        reason = busy() if busy else ""
        return json_reply({"status": reason or "ready"}, 503 if reason else 200)

    guard = Middleware(TokenCheck, token=token, write=write)
    if not token:
        guard = Middleware(SameSite, hosts=hosts, write=write)
    return Starlette(
        routes=[*([Route("/healthz", alive), Route("/readyz", ready)] if busy else ()), *routes],
        middleware=[guard],
        exception_handlers={Refusal: refused, 404: unknown_path, 405: wrong_method},
        lifespan=lifespan,
    )


@contextlib.contextmanager
def refusing(request: Request) -> Iterator[None]:
    """Whatever goes wrong in the block becomes a Refusal."""
    try:
        yield
    except Refusal:
        raise
    except asyncio.CancelledError as error:  # by uvicorn, after its `timeout_graceful_shutdown`
        raise Refusal(503, "shutting_down", "the server is shutting down", {"Retry-After": "1"}) from error
    except Exception as error:  # a bug in this server, which continues to serve
        logging.exception("request to %s failed", request.url.path)
        raise Refusal(500, "internal", f"{type(error).__name__}: {error}") from error


_SMALL = 1 << 20  # bytes of a body that is always taken
_MOST_HELD = 256 << 20  # bytes beyond _SMALL of all bodies that are under way
_BODY_SECONDS = 120.0  # for a whole body
_held = 0


async def read_json(request: Request, most: int) -> Any:
    """The request's JSON.

    Raises:
      Refusal: it is none, is nested more than a hundred levels deep, has more than `most` bytes or two million values, or
        takes more than two minutes to come; or large bodies that are under way fill the memory (503, Retry-After).
    """
    global _held
    import orjson
    from starlette.requests import ClientDisconnect

    parts, size, held = [], 0, 0
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for part in request.stream():
                size += len(part)
                if size > most:
                    raise Refusal(413, "too_large", f"the body has more than {most} bytes", {"Connection": "close"})
                more = max(size - _SMALL, 0) - held
                held, _held = held + more, _held + more
                if more and _held > _MOST_HELD:
                    headers = {"Retry-After": "1", "Connection": "close"}
                    raise Refusal(
                        503, "overloaded", "too many large bodies are under way; try again in a second", headers
                    )
                parts.append(part)
        content = b"".join(parts)
        check_values(content)
        value = orjson.loads(content)
        check_depth(value)
        return value
    except ClientDisconnect as error:
        raise client_gone() from error
    except TimeoutError as error:
        message = f"the body did not come within {_BODY_SECONDS:g} s"
        raise Refusal(408, "timeout", message, {"Connection": "close"}) from error
    except ValueError as error:
        raise Refusal(400, "invalid_json", f"the body is not JSON: {error}") from error
    finally:
        _held -= held


def client_gone() -> Refusal:
    """The refusal of a request whose client has gone. Nobody reads it."""
    return Refusal(499, "client_gone", "the client closed the connection")


async def while_connected(work: Awaitable[T], request: Request, seconds: float | None = None) -> T:
    """The result of `work`. It is cancelled when the client has gone or the seconds are over.

    The request's body must have been read.

    Raises:
      Refusal: 499 or 504, and whatever `work` raises.
    """

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait({task, gone}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise client_gone() if gone.done() else Refusal(504, "timeout", f"no result within {seconds:g} s")
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait({task})


async def each_while_connected(pieces: AsyncIterator[T], request: Request) -> AsyncIterator[T]:
    """The pieces of a reply, until the client has gone. Then the iteration ends, so that what makes them can stop.

    Raises:
      Refusal: the client has gone, and whatever the pieces raise.
    """
    try:
        while (piece := await while_connected(anext(pieces, None), request)) is not None:
            yield piece
    finally:
        await pieces.aclose()  # type: ignore[attr-defined]


def json_bytes(value: Any) -> bytes:
    """JSON in UTF-8."""
    import orjson

    return orjson.dumps(value)


def json_reply(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A reply with this value as JSON."""
    from starlette.responses import Response

    return Response(json_bytes(body), status, headers=dict(headers or {}), media_type="application/json")


# --- who may ask ---


class TokenCheck:
    """Middleware that admits requests with the token, and all requests to the paths of health and of the first page.

    Args:
      token: the token that clients send as `Authorization: Bearer TOKEN`.
      write: makes the JSON of a refusal.
    """

    def __init__(self, app: ASGIApp, token: str, write: Callable[[Refusal], Any]) -> None:
        self.app, self._expected, self._write = app, f"Bearer {token}".encode(), write

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in _OPEN:
            authorization = next((value for key, value in scope["headers"] if key == b"authorization"), b"")
            if not hmac.compare_digest(authorization, self._expected):
                message = "this server wants a token: Authorization: Bearer TOKEN"
                refusal = Refusal(401, "unauthorized", message, {"WWW-Authenticate": "Bearer"})
                await json_reply(self._write(refusal), 401, refusal.headers)(scope, receive, send)
                return
        await self.app(scope, receive, send)


class SameSite:
    """Middleware that refuses a browser's requests for the page of another site.

    Servers without a token need it, because such a page could use them otherwise.

    A request must name one of the hosts, because a page may have its own name lead here (DNS rebinding). Browsers say by
    `Sec-Fetch-Site` whether a request is from another origin; older ones name the origin by `Origin`. Links may lead here from
    anywhere. Other programs send neither header.

    Args:
      hosts: names under which the server may be asked (`bound_hosts`); "*" for any.
      write: makes the JSON of a refusal.
    """

    def __init__(
        self, app: ASGIApp, hosts: Collection[str] = LOOPBACK, write: Callable[[Refusal], Any] = Refusal.body
    ) -> None:
        self.app, self._hosts, self._write = app, frozenset(host.lower() for host in hosts), write

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (refusal := self._refusal(scope)) is not None:
            await json_reply(self._write(refusal), refusal.status)(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _refusal(self, scope: Scope) -> Refusal | None:
        headers = {key: value.decode("latin-1").lower() for key, value in scope["headers"]}
        host, site, origin = headers.get(b"host", ""), headers.get(b"sec-fetch-site"), headers.get(b"origin")
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        if name not in self._hosts and "*" not in self._hosts:
            hosts = ", ".join(sorted(self._hosts))
            return Refusal(403, "wrong_host", f"this server is not asked as {name!r}; it is asked as one of: {hosts}")
        if site is not None:
            link = scope["method"] in ("GET", "HEAD") and headers.get(b"sec-fetch-mode") == "navigate"
            same = link or site in ("same-origin", "none")
        else:
            same = origin is None or origin.partition("://")[2] == host
        if same:
            return None
        return Refusal(403, "cross_site", f"pages of other sites ({origin or site}) can't use this server")


def bound_hosts(host: str) -> tuple[str, ...]:
    """The names for `SameSite` of a server that listens at an interface. ("*",) for all interfaces, whose names are unknown."""
    if host in LOOPBACK:
        return LOOPBACK
    return ("*",) if host in ("", "0.0.0.0", "::") else (*LOOPBACK, host, socket.gethostname())


def read_token(path: str) -> str:
    """The token in a file, "" for no path. Raises ValueError if there is none in it."""
    if not path:
        return ""
    try:
        token = pathlib.Path(path).expanduser().read_text("utf-8").strip()
    except OSError as error:
        raise ValueError(f"token_file={path}: can't be read ({error.strerror})") from error
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError(f"token_file={path}: must hold one token in printable ASCII without spaces")
    return token


# --- running it ---


def run_server(app: ASGIApp, address: Address, greeting: Callable[[str], str]) -> None:
    """Serves an application in this process until SIGTERM or SIGINT, and then finishes the requests in flight.

    Args:
      address: port 0 takes a free one.
      greeting: makes the text that is printed at the start from the server's URL.

    Raises:
      ValueError: the port is taken, or a package is missing.
    """
    with needs("serving", "serve"):
        import uvicorn
    host, listener = address.host, listen(address.host, address.port)
    name = "127.0.0.1" if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    print(greeting(f"http://{name}:{listener.getsockname()[1]}"), flush=True)
    config = uvicorn.Config(
        app,
        http=protocol(),
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=address.shutdown_seconds,
        timeout_keep_alive=75,
    )
    with listener:
        uvicorn.Server(config).run(sockets=[listener])


_MOST_HEAD = 64 << 10  # bytes of a request's first line and headers


def protocol() -> Any:
    """uvicorn's HTTP, with a limit of a request's headers, which its faster parser lacks. A request beyond it gets 400."""
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    except ImportError:
        return "h11"  # which has that limit

    class Bounded(HttpToolsProtocol):
        fields = 0  # bytes of the headers so far, and of what follows a body in chunks
        since = 0  # bytes since the headers ended or a piece of the body came
        went_on = False

        def data_received(self, data: bytes) -> None:
            self.went_on = False
            super().data_received(data)
            self.since = 0 if self.went_on else self.since + len(data)
            if max(self.since, self.fields) > _MOST_HEAD and not self.transport.is_closing():
                self.send_400_response(f"The headers have more than {_MOST_HEAD} bytes.")

        def on_message_begin(self) -> None:
            self.fields = 0
            super().on_message_begin()

        def on_header(self, name: bytes, value: bytes) -> None:
            self.fields += len(name) + len(value)
            super().on_header(name, value)

        def on_headers_complete(self) -> None:
            self.went_on = True
            super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            self.went_on = True
            super().on_body(body)

        def on_message_complete(self) -> None:
            self.went_on = True
            super().on_message_complete()

    return Bounded


def check_port(host: str, port: int) -> None:
    """For a server that takes long to load. Raises ValueError if it can't listen there."""
    listen(host, port).close()


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there. Port 0 takes a free one. Raises ValueError if it can't listen: the port may be taken."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        raise ValueError(f"can't listen at {host}:{port} ({error.strerror}); give another --port or --host") from error
    return listener
