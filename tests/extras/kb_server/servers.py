"""True servers on localhost for the tests of serving, clients and MCP, and knowledge bases that misbehave on demand.

`python -m tests.extras.kb_server.servers PORT SECONDS` serves one that takes so long for a query; killed by tests.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx2
import uvicorn

from routerl_jax.core.types import Passage, Query
from routerl_jax.extras.kb_server.app import Served, ServerSettings, create_app
from routerl_jax.knowledge.base import KnowledgeBase, query_image, query_text


class EchoKB(KnowledgeBase):
    """Says what it was asked. Remembers its calls; waits and raises as it is told.

    A query that holds "boom" raises, one that holds "odd" is a ValueError.
    """

    def __init__(
        self, name: str = "echo", size: int = 10, seconds: float = 0.0, image: str = "", **attributes: Any
    ) -> None:
        self.name, self.size, self.seconds, self.image = name, size, seconds, image
        self.calls: list[tuple[list[Any], int]] = []
        self.open = threading.Event()
        self.open.set()
        vars(self).update(attributes)

    def __len__(self) -> int:
        return self.size

    def _search(self, queries: list[Any], k: int) -> list[list[Passage]]:
        self.calls.append((queries, k))
        self.open.wait(120)
        time.sleep(self.seconds)
        texts = [query_text(query) for query in queries]
        if any("boom" in text for text in texts):
            raise RuntimeError("the disk is gone")
        if any("odd" in text for text in texts):
            raise ValueError("odd queries are not for me")
        return [[self._passage(query, i) for i in range(min(k, self.size))] for query in queries]

    def _passage(self, query: Query, i: int) -> Passage:
        text = f"{query_text(query)}{query_image(query)[:8]} ({i})"
        return Passage(id=str(i), title=f"Title {i}", text=text, score=1 / (i + 1), image=self.image)


@contextlib.contextmanager
def running(app: Any, **settings: Any) -> Iterator[str]:
    """The URL of an ASGI application under uvicorn, in a thread. `settings`: further ones of uvicorn."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=2, **settings))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            wait_until(lambda: server.started or not thread.is_alive())
            assert thread.is_alive(), "the server did not start"
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(10)


@contextlib.contextmanager
def serving(
    *kbs: KnowledgeBase, settings: ServerSettings | None = None, token: str = "", mcp: Any = None
) -> Iterator[str]:
    """The URL of a server of these knowledge bases, each under its name."""
    with running(create_app([Served(kb.name, {"default": kb}) for kb in kbs], settings, token=token, mcp=mcp)) as url:
        yield url


@contextlib.contextmanager
def scripted(*replies: tuple[int, dict[str, str], Any] | Callable[[], Any]) -> Iterator[tuple[str, list[str]]]:
    """A server that gives these (status, headers, JSON or bytes) one after the other, the last one for good, and the paths
    that it saw."""
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

    seen: list[str] = []

    async def answer(request: Request) -> Response:
        reply = replies[min(len(seen), len(replies) - 1)]
        seen.append(request.url.path)
        if callable(reply):
            reply = await reply()
        status, headers, body = reply
        return (Response if isinstance(body, bytes) else JSONResponse)(body, status, headers)

    with running(Starlette(routes=[Route("/{path:path}", answer, methods=["GET", "POST"])])) as url:
        yield url, seen


def search(url: str, body: Any, path: str = "/v1/search", **options: Any) -> httpx2.Response:
    """POSTs JSON."""
    return httpx2.post(url + path, json=body, timeout=120, **options)


def get(url: str, **options: Any) -> httpx2.Response:
    """GETs, with patience for busy machines."""
    return httpx2.get(url, timeout=120, **options)


def error_of(reply: httpx2.Response) -> tuple[int, str, str]:
    """(status, type, message) of a refused request."""
    error = reply.json()["error"]
    return reply.status_code, error["type"], error["message"]


def wait_until(ready: Callable[[], Any], seconds: float = 120.0) -> None:
    """Returns when `ready()` is true; fails after `seconds`."""
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def main(arguments: Sequence[str]) -> None:
    port, seconds = int(arguments[0]), float(arguments[1])
    app = create_app([Served("echo", {"default": EchoKB(seconds=seconds)})])
    uvicorn.run(app, port=port, log_level="error")


if __name__ == "__main__":
    main(sys.argv[1:])
