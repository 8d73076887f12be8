"""Common parts of this package's HTTP servers: errors, JSON, disconnected clients, tokens, other sites' pages, uvicorn."""

from __future__ import annotations

import hmac
import pathlib
import socket
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from routerl_jax.core.packages import needs

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Receive, Scope, Send


LOOPBACK = ("127.0.0.1", "localhost", "::1")  # names of this machine that no other machine can have


class Refusal(Exception):
    """A request is answered with an error.

    Attributes:
      status: the HTTP status.
      kind: the error's type, a fixed word that programs may compare with.
      headers: headers of the reply, such as Retry-After.
    """

    def __init__(self, status: int, kind: str, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.kind, self.headers = status, kind, dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The JSON of the reply."""
        return {"error": {"type": self.kind, "message": str(self)}}


async def read_json(request: Request, most: int) -> Any:
    """The request's JSON. Raises Refusal if it is none, or has more than `most` bytes."""
    import orjson
    from starlette.requests import ClientDisconnect

    parts, size = [], 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > most:
                raise Refusal(413, "too_large", f"the body has more than {most} bytes", {"Connection": "close"})
            parts.append(part)
    except ClientDisconnect as error:
        raise client_gone() from error
    try:
        return orjson.loads(b"".join(parts))
    except ValueError as error:
        raise Refusal(400, "invalid_json", f"the body is not JSON: {error}") from error


def client_gone() -> Refusal:
    """The refusal of a request whose client has gone. Nobody reads it."""
    return Refusal(499, "client_gone", "the client closed the connection")


async def disconnected(request: Request) -> None:
    """Returns when the client has gone. The request's body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def json_bytes(value: Any) -> bytes:
    """JSON in UTF-8."""
    import orjson

    return orjson.dumps(value)


def json_reply(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A reply with this value as JSON."""
    return raw_reply(json_bytes(body), status, headers)


def raw_reply(body: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A reply with a body that is JSON already."""
    from starlette.responses import Response

    return Response(body, status, headers=dict(headers or {}), media_type="application/json")


class TokenCheck:
    """Middleware that admits requests with the token, and all requests to some paths.

    Args:
      token: the token that clients send as `Authorization: Bearer TOKEN`.
      unguarded: paths that need no token.
      write: makes the JSON of a refusal.
    """

    def __init__(
        self,
        app: ASGIApp,
        token: str,
        unguarded: frozenset[str],
        write: Callable[[Refusal], Any] = Refusal.body,
    ) -> None:
        self.app, self._expected, self._unguarded, self._write = app, f"Bearer {token}".encode(), unguarded, write

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._unguarded:
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


def run_server(
    app: ASGIApp, host: str, port: int, greeting: Callable[[str], str], *, shutdown_seconds: int = 30
) -> None:
    """Serves an application in this process until SIGTERM or SIGINT, and then finishes the requests in flight.

    Args:
      port: the port; 0 takes a free one.
      greeting: makes the text that is printed at the start from the server's URL.
      shutdown_seconds: seconds that requests in flight may take at the end.

    Raises:
      ValueError: the port is taken, or a package is missing.
    """
    with needs("serving", "serve"):
        import uvicorn
    listener = listen(host, port)
    name = "127.0.0.1" if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    print(greeting(f"http://{name}:{listener.getsockname()[1]}"), flush=True)
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=shutdown_seconds,
            timeout_keep_alive=75,
        )
    )
    with listener:
        server.run(sockets=[listener])


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
