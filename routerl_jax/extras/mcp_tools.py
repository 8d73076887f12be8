"""A tool of any MCP server as a search tool of an agent."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import json
import math
import random
import re
import shlex
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, cast

import httpx2

from routerl_jax.core.background import gather_bounded, shared_loop
from routerl_jax.core.packages import needs
from routerl_jax.core.secrets import masked, remember, suspicion
from routerl_jax.core.time_limit import seconds_left
from routerl_jax.core.types import Passage, Query, ToolSchema
from routerl_jax.knowledge.base import Counts, StageCounts, TimedResults, is_blank, query_image, query_text
from routerl_jax.knowledge.client.schema import TEXT_KEYS, Documents, document_passage, passage_of
from routerl_jax.knowledge.client.transport import Retries, Unavailable
from routerl_jax.services.http import (
    ACCEPTED,
    ReplyError,
    apart,
    bounded,
    check_values,
    decompressed,
    error_of,
    may_pass,
    parse_reply,
    retry_after,
)


class McpTool:
    """A tool of an MCP server as an agent's search tool. `search(queries, k)` calls it once per query.

    Its answer becomes passages. Structured content may have the form of our own servers (`{"passages": [..]}`), or be a list of
    objects with a text (under `text`, `content`, `contents`, `snippet` or `description`). Otherwise each block of text, picture
    or resource becomes a passage. Safe to use from several threads. After a crash, the next call starts the server or connects
    to it again; if the server no longer knows the session, this call does. A reply whose status may pass (services.http) is
    asked for again.

    Args:
      server: a URL (streamable HTTP), or a command (stdio) as a list, or as a string that is split like in a shell.
      tool: name of the tool; optional if the server has only one.
      query_key, k_key, image_key: names of the tool's arguments for these; None: it has none. `k_key` and `image_key` are only
        used if the tool's schema has them.
      arguments: further arguments, the same in every call.
      timeout: most seconds for one call, connection included. A call never takes longer than its caller waits
        (core.time_limit).
      token: for HTTP, `Authorization: Bearer`.
      env: environment variables of the command, besides the few that MCP passes on.
      concurrency: number of calls at a time.

    Raises:
      ValueError: the tool does not exist, or there are several and none is named.
      Unavailable: the server can't be started or reached.
    """

    reads = frozenset({"text", "image"})

    def __init__(
        self,
        server: str | Sequence[str],
        tool: str = "",
        *,
        query_key: str = "query",
        k_key: str | None = "k",
        image_key: str | None = "image",
        arguments: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        token: str = "",
        env: Mapping[str, str] | None = None,
        concurrency: int = 8,
        cost: float = 1.0,
    ) -> None:
        with needs("MCP", "serve"):
            import mcp  # noqa: F401
        self.cost = cost
        self._server = server
        self._query_key, self._k_key, self._image_key = query_key, k_key, image_key
        self._arguments, self._env, self._token = dict(arguments or {}), dict(env or {}), token
        remember(token, *(value for name, value in self._env.items() if suspicion(name, value)))
        self._timeout, self._concurrency = timeout, concurrency
        self._counts = StageCounts(uncached=("server",))
        self._documents = Documents(self._where, self._counts, _row_passage)
        self._refusals: collections.deque[str] = collections.deque(maxlen=1)
        self._session: _Session | None = None  # belongs to the shared event loop, and is only used there
        tools = {entry.name: entry for entry in shared_loop().run(self._guarded(_all_tools))}
        if not tool and len(tools) == 1:
            tool = next(iter(tools))
        if tool not in tools:
            problem = f"no tool {tool!r}" if tool else "several tools"
            raise ValueError(f"the MCP server {self._where} has {problem}; give one of: {', '.join(tools)}")
        self.name = tool
        self._about = tools[tool]
        self._takes = set(tools[tool].input_schema.get("properties", {}))
        if query_key not in self._takes:
            names = ", ".join(sorted(self._takes))
            raise ValueError(f"tool {tool!r} of {self._where} takes no {query_key!r}; give query_key=: one of {names}")

    def search(self, queries: Sequence[Query], k: int = 5) -> list[list[Passage]]:
        """At most k passages per query; `TimedResults` if the server is one of ours. A blank query finds nothing.

        Raises:
          Unavailable: the server crashed, hangs or can't be reached.
          RuntimeError: the tool reports a failure; has its message.
        """

        async def search_one(query: Query) -> Any:
            if is_blank(query):
                return None
            arguments = self._call_arguments(query, k)
            return await self._guarded(lambda client: client.call_tool(self.name, arguments))

        self._counts.add("server", asked=len(queries))
        try:
            found = shared_loop().run(gather_bounded(search_one, queries, self._concurrency))
            answers = [
                ([], 0.0) if one is None else (_passages(one, self.name, self._documents)[:k], _seconds(one))
                for one in found
            ]
        except Exception:
            self._counts.add("server", failures=len(queries))
            raise
        results = [passages for passages, _ in answers]
        seconds = [elapsed for _, elapsed in answers if elapsed is not None]
        return TimedResults(results, seconds) if len(seconds) == len(results) else results

    def stage_counts(self) -> Counts:
        """Counts of queries to the server."""
        return self._counts()

    @property
    def schema(self) -> ToolSchema:
        """The tool as its server describes it, with the query as its one argument: the others are this object's."""
        about = {"type": "string", **self._about.input_schema["properties"][self._query_key]}
        description = self._about.description or f"Searches with {self.name!r}."
        return ToolSchema(name=self.name, description=description.strip(), query=self._query_key, about=about)

    def close(self) -> None:
        """Closes the connection, and stops the server if it was started here."""
        shared_loop().run(self._drop())

    @property
    def _where(self) -> str:
        return masked(self._server if isinstance(self._server, str) else shlex.join(self._server))

    def _call_arguments(self, query: Query, k: int) -> dict[str, Any]:
        arguments = {**self._arguments, self._query_key: query_text(query)}
        if self._k_key in self._takes:
            arguments[cast(str, self._k_key)] = k
        if query_image(query):
            if self._image_key not in self._takes:
                raise ValueError(f"tool {self.name!r} takes no picture")
            from routerl_jax.models.images import image_uri

            arguments[cast(str, self._image_key)] = image_uri(cast(Any, query).image)
        return arguments

    async def _guarded(self, ask: Any) -> Any:
        """`ask(client)` within the time limit.

        After any error of the connection, no later call uses it; calls that already wait for it continue to wait. If a call
        times out but the server has answered other calls meanwhile, only this call has failed. A session that the server no
        longer knows is not used again either, and the call is repeated once in a new one.
        """
        seconds = seconds_left(self._timeout)
        session, answered, lost = self._current(), -1, None
        try:
            async with asyncio.timeout(seconds):
                for _ in range(2):
                    answered = session.answered
                    try:
                        return await self._ask(session, ask)
                    except _SessionLost as error:
                        lost, session = error, self._current()
        except TimeoutError as error:
            if session.answered == answered:
                self._retire(session)
            busy = f"; its last reply: {self._refusals[-1]}" if self._refusals else ""
            raise Unavailable(f"the MCP server {self._where} gave no answer within {seconds:.3g} s{busy}") from error
        raise Unavailable(f"the MCP server {self._where} forgets each session at once: {lost}") from lost

    async def _ask(self, session: _Session, ask: Any) -> Any:
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        try:
            return await session.race(ask)
        except MCPError as error:
            if _LOST.search(str(error)[:_LONGEST_MESSAGE]):  # before the code, which servers use for other errors, too
                self._retire(session)
                raise _SessionLost(str(error)) from error
            if error.code == CONNECTION_CLOSED and not str(error).startswith("HTTP "):
                self._retire(session)
                raise Unavailable(f"the MCP server {self._where} went away ({error})") from error
            if _REFUSED.match(str(error)):
                raise Unavailable(f"the MCP server {self._where}: {error}") from error
            raise RuntimeError(f"the MCP server {self._where}: {error}") from error
        except Exception as error:
            self._retire(session)
            if isinstance(error, Unavailable):
                raise
            raise Unavailable(f"the MCP server {self._where} failed: {type(error).__name__}: {error}") from error

    def _current(self) -> _Session:
        if self._session is None or self._session.ended:
            try:
                self._session = _Session(self._transport(), self._where)
            except Exception as error:
                raise Unavailable(f"the MCP server {self._where} failed: {type(error).__name__}: {error}") from error
        return self._session

    def _retire(self, session: _Session) -> None:
        """Makes the next call connect again. This connection ends with the last call that waits for it."""
        if session is self._session:
            self._session = None
        session.retire()

    async def _drop(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _transport(self) -> Any:
        from mcp import StdioServerParameters
        from mcp.client.streamable_http import streamable_http_client

        if isinstance(self._server, str) and self._server.startswith(("http://", "https://")):
            headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
            headers["Accept-Encoding"] = ACCEPTED
            client = _PatientClient(headers=headers, timeout=httpx2.Timeout(self._timeout))
            client.refusals = self._refusals
            return streamable_http_client(self._server, http_client=client, max_sse_event_size=_MOST_BYTES)
        words = shlex.split(self._server) if isinstance(self._server, str) else list(self._server)
        if not words:
            raise ValueError("McpTool needs a URL or a command")
        return StdioServerParameters(command=words[0], args=words[1:], env=self._env)


_GRACE = 10  # seconds that a connection may take to close
_MOST_BYTES = 64 << 20  # most bytes of a reply
_LONGEST_MESSAGE = 4000  # characters of an error that are read
# What servers say of a session that they do not know. The specification has 404; some give 400, or an error in a whole reply.
_LOST = re.compile(
    r"(?i)^HTTP 4(04|10)\b|(not|n't) find( \w+)? session"
    r"|session[^.]*(not found|unknown|expired|invalid|terminated|no longer|not exist|closed)"
    r"|(unknown|invalid|expired|no( valid)?|missing|stale|terminated) (mcp[- ])?session|not initialized"
)
_REFUSED = re.compile(r"HTTP (4(01|03|08|25|29)|5\d\d)\b")


class _SessionLost(Exception):
    """The server does not know the session."""


class _PatientClient(httpx2.AsyncClient):
    """Sends requests again whose status may pass. Of an error that the protocol does not know, the status becomes the message,
    and no reply has more than _MOST_BYTES. `refusals`: the last passing error, for messages."""

    refusals: collections.deque[str]

    async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        retries, rng = Retries(), random.Random()
        stream = options.pop("stream", False)
        for attempt in range(retries.attempts):
            reply = await super().send(request, stream=True, **options)
            whole = reply.headers.get("content-type", "").lower().startswith("application/json")
            if request.method != "POST" or 300 <= reply.status_code < 400 or (reply.is_success and not whole):
                reply = _replaced(reply, stream=_Body(reply))
                if not stream:
                    await reply.aread()
                return reply
            try:
                body = await bounded(reply.aiter_raw(), _MOST_BYTES, reply.headers.get("content-encoding", ""))
                said = await apart(functools.partial(_said, reply.status_code, body), len(body))
            except ValueError as error:
                body, said = b"", ReplyError(400, str(error))
            finally:
                await reply.aclose()
            if said is None:
                self.refusals.clear()
                return _whole(reply, body)
            if not may_pass(said.status, said.message) or attempt + 1 == retries.attempts:
                tried = f" (tried {attempt + 1} times)" if attempt else ""
                return _whole(reply, _with_status(request, body, f"HTTP {said.status}: ", f"{said.message}{tried}"))
            self.refusals.append(f"HTTP {said.status}: {said.message}")
            wait = retry_after(reply.headers.get("retry-after", "")) or 0.0
            await asyncio.sleep(wait + retries.pause(attempt, rng))
        raise AssertionError("unreachable")


def _said(status: int, body: bytes) -> ReplyError | None:
    """The error of a reply, if its status or its body says that there is one, other than the protocol's own under 200. Raises
    ValueError for more JSON values than memory should be spent on."""
    check_values(body)
    try:
        value = parse_reply(body)
    except ValueError:
        if status < 300 and body.strip():
            return ReplyError(502, f"the reply is not JSON: {body[:120].decode(errors='replace')!r}")
        value = None
    carried = None if status < 300 and isinstance(value, dict) and "jsonrpc" in value else error_of(value)
    if status < 300:
        return carried
    return ReplyError(
        status, carried.message if carried else body[:200].decode(errors="replace").strip() or "no reason"
    )


def _with_status(request: httpx2.Request, body: bytes, status: str, message: str) -> bytes:
    """A JSON-RPC error, in which the status stands before the message: the server's, or one that has its words."""
    error: dict[str, Any] = {"code": -32603, "message": message}
    with contextlib.suppress(ValueError, KeyError, TypeError):
        own = parse_reply(body)["error"]
        error = {**own, "message": message} if isinstance(own["code"], int) and own["code"] < 0 else error
    error["message"] = status + message
    id = json.loads(request.content or b"{}").get("id")
    return json.dumps({"jsonrpc": "2.0", "id": id, "error": error}).encode()


def _whole(reply: httpx2.Response, body: bytes) -> httpx2.Response:
    whole = _replaced(reply, content=body)
    whole.headers["content-type"] = "application/json"
    return whole


def _replaced(reply: httpx2.Response, **body: Any) -> httpx2.Response:
    """The reply with another body, which is not compressed."""
    dropped = ("content-encoding", "content-length", "transfer-encoding")
    headers = [(name, value) for name, value in reply.headers.multi_items() if name.lower() not in dropped]
    return httpx2.Response(reply.status_code, headers=headers, request=reply.request, **body)


class _Body(httpx2.AsyncByteStream):
    """A reply's body, decompressed: at most _MOST_BYTES of it, unless it is a stream of events, each of which has a limit."""

    def __init__(self, reply: httpx2.Response) -> None:
        self._reply, self._headers = reply, reply.headers

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size, events = 0, self._headers.get("content-type", "").lower().startswith("text/event-stream")
        try:
            async for piece in decompressed(self._reply.aiter_raw(), self._headers.get("content-encoding", "")):
                size += len(piece)
                if size > _MOST_BYTES and not events:
                    raise ValueError(f"the reply is larger than {_MOST_BYTES} bytes")
                yield piece
        except ValueError as error:
            raise httpx2.DecodingError(str(error), request=self._reply.request) from error

    async def aclose(self) -> None:
        await self._reply.aclose()


class _Session:
    """One connection, kept open by its own task, because MCP's context managers must be left by the task that entered them."""

    def __init__(self, transport: Any, where: str) -> None:
        loop = asyncio.get_running_loop()
        self._where = where
        self.client: Any = None
        self.ready: asyncio.Future[None] = loop.create_future()
        self.answered = 0  # number of answered calls
        self._waiting = 0  # number of waiting calls
        self._retired = False
        self._leave = asyncio.Event()
        self._task = loop.create_task(self._live(transport))
        self._task.add_done_callback(self._finish)

    @property
    def ended(self) -> bool:
        return self._task.done()

    async def _live(self, transport: Any) -> None:
        from mcp import Client

        async with Client(transport) as self.client:
            self.ready.set_result(None)
            await self._leave.wait()

    def _finish(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if not self.ready.done():
            self.ready.set_exception(Unavailable(f"the MCP server {self._where} did not start: {_cause(error)}"))
            self.ready.exception()  # marks the exception as retrieved, because nobody may be waiting

    async def race(self, ask: Any) -> Any:
        """The result of `ask(client)` once there is a connection, or an error if the connection ends first."""
        self._waiting += 1
        try:
            await asyncio.shield(self.ready)
            request: asyncio.Future[Any] = asyncio.ensure_future(ask(self.client))
            try:
                await asyncio.wait({request, self._task}, return_when=asyncio.FIRST_COMPLETED)
                if not request.done():
                    raise Unavailable(f"the MCP server {self._where} went away")
                self.answered += 1
                return request.result()
            finally:
                request.cancel()
        finally:
            self._waiting -= 1
            self._leave_if_idle()

    def retire(self) -> None:
        """Tells the session that no further call will come."""
        self._retired = True
        self._leave_if_idle()

    def _leave_if_idle(self) -> None:
        if self._retired and not self._waiting and not self._leave.is_set():
            self._leave.set()
            # a server that does not end by itself is stopped
            asyncio.get_running_loop().call_later(_GRACE, self._task.cancel)

    async def close(self) -> None:
        self._leave.set()
        done, _ = await asyncio.wait({self._task}, timeout=_GRACE)
        if not done:
            self._task.cancel()


async def _all_tools(client: Any) -> list[Any]:
    tools, cursor = [], None
    while True:
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        cursor = page.next_cursor
        if not cursor:
            return tools


def _cause(error: BaseException | None) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}" if error else "it was stopped"


def _passages(result: Any, tool: str, documents: Documents | None = None) -> list[Passage]:
    """A tool's result as passages. Raises RuntimeError if the result is a failure."""
    documents = documents or Documents(tool, StageCounts(uncached=("server",)), _row_passage)
    blocks = list(result.content)
    if result.is_error:
        message = " ".join(block.text for block in blocks if block.type == "text")
        raise RuntimeError(f"tool {tool!r}: {message or 'failed without a message'}")
    rows = _rows(result.structured_content)
    if rows is None and len(blocks) == 1 and blocks[0].type == "text":
        with contextlib.suppress(ValueError):
            rows = _rows(parse_reply(blocks[0].text.encode("utf-8", "replace")))
    if rows is not None:
        (passages,) = documents([rows], len(rows))
        return passages
    passages = [_block_passage(block, rank) for rank, block in enumerate(blocks)]
    return [passage for passage in passages if passage is not None]


def _seconds(result: Any) -> float | None:
    """The seconds of the search that one of our servers reports; None for other servers."""
    content = result.structured_content
    if not isinstance(content, dict) or "passages" not in content:
        return None
    seconds = content.get("seconds")
    return float(seconds) if isinstance(seconds, int | float) and 0 <= seconds < math.inf else None


def _rows(value: Any) -> list[dict[str, Any]] | None:
    """The list of objects in a value, some of which have texts: the value itself, or the value of one of its keys. A list with
    objects is preferred to an empty one."""
    candidates = [value, *value.values()] if isinstance(value, dict) else [value]
    known = ("document", *TEXT_KEYS)
    lists = [
        rows
        for rows in candidates
        if isinstance(rows, list)
        and (not rows or any(isinstance(row, dict) and any(key in row for key in known) for row in rows))
    ]
    return max(lists, key=bool, default=None)


def _row_passage(row: Mapping[str, Any], rank: int) -> Passage:
    with contextlib.suppress(ValueError):
        return passage_of(row)
    return document_passage(row, 1.0 / (rank + 1))


def _block_passage(block: Any, rank: int) -> Passage | None:
    fields: dict[str, Any] | None = None
    if block.type == "text" and block.text.strip():
        fields = {"text": block.text}
    elif block.type == "image":
        fields = {"image": f"data:{block.mime_type};base64,{block.data}"}
    elif block.type == "resource_link":
        text = block.description or str(block.uri)
        fields = {"id": str(block.uri), "title": block.title or block.name, "text": text}
    elif block.type == "resource":
        resource, text = block.resource, getattr(block.resource, "text", None)
        if text is not None:
            fields = {"id": str(resource.uri), "text": text}
        elif str(resource.mime_type or "").startswith("image/"):
            fields = {"id": str(resource.uri), "image": f"data:{resource.mime_type};base64,{resource.blob}"}
    if fields is None:  # sound, or unknown kinds of blocks
        return None
    return document_passage({"text": "", **fields}, 1.0 / (rank + 1))
