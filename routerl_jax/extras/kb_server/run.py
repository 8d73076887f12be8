"""Runs the application of served knowledge bases. Running requests are finished at the end."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence

from routerl_jax.extras.kb_server.app import Served, create_app
from routerl_jax.extras.kb_server.config import ServeConfig
from routerl_jax.services.asgi import bound_hosts, read_token, run_server


def serve(served: Sequence[Served], config: ServeConfig) -> None:
    """Serves until SIGTERM or SIGINT. Raises ValueError if the port is taken or a package is missing."""
    mcp = None
    if config.mcp == "http":
        from routerl_jax.extras.kb_server.mcp import http_app

        mcp = functools.partial(http_app, host=config.host)
    app = create_app(served, config, token=read_token(config.token_file), hosts=bound_hosts(config.host), mcp=mcp)
    greeting = functools.partial(_greeting, served, config)
    try:
        run_server(app, config.host, config.port, greeting, shutdown_seconds=config.shutdown_seconds)
    finally:
        if app.state.server.searching:  # Python would wait for its thread at exit, perhaps forever
            print("a search that does not end is given up", file=sys.stderr, flush=True)
            os._exit(1)


def _greeting(served: Sequence[Served], config: ServeConfig, url: str) -> str:
    lines = [f"serving at {url} (a page to try it: {url}/)"]
    for entry in served:
        description = entry.describe()
        size = "" if description["size"] is None else f", {description['size']:,} passages"
        modes = f" (modes {', '.join(entry.modes)})" if len(entry.modes) > 1 else ""
        lines.append(f"  {entry.name}{modes}{size}    rj.load_kb({f'{url}/{entry.name}'!r})")
    token = ' -H "Authorization: Bearer $(cat TOKEN_FILE)"' if config.token_file else ""
    body = """'{"queries": ["Who directed Doctor Strange?"], "k": 3}'"""
    lines.append(f"  curl{token} -H 'Content-Type: application/json' -d {body} {url}/v1/search")
    lines.append(
        "  Search-R1, verl, SkyRL: /retrieve; RouteRAG: POST /search; VRAG: GET /search; R1-Searcher: /queries"
    )
    if config.mcp == "http":
        lines.append(f"  MCP: {url}/mcp")
    return "\n".join(lines)
