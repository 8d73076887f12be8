"""`python -m tests.knowledge.mcp_servers KIND`: MCP servers over stdio, ours and a foreign one with tools of all sorts."""

from __future__ import annotations

import asyncio
import base64
import os
import sys

from mcp import types
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


def foreign() -> MCPServer:
    """Tools as other people write them."""
    server = MCPServer("foreign")

    @server.tool()
    def rows(question: str, limit: int = 3) -> list[dict[str, str]]:
        return [{"title": f"t{i}", "url": f"http://x/{i}", "snippet": f"{question} {i}"} for i in range(limit)]

    @server.tool()
    def plain(query: str) -> str:
        return f"all about {query}"

    @server.tool(structured_output=False)
    def mixed(query: str) -> list[types.ContentBlock]:
        blob = types.BlobResourceContents(uri="kb://p", mime_type="image/png", blob=PNG)
        return [
            types.TextContent(text=f"seen: {query}"),
            types.ImageContent(data=PNG, mime_type="image/png"),
            types.EmbeddedResource(resource=types.TextResourceContents(uri="kb://t", text="in a resource")),
            types.EmbeddedResource(resource=blob),
            types.AudioContent(data=base64.b64encode(b"la").decode(), mime_type="audio/wav"),
        ]

    @server.tool()
    def fails(query: str) -> str:
        raise ToolError(f"can't do {query}")

    @server.tool()
    async def hangs(query: str) -> str:
        if query == "hang":
            await asyncio.sleep(600)
        if query == "slow":
            await asyncio.sleep(3)
        return query

    @server.tool()
    def crashes(query: str) -> str:
        if query == "crash":
            os._exit(1)
        return f"{query} {os.getpid()}"

    return server


def main(kind: str) -> None:
    if kind == "foreign":
        foreign().run("stdio")
        return
    from routerl_jax.extras.kb_server.app import Served
    from routerl_jax.extras.kb_server.mcp import serve_stdio
    from tests.extras.kb_server.servers import EchoKB

    serve_stdio([Served("wiki", {"passage": EchoKB(), "graph": EchoKB(cost=2.0)})])


if __name__ == "__main__":
    main(sys.argv[1])
