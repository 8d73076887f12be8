"""Knowledge bases as tools of the Model Context Protocol, and any MCP server's tool as a search tool of an agent."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
import shlex
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from routerl_jax.core.extras import install_hint
from routerl_jax.core.patience import seconds_left
from routerl_jax.core.types import Passage, Query
from routerl_jax.knowledge.client.policy import Unavailable
from routerl_jax.knowledge.query import is_blank, query_image, query_text
from routerl_jax.knowledge.serving.app import Served
from routerl_jax.knowledge.serving.batching import Batcher
from routerl_jax.knowledge.serving.schema import (
    Limits,
    Refusal,
    passage_json,
    passage_of,
    read_k,
    read_query,
)
from routerl_jax.knowledge.timing import TimedResults
from routerl_jax.remote.background import shared_loop

if TYPE_CHECKING:
    from mcp.server import Server
    from starlette.applications import Starlette

_PASSAGE = {
    "type": "object",
    "properties": {
        **{key: {"type": "string"} for key in ("id", "title", "text", "image")},
        "score": {"type": "number"},
    },
    "required": ["id", "title", "text", "score"],
}
_OUTPUT = {
    "type": "object",
    "properties": {"passages": {"type": "array", "items": _PASSAGE}, "seconds": {"type": "number"}},
    "required": ["passages"],
}


def mcp_server(served: Sequence[Served], *, limits: Limits | None = None) -> Server[Any]:
    """An MCP server with one tool per knowledge base, `search_NAME(query, k)`, and `mode` or `image` where there are any.

    A result has the passages and the seconds of the search as structured content, the passages as text, and their pictures as
    image content. What is wrong with a call is the tool's error (`isError`), for the model to read.
    """
    with _package():
        from mcp import types
        from mcp.server import Server

    limits = limits or Limits()
    tools = {_tool_name(one.name): one for one in served}
    batchers = {id(kb): Batcher(kb) for one in served for kb in one.modes.values()}

    async def list_tools(context: Any, params: Any) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[_tool(name, one, limits) for name, one in tools.items()])

    async def call_tool(context: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        try:
            if params.name not in tools:
                raise Refusal(404, "unknown_tool", f"no tool {params.name!r}; there are: {', '.join(tools)}")
            query, k, kb = _read_call(tools[params.name], params.arguments or {}, limits)
            async with asyncio.timeout(limits.seconds):
                found = await batchers[id(kb)].search([query], k)
        except TimeoutError:
            return _error(f"no result within {limits.seconds:g} s")
        except Exception as error:
            return _error(str(error) if isinstance(error, Refusal | ValueError) else f"{type(error).__name__}: {error}")
        return await asyncio.to_thread(_result, found[0], found.seconds[0])

    return Server("routerl_jax", version="1", on_list_tools=list_tools, on_call_tool=call_tool)


def serve_stdio(served: Sequence[Served], *, limits: Limits | None = None) -> None:
    """Serves one client over standard input and output, until it closes them."""
    server = mcp_server(served, limits=limits)
    with _package():
        from mcp.server.stdio import stdio_server

    async def work() -> None:
        async with stdio_server() as (reader, writer):
            await server.run(reader, writer, server.create_initialization_options())

    asyncio.run(work())


def http_app(served: Sequence[Served], *, host: str = "127.0.0.1", limits: Limits | None = None) -> Starlette:
    """Streamable HTTP at /mcp; `serving.app.create_app` takes it. Stateless: any replica may answer any request.

    On the loopback interface, only requests for that host are answered (DNS rebinding).
    """
    limits = limits or Limits()
    return mcp_server(served, limits=limits).streamable_http_app(
        stateless_http=True, json_response=True, host=host, max_request_body_size=limits.body_bytes
    )


def _tool_name(name: str) -> str:
    return "search_" + re.sub(r"[^0-9A-Za-z_-]", "_", name)


def _tool(name: str, served: Served, limits: Limits) -> Any:
    from mcp import types

    said = served.describe()
    reads = sorted({kind for mode in said["modes"].values() for kind in mode["reads"]})
    properties: dict[str, Any] = {}
    if "text" in reads:
        properties["query"] = {"type": "string", "description": "What to search for."}
    if "image" in reads:
        properties["image"] = {"type": "string", "description": "A picture to search for: data:image/png;base64,..."}
    properties["k"] = {"type": "integer", "minimum": 1, "maximum": limits.k, "default": 5, "description": "Passages."}
    if len(served.modes) > 1:
        properties["mode"] = {"type": "string", "enum": list(served.modes), "default": said["default_mode"]}
    schema: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": False}
    if reads == ["text"]:
        schema["required"] = ["query"]
    size = "" if said["size"] is None else f" of {said['size']:,} passages"
    return types.Tool(
        name=name,
        description=f"Searches the knowledge base {served.name!r}{size} and returns the best passages.",
        input_schema=schema,
        output_schema=_OUTPUT,
        annotations=types.ToolAnnotations(read_only_hint=True, idempotent_hint=True),
    )


def _read_call(served: Served, arguments: Mapping[str, Any], limits: Limits) -> tuple[Query, int, Any]:
    unknown = sorted(set(arguments) - {"query", "k", "mode", "image"})
    if unknown:
        raise Refusal(400, "invalid_request", f"unknown argument {unknown[0]!r}; known: query, k, mode, image")
    mode = arguments.get("mode") or next(iter(served.modes))
    if mode not in served.modes:
        raise Refusal(400, "unknown_mode", f"{served.name!r} has no mode {mode!r}; it has: {', '.join(served.modes)}")
    asked: Any = arguments.get("query", "")
    if arguments.get("image"):
        asked = {"text": asked or None, "image": arguments["image"]}
    return read_query(asked, "query", limits), read_k(arguments.get("k", 5), limits), served.modes[mode]


def _result(found: Sequence[Passage], seconds: float) -> Any:
    from mcp import types

    passages = [passage_json(passage) for passage in found]
    texts = [f"Doc {i}(Title: {passage.title}) {passage.text}" for i, passage in enumerate(found, 1)]
    content: list[Any] = [types.TextContent(text="\n".join(texts) or "Nothing was found.")]
    for passage in passages:
        head, _, data = passage["image"].partition(";base64,")
        if data:
            content.append(types.ImageContent(data=data, mime_type=head.removeprefix("data:")))
    return types.CallToolResult(content=content, structured_content={"passages": passages, "seconds": seconds})


def _error(message: str) -> Any:
    from mcp import types

    return types.CallToolResult(content=[types.TextContent(text=message)], is_error=True)


class McpTool:
    """A tool of an MCP server, as an agent's search tool: `search(queries, k)` calls it once per query.

    Its answer becomes passages: structured content in the form of our own servers (`{"passages": [..]}`), or a list of
    objects with a text (under `text`, `content`, `contents`, `snippet` or `description`); else one passage per block of
    text, picture or resource. Safe to use from several threads. A server that crashed is started, or connected to, anew
    at the next call.

    Args:
      server: a URL (streamable HTTP), or a command (stdio): a string as a shell would split it, or a list.
      tool: its name; may be left out where the server has one tool.
      query_key, k_key, image_key: the tool's arguments for these; None: it has none. `k_key` and `image_key` are only used
        where the tool's schema has them.
      arguments: further ones, the same in every call.
      timeout: seconds for one call at most, the connection included; it never takes longer than its caller waits
        (core.patience).
      token: for HTTP, `Authorization: Bearer`.
      env: of the command, beside the few variables that MCP hands on.
      concurrency: calls at a time.

    Raises:
      ValueError: no such tool, or several and none named.
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
        with _package():
            import mcp  # noqa: F401
        self.cost = cost
        self._server = server
        self._query_key, self._k_key, self._image_key = query_key, k_key, image_key
        self._arguments, self._env, self._token = dict(arguments or {}), dict(env or {}), token
        self._timeout, self._concurrency = timeout, concurrency
        self._session: _Session | None = None
        self._lock = threading.Lock()
        listed = {one.name: one for one in shared_loop().run(self._list())}
        if not tool and len(listed) == 1:
            tool = next(iter(listed))
        if tool not in listed:
            wanted = f"no tool {tool!r}" if tool else "several tools"
            raise ValueError(f"the MCP server {self._where} has {wanted}; give one of: {', '.join(listed)}")
        self.name = tool
        self._takes = set(listed[tool].input_schema.get("properties", {}))
        if query_key not in self._takes:
            known = ", ".join(sorted(self._takes))
            raise ValueError(f"tool {tool!r} of {self._where} takes no {query_key!r}; give query_key=: one of {known}")

    def search(self, queries: Sequence[Query], k: int = 5) -> list[list[Passage]]:
        """At most k passages per query, `TimedResults` where a server of ours is asked. A blank query finds nothing.

        Raises:
          Unavailable: the server crashed, hangs or can't be reached.
          RuntimeError: the tool says that it failed; its message.
        """
        return shared_loop().run(self._search_all(list(queries), k))

    def close(self) -> None:
        """Ends the connection, and the server if this started it."""
        shared_loop().run(self._drop())

    @property
    def _where(self) -> str:
        return self._server if isinstance(self._server, str) else shlex.join(self._server)

    async def _search_all(self, queries: list[Query], k: int) -> list[list[Passage]]:
        slots = asyncio.Semaphore(self._concurrency)

        async def one(query: Query) -> tuple[list[Passage], float | None]:
            if is_blank(query):
                return [], 0.0
            async with slots:
                result = await self._call(self._call_arguments(query, k))
            return _passages(result, self.name)[:k], _seconds(result)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(query)) for query in queries]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        found = [passages for passages, _ in (task.result() for task in tasks)]
        seconds = [taken for _, taken in (task.result() for task in tasks) if taken is not None]
        return TimedResults(found, seconds) if len(seconds) == len(found) else found

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

    async def _list(self) -> list[Any]:
        return await self._guarded(lambda client: _all_tools(client))

    async def _call(self, arguments: dict[str, Any]) -> Any:
        return await self._guarded(lambda client: client.call_tool(self.name, arguments))

    async def _guarded(self, ask: Any) -> Any:
        """`ask(client)` within the time limit. Whatever goes wrong with the connection ends it."""
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        session, seconds = None, seconds_left(self._timeout)
        try:
            async with asyncio.timeout(seconds):
                session = await self._connected()
                return await session.race(ask(session.client))
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:
                await self._drop(session)
                raise Unavailable(f"the MCP server {self._where} went away ({error})") from error
            raise RuntimeError(f"the MCP server {self._where}: {error}") from error
        except TimeoutError as error:
            await self._drop(session)
            raise Unavailable(f"the MCP server {self._where} gave no answer within {seconds:.3g} s") from error
        except Exception as error:
            await self._drop(session)
            if isinstance(error, Unavailable):
                raise
            raise Unavailable(f"the MCP server {self._where} failed: {type(error).__name__}: {error}") from error

    async def _connected(self) -> _Session:
        with self._lock:
            if self._session is None or self._session.ended:
                self._session = _Session(self._transport(), self._where)
            session = self._session
        await asyncio.shield(session.ready)
        return session

    async def _drop(self, session: _Session | None = None) -> None:
        with self._lock:
            if session is not None and session is not self._session:
                return
            session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _transport(self) -> Any:
        from mcp import StdioServerParameters
        from mcp.client.streamable_http import streamable_http_client

        if isinstance(self._server, str) and self._server.startswith(("http://", "https://")):
            import httpx2

            headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
            client = httpx2.AsyncClient(headers=headers, timeout=httpx2.Timeout(self._timeout))
            return streamable_http_client(self._server, http_client=client)
        words = shlex.split(self._server) if isinstance(self._server, str) else list(self._server)
        if not words:
            raise ValueError("McpTool needs a URL or a command")
        return StdioServerParameters(command=words[0], args=words[1:], env=self._env)


class _Session:
    """One connection, kept open by a task of its own (MCP's context managers must be left by the task that entered)."""

    def __init__(self, transport: Any, where: str) -> None:
        loop = asyncio.get_running_loop()
        self._where = where
        self.client: Any = None
        self.ready: asyncio.Future[None] = loop.create_future()
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
            self.ready.exception()  # retrieved: nobody may wait any more

    async def race(self, work: Any) -> Any:
        """The result of `work`, or an error if the connection ends first."""
        asked = asyncio.ensure_future(work)
        try:
            await asyncio.wait({asked, self._task}, return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                return asked.result()
            raise Unavailable(f"the MCP server {self._where} went away")
        finally:
            asked.cancel()

    async def close(self) -> None:
        self._leave.set()
        done, _ = await asyncio.wait({self._task}, timeout=10)
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


_TEXT_KEYS = ("text", "content", "contents", "snippet", "description")


def _passages(result: Any, tool: str) -> list[Passage]:
    """What a tool's result says, as passages. Raises RuntimeError if it says that it failed."""
    blocks = list(result.content)
    if result.is_error:
        said = " ".join(block.text for block in blocks if block.type == "text")
        raise RuntimeError(f"tool {tool!r}: {said or 'failed without a message'}")
    rows = _rows(result.structured_content)
    if rows is None and len(blocks) == 1 and blocks[0].type == "text":
        with contextlib.suppress(ValueError):
            rows = _rows(json.loads(blocks[0].text))
    if rows is not None:
        return [_row_passage(row, rank) for rank, row in enumerate(rows)]
    found = [_block_passage(block, rank) for rank, block in enumerate(blocks)]
    return [passage for passage in found if passage is not None]


def _seconds(result: Any) -> float | None:
    """What a server of ours says that the search took; None if it is another."""
    said = result.structured_content
    if not isinstance(said, dict) or "passages" not in said:
        return None
    seconds = said.get("seconds")
    return float(seconds) if isinstance(seconds, int | float) and 0 <= seconds < math.inf else None


def _rows(value: Any) -> list[dict[str, Any]] | None:
    """A list of objects with texts, wherever it is: the value itself, or what stands under one of its keys; an empty list
    only if there is no other."""
    candidates = [value, *value.values()] if isinstance(value, dict) else [value]
    lists = [
        rows
        for rows in candidates
        if isinstance(rows, list)
        and all(isinstance(row, dict) and any(key in row for key in _TEXT_KEYS) for row in rows)
    ]
    return max(lists, key=bool, default=None)


def _row_passage(row: Mapping[str, Any], rank: int) -> Passage:
    with contextlib.suppress(ValueError):
        return passage_of(row)
    text = next(str(row[key]) for key in _TEXT_KEYS if row.get(key) is not None or key in row)
    score = row.get("score")
    return Passage(
        id=str(row.get("id") or row.get("url") or row.get("link") or rank),
        title=str(row.get("title") or ""),
        text=text,
        score=float(score) if isinstance(score, int | float) else 1.0 / (rank + 1),
        image=str(row["image"]) if str(row.get("image", "")).startswith("data:") else "",
    )


def _block_passage(block: Any, rank: int) -> Passage | None:
    fields: dict[str, Any] = {"id": str(rank), "title": "", "text": "", "score": 1.0 / (rank + 1)}
    if block.type == "text":
        return Passage(**{**fields, "text": block.text}) if block.text.strip() else None
    if block.type == "image":
        return Passage(**fields, image=f"data:{block.mime_type};base64,{block.data}")
    if block.type == "resource_link":
        text = block.description or block.uri
        return Passage(**{**fields, "id": str(block.uri), "title": block.title or block.name, "text": str(text)})
    if block.type == "resource":
        resource = block.resource
        text = getattr(resource, "text", None)
        if text is not None:
            return Passage(**{**fields, "id": str(resource.uri), "text": text})
        if str(resource.mime_type or "").startswith("image/"):
            return Passage(
                **{**fields, "id": str(resource.uri)}, image=f"data:{resource.mime_type};base64,{resource.blob}"
            )
    return None  # sound, and whatever comes next


@contextlib.contextmanager
def _package() -> Any:
    try:
        yield
    except ImportError as error:
        raise ValueError(f"MCP needs further packages ({error}): run {install_hint('serve')}") from error
