"""Runs the application with uvicorn: one process, uvloop and httptools. Running requests are finished at the end."""

from __future__ import annotations

import functools
import os
import socket
import sys
from collections.abc import Sequence

from routerl_jax.core.extras import needs
from routerl_jax.knowledge.serving.app import Served, create_app
from routerl_jax.knowledge.serving.config import ServeConfig, read_token


def serve(served: Sequence[Served], config: ServeConfig) -> None:
    """Serves until SIGTERM or SIGINT. Raises ValueError if the port is taken or a package is missing."""
    with needs("serving", "serve"):
        import uvicorn
    mcp = None
    if config.mcp == "http":
        from routerl_jax.knowledge.serving.mcp import http_app

        mcp = functools.partial(http_app, host=config.host)
    app = create_app(served, config, token=read_token(config.token_file), mcp=mcp)
    listener = _listen(config.host, config.port)
    port = listener.getsockname()[1]
    print(_greeting(served, config, port), flush=True)
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=config.shutdown_seconds,
            timeout_keep_alive=75,
        )
    )
    try:
        with listener:
            server.run(sockets=[listener])
    finally:
        if app.state.server.searching:  # Python would wait for its thread at exit, perhaps forever
            print("a search that does not end is given up", file=sys.stderr, flush=True)
            os._exit(1)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        raise ValueError(f"can't listen at {host}:{port} ({error.strerror}); give another --port or --host") from error
    return listener


def _greeting(served: Sequence[Served], config: ServeConfig, port: int) -> str:
    host = "127.0.0.1" if config.host in ("0.0.0.0", "::") else config.host
    url = f"http://{host}:{port}"
    lines = [f"serving at {url} (a page to try it: {url}/)"]
    for entry in served:
        description = entry.describe()
        size = "" if description["size"] is None else f", {description['size']:,} passages"
        lines.append(f"  {entry.name}: {'|'.join(entry.modes)}{size}    rj.load_kb({f'{url}/{entry.name}'!r})")
    token = ' -H "Authorization: Bearer $(cat TOKEN_FILE)"' if config.token_file else ""
    body = """'{"queries": ["Who directed Doctor Strange?"], "k": 3}'"""
    lines.append(f"  curl{token} -H 'Content-Type: application/json' -d {body} {url}/v1/search")
    lines.append(
        "  Search-R1, verl, SkyRL: /retrieve; RouteRAG: POST /search; VRAG: GET /search; R1-Searcher: /queries"
    )
    if config.mcp == "http":
        lines.append(f"  MCP: {url}/mcp")
    return "\n".join(lines)
