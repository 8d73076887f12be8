"""Servers on localhost that speak the protocols of search engines, readers, language models, and pages good and bad."""

from __future__ import annotations

import asyncio
import base64
import collections
import contextlib
import gzip
import json
import threading
import urllib.parse
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
    """An HTTP server on a thread of its own; `seen` counts requests per path, `most` is how many were there at once."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self.seen: collections.Counter[str] = collections.Counter()
        self.requests: list[Any] = []
        self.most = self._now = 0
        self._loop = asyncio.new_event_loop()
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), daemon=True)
        self._thread.start()
        assert ready.wait(10)
        self.url = f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _run(self, ready: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._start())
        ready.set()
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0.01))

    async def _start(self) -> None:
        runner = web.ServerRunner(web.Server(self._handle))
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]

    async def _handle(self, request: Any) -> web.StreamResponse:
        self.seen[request.path] += 1
        request._client_max_size = 1 << 26  # pictures are more than aiohttp's 1 MiB
        self._now += 1
        self.most = max(self.most, self._now)
        try:
            return await self._handler(request)
        finally:
            self._now -= 1


@contextlib.contextmanager
def serving(handler: Handler) -> Iterator[Server]:
    server = Server(handler)
    try:
        yield server
    finally:
        server.close()


def article(title: str, body: str) -> str:
    """An HTML page with a menu and a footer around its text."""
    return (
        f"<!doctype html><html><head><title>{title}</title></head><body><nav><a href='/'>Home</a> <a href='/x'>Log in</a></nav>"
        f"<main><article><h1>{title}</h1><p>{body}</p><p>{body} Further down, the same matter is looked at again in more "
        f"words, so that there is a paragraph which nobody would take for a menu.</p></article></main>"
        f"<footer>Cookie policy</footer></body></html>"
    )


class Web:
    """A small web: `/page/N` are articles, others misbehave. `delay` seconds before each page."""

    def __init__(self, delay: float = 0.0) -> None:
        self.delay = delay
        self.failing = 0  # requests to /flaky that still fail

    async def __call__(self, request: Any) -> web.StreamResponse:
        path = request.path
        await asyncio.sleep(self.delay)
        if path.startswith("/page/"):
            number = path.rpartition("/")[2]
            text = f"Fact {number} is that the tower of village {number} is {int(number) * 7} metres high."
            return web.Response(text=article(f"Village {number}", text), content_type="text/html")
        return await getattr(self, path.strip("/").partition("/")[0].replace("-", "_"))(request)

    async def never(self, request: Any) -> web.StreamResponse:
        await asyncio.sleep(60)
        return web.Response(text="too late")

    async def drips(self, request: Any) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/html"})
        await response.prepare(request)
        for _ in range(600):
            await response.write(b"<p>drip</p>")
            await asyncio.sleep(0.1)
        return response

    async def loop(self, request: Any) -> web.StreamResponse:
        raise web.HTTPFound("/loop?again=" + request.query.get("again", "") + "x")

    async def moved(self, request: Any) -> web.StreamResponse:
        raise web.HTTPMovedPermanently("/page/3")

    async def to(self, request: Any) -> web.StreamResponse:
        raise web.HTTPFound(request.query["url"])

    async def giant(self, request: Any) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/html"})
        await response.prepare(request)
        await response.write(article("Giant", "It begins like any other page.").encode()[:-14])
        with contextlib.suppress(ConnectionError):
            for _ in range(4000):
                await response.write(b"<p>" + b"more and more words " * 1000 + b"</p>")
        return response

    async def bomb(self, request: Any) -> web.StreamResponse:
        body = gzip.compress(b"<html><body><p>" + b"a b c d " * 8_000_000)
        return web.Response(body=body, headers={"Content-Type": "text/html", "Content-Encoding": "gzip"})

    async def binary(self, request: Any) -> web.StreamResponse:
        return web.Response(body=b"\x7fELF\0\0\1" * 100, headers={"Content-Type": "text/html"})

    async def pdf(self, request: Any) -> web.StreamResponse:
        return web.Response(body=b"%PDF-1.7", headers={"Content-Type": "application/pdf"})

    async def empty(self, request: Any) -> web.StreamResponse:
        return web.Response(text="<html><body><script>1</script></body></html>", content_type="text/html")

    async def gone(self, request: Any) -> web.StreamResponse:
        raise web.HTTPGone()

    async def russian(self, request: Any) -> web.StreamResponse:
        text = article("Башня", "Высота башни в деревне составляет сорок два метра, и она видна издалека.")
        return web.Response(body=text.encode("cp1251"), headers={"Content-Type": "text/html; charset=utf-8"})

    async def latin(self, request: Any) -> web.StreamResponse:
        text = article("Café", "Le café du village a été ouvert en été 1912 près de l’église.")
        return web.Response(body=text.encode(), headers={"Content-Type": "text/html; charset=iso-8859-1"})

    async def picture(self, request: Any) -> web.StreamResponse:
        import io

        from PIL import Image

        out = io.BytesIO()
        Image.new("RGB", (8, 8), (int(request.query.get("red", 0)), 0, 0)).save(out, "PNG")
        return web.Response(body=out.getvalue(), content_type="image/png")


class Searches:
    """SerpApi (`/search.json`), Serper (`/search`, `/lens`); `answers` gives the URLs of a query, `thumbnails` the small
    picture of a result by its URL and rank."""

    def __init__(self, answers: Callable[[str], list[str]], key: str = "key-123", delay: float = 0.0) -> None:
        self.answers, self.key, self.delay = answers, key, delay
        self.thumbnails = _beside
        self.storm: list[web.Response] = []  # given before anything else
        self.raw: str | None = None  # given in place of results
        self.asked: list[dict[str, Any]] = []

    async def __call__(self, request: Any) -> web.StreamResponse:
        await asyncio.sleep(self.delay)
        if self.storm:
            return self.storm.pop(0)
        if self.raw is not None:
            return web.Response(text=self.raw, content_type="application/json")
        if request.path == "/search.json":
            asked = dict(request.query)
            if asked.pop("api_key", None) != self.key:
                return web.json_response({"error": f"Invalid API key {request.query.get('api_key')}."}, status=401)
        else:
            asked = await request.json()
            if request.headers.get("X-API-KEY") != self.key:
                return web.json_response({"message": "Unauthorized.", "statusCode": 403}, status=403)
        self.asked.append(asked)
        return web.json_response(self._reply(request.path, asked))

    def _reply(self, path: str, asked: dict[str, Any]) -> dict[str, Any]:
        lens = asked.get("engine") == "google_lens" or path == "/lens"
        rows = []
        for i, url in enumerate(self.answers(asked["url"] if lens else asked["q"])):
            row = {"position": i + 1, "title": f"Result {i}", "link": url, "snippet": f"Snippet {i}"}
            if lens:
                row["thumbnail" if path == "/search.json" else "thumbnailUrl"] = self.thumbnails(url, i)
            rows.append(row)
        if path != "/search.json":
            return {"searchParameters": asked, "organic": rows}
        if not rows:
            return {
                "search_metadata": {"status": "Success"},
                "error": "Google hasn't returned any results for this query.",
            }
        return {"search_metadata": {"status": "Success"}, "visual_matches" if lens else "organic_results": rows}


def _beside(url: str, rank: int) -> str:
    place = urllib.parse.urlsplit(url)
    return f"{place.scheme}://{place.netloc}/picture?red={rank}"


class Jina:
    """Jina Reader (`GET /URL`, JSON); `pages` gives title and content of the page at a URL."""

    def __init__(self, pages: Callable[[str], tuple[str, str]], key: str = "") -> None:
        self.pages, self.key = pages, key

    async def __call__(self, request: Any) -> web.StreamResponse:
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"code": 401, "name": "AuthenticationFailedError"}, status=401)
        url = request.path_qs[1:]
        title, content = self.pages(url)
        data = {"title": title, "url": url, "content": content, "usage": {"tokens": len(content.split())}}
        return web.json_response({"code": 200, "status": 20000, "data": data})


class Faulty:
    """A server that fails on some requests as `plan` says, which gives for a request what goes wrong and whether it does so at
    every attempt or at the first one alone; "" where nothing does.

    Kinds: 429, 500, slow (no reply), closed (the connection), broken (JSON that ends early), damaged (a picture that does).
    `given` counts them.
    """

    def __init__(self, handler: Handler, plan: Callable[[Any], Awaitable[tuple[str, bool]]]) -> None:
        self.handler, self.plan = handler, plan
        self.given: collections.Counter[str] = collections.Counter()
        self._failed: set[Any] = set()

    async def __call__(self, request: Any) -> web.StreamResponse:
        kind, always = await self.plan(request)
        about = (request.path_qs, await request.read())
        if not kind or (not always and about in self._failed):
            return await self.handler(request)
        self._failed.add(about)
        self.given[kind] += 1
        return await getattr(self, f"_{kind}")(request)

    async def _429(self, request: Any) -> web.StreamResponse:
        return http_error(429, "0.1")

    async def _500(self, request: Any) -> web.StreamResponse:
        return http_error(500)

    async def _slow(self, request: Any) -> web.StreamResponse:
        await asyncio.sleep(600)
        return web.Response(text="too late")

    async def _closed(self, request: Any) -> web.StreamResponse:
        request.transport.close()
        return web.Response()

    async def _broken(self, request: Any) -> web.StreamResponse:
        return web.Response(text='{"code": 200, "data": {"title": "The ', content_type="application/json")

    async def _damaged(self, request: Any) -> web.StreamResponse:
        whole: Any = await self.handler(request)
        return web.Response(body=whole.body[: len(whole.body) // 2], content_type="image/png")


class Chats:
    """`POST /v1/chat/completions`; `reply` makes the answer of the messages.

    It is cut before the first of the request's `stop` strings, which are not in it, and after `max_tokens` words.
    `names_stops`: choices say which stop string it was (`stop_reason`), as vLLM's do.
    `echo`: a reply that continues the assistant's last message begins with this and that message, as llama.cpp's may.
    """

    names_stops = False
    echo: str | None = None

    def __init__(self, reply: Callable[[list[dict[str, Any]]], str], key: str = "", delay: float = 0.0) -> None:
        self.reply, self.key, self.delay = reply, key, delay
        self.storm: list[web.Response] = []
        self.refuse: Callable[[dict[str, Any]], str] = lambda body: ""  # why a request is a 400
        self.bodies: list[dict[str, Any]] = []

    async def __call__(self, request: Any) -> web.StreamResponse:
        if self.storm:
            return self.storm.pop(0)
        await asyncio.sleep(self.delay)
        if request.path != "/v1/chat/completions":
            raise web.HTTPNotFound()
        sent = request.headers.get("Authorization", "")
        if self.key and sent != f"Bearer {self.key}":
            return web.json_response({"error": {"message": f"Incorrect API key provided: {sent[7:]}"}}, status=401)
        body = await request.json()
        self.bodies.append(body)
        if why := self.refuse(body):
            return web.json_response({"error": {"message": why, "type": "invalid_request_error"}}, status=400)
        text, finish = self.reply(body["messages"]), "stop"
        stops = [body["stop"]] if isinstance(body.get("stop"), str) else body.get("stop") or []
        met = min(((text.index(stop), stop) for stop in stops if stop in text), default=None)
        text = text if met is None else text[: met[0]]
        most = body.get("max_tokens") or body.get("max_completion_tokens")
        if most and len(text.split()) > most:
            text, finish, met = " ".join(text.split()[:most]), "length", None
        words = len(text.split())
        if self.echo is not None and body["messages"][-1]["role"] == "assistant":
            text = self.echo + body["messages"][-1]["content"] + text
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": 0, "message": message, "finish_reason": finish, "logprobs": None}
        if self.names_stops:
            choice["stop_reason"] = met and met[1]
        usage = {"prompt_tokens": 7, "completion_tokens": words, "total_tokens": 7 + words}
        about = {"id": "1", "object": "chat.completion", "created": 1764000000, "model": body["model"]}
        return web.json_response({**about, "choices": [choice], "usage": usage})


def refused_by_openai(body: dict[str, Any]) -> str:
    """What OpenAI's endpoint says against a request, by the types of its published client (`ChatCompletionCreateParams`)."""
    known = {"model", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "seed", "stop"}
    if unknown := sorted(body.keys() - known - {"response_format", "n"}):
        return f"Unrecognized request argument supplied: {unknown[0]}"
    if not (isinstance(body.get("stop", []), str) or 0 < len(body.get("stop", ["x"])) <= 4):
        return f"Invalid 'stop': array of {len(body['stop'])}; expected 1 to 4 strings"
    if not (0 <= body.get("temperature", 1) <= 2 and 0 < body.get("top_p", 1) <= 1 and body.get("max_tokens", 1) >= 1):
        return "Invalid value: a number is out of its range"
    if not isinstance(body.get("seed", 0), int):
        return "Invalid type for 'seed'"
    return next((why for i, message in enumerate(body["messages"]) if (why := _refused_message(i, message))), "")


def _refused_message(place: int, message: dict[str, Any]) -> str:
    if message.keys() != {"role", "content"} or message["role"] not in ("system", "user", "assistant"):
        return f"Invalid value: messages[{place}].role"
    if isinstance(message["content"], str):
        return "" if message["content"] else f"Invalid value: messages[{place}].content is empty"
    for part in message["content"]:
        if part["type"] == "text" and part.keys() == {"type", "text"} and part["text"]:
            continue
        if part["type"] != "image_url" or message["role"] != "user" or part.keys() != {"type", "image_url"}:
            return f"Invalid value: messages[{place}].content, a part of type {part['type']!r}"
        head, _, data = part["image_url"]["url"].partition(",")
        if head != "data:image/png;base64" or not base64.b64decode(data, validate=True).startswith(b"\x89PNG"):
            return f"Invalid image in messages[{place}]"
    return ""


def http_error(status: int, retry_after: str = "") -> web.Response:
    """A service's complaint."""
    headers = {"Retry-After": retry_after} if retry_after else {}
    return web.Response(status=status, headers=headers, text=json.dumps({"error": "busy"}))
