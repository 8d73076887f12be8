"""Servers without a token, and what browsers send them for the pages of other sites."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import socket
import time
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.routing import Route
from starlette.testclient import TestClient

from routerl_jax.extras.chat import page
from routerl_jax.extras.kb_server import app as knowledge
from routerl_jax.extras.policy_server.app import Served, create_app
from routerl_jax.extras.viewer import app as viewer
from routerl_jax.services import asgi
from routerl_jax.services.asgi import LOOPBACK, Refusal, SameSite, bound_hosts, json_reply, protocol, read_json
from tests.extras.kb_server.servers import EchoKB, running

HERE = "http://localhost:8000"


def client(host: str = "127.0.0.1", base_url: str = HERE) -> TestClient:
    route = Route("/", lambda _: json_reply("done"), methods=["GET", "POST"])
    return TestClient(
        Starlette(routes=[route], middleware=[Middleware(SameSite, hosts=bound_hosts(host))]), base_url=base_url
    )


@pytest.mark.parametrize(
    ("method", "headers", "status"),
    [
        ("POST", {}, 200),  # curl, the openai package
        ("POST", {"origin": HERE, "sec-fetch-site": "same-origin"}, 200),  # our own page
        ("POST", {"origin": HERE}, 200),  # in an older browser
        ("POST", {"sec-fetch-site": "none"}, 200),
        ("POST", {"origin": "http://evil.example", "sec-fetch-site": "cross-site"}, 403),
        ("POST", {"origin": "http://evil.example", "sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}, 403),
        ("POST", {"origin": "http://localhost:3000", "sec-fetch-site": "same-site"}, 403),  # another program's page
        ("POST", {"origin": "http://evil.example"}, 403),
        ("POST", {"origin": "null"}, 403),  # a file, or a frame without an origin
        ("POST", {"origin": "http://localhost:8000.evil.example"}, 403),
        ("GET", {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}, 200),  # a link
        ("GET", {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}, 403),  # a picture in another page
        # DNS rebinding: the page's own name leads here, so that for the browser all is of one origin
        (
            "POST",
            {"host": "evil.example:8000", "origin": "http://evil.example:8000", "sec-fetch-site": "same-origin"},
            403,
        ),
        ("GET", {"host": "evil.example"}, 403),
        ("GET", {"host": "127.0.0.1.evil.example"}, 403),
        ("GET", {"host": "LOCALHOST:1"}, 200),  # a forwarded port
        ("GET", {"host": "[::1]:8000"}, 200),
        ("GET", {"host": ""}, 403),
    ],
)
def test_requests(method: str, headers: dict[str, str], status: int) -> None:
    reply = client().request(method, "/", headers=headers)
    assert reply.status_code == status
    if status == 403:
        assert reply.json()["error"]["type"] in ("cross_site", "wrong_host")


def test_hosts() -> None:
    """By the interface: all have any name; one has its own, too."""
    assert bound_hosts("localhost") == LOOPBACK
    assert bound_hosts("10.1.2.3") == (*LOOPBACK, "10.1.2.3", socket.gethostname())
    assert client("10.1.2.3").get("/", headers={"host": "10.1.2.3:8000"}).status_code == 200
    assert client("10.1.2.3").get("/", headers={"host": "evil.example"}).status_code == 403
    anywhere = client("0.0.0.0", "http://any.example")
    assert anywhere.post("/").status_code == 200
    assert anywhere.post("/", headers={"origin": "http://evil.example"}).status_code == 403


def policy_app(_: pathlib.Path) -> Starlette:
    return create_app(Served(models={}, busy=lambda: "", body_bytes=1 << 10, close=lambda: None))


def knowledge_app(_: pathlib.Path) -> Starlette:
    return knowledge.create_app([knowledge.Served("wiki", {"default": EchoKB("wiki")})])


def chat_app(directory: pathlib.Path) -> Starlette:
    return page.create_app(SimpleNamespace(sees=False, pictures=directory))  # type: ignore[arg-type]


APPLICATIONS = {  # of everything that is served, with a path
    "/v1/models": policy_app,
    "/v1/kbs": knowledge_app,
    "/api/state": lambda _: viewer.create_app([]),
    "/": chat_app,
}


@pytest.mark.parametrize("path", APPLICATIONS)
def test_every_server_refuses_pages_of_other_sites(path: str, tmp_path: pathlib.Path) -> None:
    asked = TestClient(APPLICATIONS[path](tmp_path), base_url=HERE)
    assert asked.get(path, headers={"origin": HERE}).status_code == 200
    foreign = asked.post(path, headers={"origin": "http://evil.example"})
    rebound = asked.get(path, headers={"host": "evil.example"})
    assert [foreign.status_code, rebound.status_code] == [403, 403]
    assert "pages of other sites (http://evil.example) can't use this server" in foreign.text
    assert (
        "this server is not asked as 'evil.example'; it is asked as one of: 127.0.0.1, ::1, localhost" in rebound.text
    )


def test_a_policy_without_a_token() -> None:
    """The error has the OpenAI protocol's form. Whoever gives a token may come from anywhere."""
    served = Served(models={}, busy=lambda: "", body_bytes=1 << 10, close=lambda: None)
    foreign = {"origin": "http://evil.example", "host": "any.example"}
    reply = TestClient(create_app(served), base_url=HERE).post("/v1/completions", headers={"origin": foreign["origin"]})
    assert reply.status_code == 403
    assert reply.json()["error"]["code"] == "cross_site"
    guarded = TestClient(create_app(served, token="secret"), base_url=HERE)
    assert guarded.get("/v1/models", headers=foreign).status_code == 401
    assert guarded.get("/v1/models", headers={**foreign, "authorization": "Bearer secret"}).status_code == 200


HEAD = b"POST / HTTP/1.1\r\nHost: x\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n"
ENDLESS = {
    "a line": (HEAD + b"A: ", b"b" * 1000),
    "lines": (HEAD, b"A: bbbbbb\r\n" * 100),
    "a path": (b"POST /", b"a" * 1000),
    "what follows a body": (CHUNKED + b"0\r\n", b"A: bbbbbb\r\n" * 100),
    "a line behind a body": (CHUNKED + b"0\r\nA: ", b"b" * 1000),
}


async def counted(scope: Any, receive: Any, send: Any) -> None:
    """An application that replies with the number of bytes of a body."""
    assert scope["type"] == "http"
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        size, more = size + len(message["body"]), message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": str(size).encode()})


@pytest.mark.parametrize("kind", ENDLESS)
def test_headers_without_end_are_refused(kind: str) -> None:
    begin, more = ENDLESS[kind]
    with running(counted, http=protocol(), lifespan="off") as url:
        port = int(url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            connection.sendall(begin)
            with contextlib.suppress(OSError):  # it may be closed while this sends
                for _ in range(1000):
                    connection.sendall(more)
                    time.sleep(0)
            with contextlib.suppress(OSError):
                assert b" 400 " in connection.recv(100)
        reply = httpx2.post(url, content=iter([b"x" * 100_000] * 20), headers={"A": "b" * 60_000})
        assert (reply.status_code, reply.text) == (200, "2000000")


def test_large_bodies_that_are_under_way_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asgi, "_SMALL", 1000)
    monkeypatch.setattr(asgi, "_MOST_HELD", 10_000)
    large = b'"' + b"x" * 8_000 + b'"'

    async def ask(content: bytes, wait: asyncio.Event | None = None) -> Any:
        parts = [{"type": "http.request", "body": content, "more_body": True}, {"type": "http.request", "body": b""}]

        async def receive() -> Any:
            if len(parts) == 1 and wait is not None:
                await wait.wait()
            return parts.pop(0)

        try:
            return await read_json(Request({"type": "http"}, receive), 10**6)
        except Refusal as refusal:
            return refusal.status, refusal.headers.get("Retry-After")

    async def work() -> list[Any]:
        wait = asyncio.Event()
        waiting = asyncio.ensure_future(ask(large, wait))
        await asyncio.sleep(0.01)
        second, small = await ask(large), await ask(b"1")
        wait.set()
        return [second, small, len(await waiting), len(await ask(large))]

    assert asyncio.run(work()) == [(503, "1"), 1, 8_000, 8_000]
    assert asgi._held == 0
