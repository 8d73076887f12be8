"""Knowledge bases as tools of the Model Context Protocol."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from routerl_jax.core.packages import needs
from routerl_jax.core.types import Passage, function_name
from routerl_jax.extras.kb_server import app as serving
from routerl_jax.extras.kb_server.app import Served, ServerSettings
from routerl_jax.extras.kb_server.requests import Limits, SearchRequest, read_k, read_query
from routerl_jax.knowledge.client.schema import passage_json
from routerl_jax.services.asgi import Refusal

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


def mcp_server(behind: serving.Server) -> Server[Any]:
    """An MCP server with one tool per knowledge base, `search_NAME(query, k)`, with arguments `mode` or `image` if they apply.

    It searches through `behind`, so its calls share batches, limits and counters with other requests.

    A result has the passages and the seconds of the search as structured content, the passages as text, and their pictures as
    image content. An error of a call is the tool's error (`isError`), which the model can read.
    """
    with needs("MCP", "serve"):
        from mcp import types
        from mcp.server import Server

    limits = behind.settings.limits
    tools = {function_name(entry.name): entry for entry in behind.served.values()}

    async def list_tools(context: Any, params: Any) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[_tool(name, entry, limits) for name, entry in tools.items()])

    async def call_tool(context: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        try:
            if params.name not in tools:
                raise Refusal(404, "unknown_tool", f"no tool {params.name!r}; there are: {', '.join(tools)}")
            served = tools[params.name]
            request = _read_call(params.arguments or {}, _tool(params.name, served, limits).input_schema, limits)
            async with asyncio.timeout(limits.seconds):
                _, _, results = await behind.search(served, request)
        except TimeoutError:
            return _error(f"no result within {limits.seconds:g} s")
        except Exception as error:
            return _error(str(error) if isinstance(error, Refusal | ValueError) else f"{type(error).__name__}: {error}")
        return await asyncio.to_thread(_result, results[0], results.seconds[0])

    return Server("routerl_jax", version="1", on_list_tools=list_tools, on_call_tool=call_tool)


def serve_stdio(served: Sequence[Served], settings: ServerSettings | None = None) -> None:
    """Serves one client over standard input and output, until it closes them."""
    server = mcp_server(serving.Server(served, settings or ServerSettings()))
    with needs("MCP", "serve"):
        from mcp.server.stdio import stdio_server

    async def work() -> None:
        async with stdio_server() as (reader, writer):
            await server.run(reader, writer, server.create_initialization_options())

    asyncio.run(work())


def http_app(behind: serving.Server, *, host: str = "127.0.0.1") -> Starlette:
    """Streamable HTTP at /mcp, for `kb_server.app.create_app`. It is stateless: any replica may answer any request.

    On the loopback interface, only requests for that host are answered, as a protection against DNS rebinding.
    """
    size = behind.settings.limits.body_bytes
    return mcp_server(behind).streamable_http_app(
        stateless_http=True, json_response=True, host=host, max_request_body_size=size
    )


def _tool(name: str, served: Served, limits: Limits) -> Any:
    from mcp import types

    description = served.describe()
    reads = sorted({kind for mode in description["modes"].values() for kind in mode["reads"]})
    properties: dict[str, Any] = {}
    if "text" in reads:
        properties["query"] = {"type": "string", "description": "What to search for."}
    if "image" in reads:
        properties["image"] = {"type": "string", "description": "A picture to search for: data:image/png;base64,..."}
    properties["k"] = {"type": "integer", "minimum": 1, "maximum": limits.k}
    properties["k"] |= {"default": limits.default(5), "description": "Passages."}
    if len(served.modes) > 1:
        properties["mode"] = {"type": "string", "enum": list(served.modes), "default": description["default_mode"]}
    schema: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": False}
    if "question" in reads:
        properties["question"] = {"type": "string", "description": "The user's own question, which the search is for."}
    if "url" in reads:
        properties["url"] = {"type": "string", "description": "Where the picture stands on the web."}
    if "image" not in reads:
        schema["required"] = ["query"]
    size = "" if description["size"] is None else f" of {description['size']:,} passages"
    return types.Tool(
        name=name,
        description=f"Searches the knowledge base {served.name!r}{size} and returns the best passages.",
        input_schema=schema,
        output_schema=_OUTPUT,
        annotations=types.ToolAnnotations(read_only_hint=True, idempotent_hint=True),
    )


def _read_call(arguments: Mapping[str, Any], schema: Mapping[str, Any], limits: Limits) -> SearchRequest:
    properties = schema["properties"]
    unknown = sorted(set(arguments) - set(properties))
    if unknown:
        raise Refusal(400, "invalid_request", f"unknown argument {unknown[0]!r}; known: {', '.join(properties)}")
    question: Any = arguments.get("query", "")
    extra_fields = {key: arguments[key] for key in ("image", "question", "url") if arguments.get(key)}
    if extra_fields:
        question = {"text": question or None, **extra_fields}
    query = read_query(question, "query", limits)
    return SearchRequest(
        queries=[query], mode=arguments.get("mode"), k=read_k(arguments.get("k", limits.default(5)), limits)
    )


def _result(retrieved: Sequence[Passage], seconds: float) -> Any:
    from mcp import types

    passages = [passage_json(passage) for passage in retrieved]
    texts = [f"Doc {i}(Title: {passage.title}) {passage.text}" for i, passage in enumerate(retrieved, 1)]
    content: list[Any] = [types.TextContent(text="\n".join(texts) or "Nothing was found.")]
    for passage in passages:
        head, _, data = passage["image"].partition(";base64,")
        if data:
            content.append(types.ImageContent(data=data, mime_type=head.removeprefix("data:")))
    return types.CallToolResult(content=content, structured_content={"passages": passages, "seconds": seconds})


def _error(message: str) -> Any:
    from mcp import types

    return types.CallToolResult(content=[types.TextContent(text=message)], is_error=True)
