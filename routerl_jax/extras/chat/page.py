"""A conversation on a local page: its application, and uvicorn under it.

The page keeps the conversation, and sends it with every question. The server remembers nothing but the pictures of the last
replies. Whatever a passage or an answer says is text there (extras/viewer/static).
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools
from collections.abc import AsyncIterator, Collection
from typing import TYPE_CHECKING, Any

from routerl_jax.core.packages import needs
from routerl_jax.evaluation.records import PictureFiles, episode_record, turn_record
from routerl_jax.extras.chat.session import Chat, Exchange
from routerl_jax.extras.policy_server.answerer import sources
from routerl_jax.extras.policy_server.live import Progress
from routerl_jax.extras.viewer.app import page_app, page_data, picture_of, picture_reply
from routerl_jax.extras.viewer.index import whole_number
from routerl_jax.knowledge.base import query_text
from routerl_jax.models.images import image_bytes, is_data
from routerl_jax.services.asgi import (
    LOOPBACK,
    Address,
    Refusal,
    bound_hosts,
    each_while_connected,
    json_bytes,
    json_reply,
    read_json,
    run_server,
)

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

_BODY_BYTES = 32 << 20  # of a question; pictures travel in it in base64
_KEPT = 100  # replies whose pictures can be asked for


class _Asked:
    """A question as the page sends it. Raises Refusal that names the field."""

    def __init__(self, body: Any, sees: bool) -> None:
        if not isinstance(body, dict):
            raise _refused("the body must be an object")
        question, images, earlier = body.get("question"), body.get("images", []), body.get("earlier", [])
        if not isinstance(question, str) or not question.strip():
            raise _refused("question must be a text that is not empty")
        if not isinstance(images, list) or not all(isinstance(image, str) and is_data(image) for image in images):
            raise _refused("images must be a list of data: URIs")
        if images and not sees:
            raise _refused("images: the policy sees no pictures")
        if not isinstance(earlier, list) or not all(
            isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair)
            for pair in earlier
        ):
            raise _refused("earlier must be a list of [question, answer]")
        try:
            self.images = [image_bytes(image, f"images[{i}]") for i, image in enumerate(images)]
        except ValueError as error:
            raise _refused(str(error)) from error
        self.question = question.strip()
        self.earlier = [Exchange(*pair) for pair in earlier]


def _refused(message: str) -> Refusal:
    return Refusal(400, "invalid", message)


class _Page:
    """The state behind the application."""

    def __init__(self, chat: Chat) -> None:
        self.chat, self.files = chat, PictureFiles(chat.pictures)
        self._numbers = itertools.count()
        self.replies: collections.OrderedDict[str, dict[str, Any]] = collections.OrderedDict()

    def about(self) -> dict[str, Any]:
        """Who is talked with."""
        chat = self.chat
        knowledge_bases = [{"name": kb.name, "kind": kb.kind, "passages": kb.passages} for kb in chat.knowledge_bases]
        return {"name": chat.name, "pictures": chat.sees, "earlier": chat.earlier, "knowledge_bases": knowledge_bases}

    async def reply(self, asked: _Asked) -> AsyncIterator[dict[str, Any]]:
        """States of the reply for the page to draw, until the reply is complete (`going` is false) or failed (`error`).

        Where steps come faster than they are sent, only the latest is.
        """
        moments: asyncio.Queue[Progress | None] = asyncio.Queue()
        loop, key = asyncio.get_running_loop(), str(next(self._numbers))

        def put(moment: Progress | None) -> None:
            with contextlib.suppress(RuntimeError):  # the server has ended
                loop.call_soon_threadsafe(moments.put_nowait, moment)

        name = self.files.name
        header = {"question": asked.question, "images": [name(image) for image in asked.images], "prompt": ""}
        future = self.chat.ask(asked.question, asked.images, asked.earlier, put)
        future.add_done_callback(lambda _: put(None))
        try:
            while (moment := await moments.get()) is not None:
                if moments.empty():
                    turns = [turn_record(turn, name) for turn in moment.turns]
                    record = {**header, "turns": turns, "prediction": None}
                    step: dict[str, Any] = {"writing": moment.writing}
                    if (request := moment.searching) is not None:
                        step = {"searching": {"tool": request.tool, "query": query_text(request.query)}}
                    yield self._reply_state(key, record, going=True, **step)
            error = future.exception()
            if error is not None:
                yield {"error": f"{type(error).__name__}: {error}"}
                return
            episode = future.result()
            record = episode_record(episode, self.files, question=asked.question)
            yield self._reply_state(key, record, going=False, sources=sources(episode))
        finally:
            future.cancel()

    def _reply_state(self, key: str, record: dict[str, Any], **more: Any) -> dict[str, Any]:
        self.replies[key] = record
        while len(self.replies) > _KEPT:
            self.replies.popitem(last=False)
        return {"key": key, **page_data(record)[0], **more}


def create_app(chat: Chat, hosts: Collection[str] = LOOPBACK) -> Starlette:
    """The application. `hosts`: names under which it may be asked; "*" for any."""
    with needs("the web page", "serve"):
        from starlette.responses import StreamingResponse
        from starlette.routing import Route
    page = _Page(chat)

    async def ask(request: Request) -> Response:
        asked = _Asked(await read_json(request, _BODY_BYTES), chat.sees)

        async def lines() -> AsyncIterator[bytes]:
            with contextlib.suppress(Refusal):  # the browser has gone
                async for piece in each_while_connected(page.reply(asked), request):
                    yield json_bytes(piece) + b"\n"

        return StreamingResponse(lines(), media_type="application/x-ndjson")

    def show(request: Request) -> Response:
        def find() -> tuple[bytes, str]:
            record = page.replies.get(request.query_params.get("key", ""))
            number = request.query_params.get("n", "")
            if record is None:
                raise ValueError("there is no such picture (any more)")
            return picture_of(record, chat.pictures, whole_number("n", number))

        return picture_reply(find)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await asyncio.to_thread(chat.close)

    routes = [
        Route("/api/about", lambda _: json_reply(page.about())),
        Route("/api/ask", ask, methods=["POST"]),
        Route("/api/picture", show),
    ]
    return page_app("chat.html", routes, lifespan, hosts)


def serve(chat: Chat, host: str, port: int) -> None:
    """Serves until SIGTERM or SIGINT; prints the address. Whoever reaches the host and port can ask, but no other site's page.

    Raises:
      ValueError: nobody can listen there, or a package is missing.
    """
    address = Address(host=host, port=port, shutdown_seconds=2)
    run_server(create_app(chat, bound_hosts(host)), address, lambda url: f"talk with {chat.name} at {url}/")
