"""The configuration of `launch.serve_kb` (knowledge bases, address and limits), and the server that it describes."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from absl import logging

from routerl_jax.core.config import Count, Range, checked
from routerl_jax.extras.kb_server.app import Served, ServerSettings, create_app
from routerl_jax.knowledge.base import KnowledgeBase
from routerl_jax.services.asgi import bound_hosts, read_token, run_server

# --- The configuration of `launch.serve_kb`: knowledge bases, address and limits. ---


_WARM_WORDS = (6, 20, 36, 52)  # lengths of queries for which encoders are compiled at the start


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class ServeConfig(ServerSettings):
    """Configuration of a server. Further settings are those of `ServerSettings`, `BatchConfig` and `Limits`.

    Attributes:
      knowledge_bases: NAME or NAME:MODE -> directory (or URL, which makes this server a gateway). The first name is also
        served at the root; the first mode of a name is its default.
      host, port: address to listen at. 0.0.0.0 means all interfaces; set a token then.
      token_file: file with the token that clients must give (`Authorization: Bearer`); "" for none.
      mcp: "http" also offers the knowledge bases as MCP tools at /mcp; "stdio" offers only these, on standard input and
        output, without HTTP.
      warm_up: make a few searches at the start, so that no client waits for compilation.
      index: search with this backend instead of those of the builds. Knowledge bases without an index (bm25, graph, served
        ones) are not affected.
      shutdown_seconds: seconds that requests may still take after SIGTERM.
    """

    knowledge_bases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    host: str = "127.0.0.1"
    port: Annotated[int, Range(least=0, most=65_535)] = 8000
    token_file: str = ""
    mcp: Literal["off", "http", "stdio"] = "off"
    warm_up: bool = True
    index: str | None = None
    shutdown_seconds: Count = 30


def open_served(config: ServeConfig) -> list[Served]:
    """Opens all knowledge bases. The same directory under two names is opened once. Raises ValueError like `load_kb`."""
    from routerl_jax.knowledge.load import has_index, load_kb

    if not config.knowledge_bases:
        raise ValueError("there is nothing to serve: give --kb=NAME=DIRECTORY, or knowledge_bases in the configuration")
    sources: dict[str, dict[str, str]] = {}
    for key, source in config.knowledge_bases.items():
        name, _, mode = key.partition(":")
        modes = sources.setdefault(name, {})
        if (mode := mode or "default") in modes:
            raise ValueError(f"knowledge base {name!r} has two modes {mode!r}")
        modes[mode] = source
    opened: dict[str, KnowledgeBase] = {}
    for source in dict.fromkeys(path for modes in sources.values() for path in modes.values()):
        remote = "://" in source
        opened[source] = load_kb(source, index=config.index if config.index and has_index(source) else None)
        if config.warm_up and not remote:
            warm_up(opened[source])
    return [Served(name, {mode: opened[path] for mode, path in modes.items()}) for name, modes in sources.items()]


def warm_up(kb: KnowledgeBase) -> None:
    """Searches for texts of common lengths. Errors are ignored; clients will see them."""
    if "text" not in kb.reads:
        return
    for words in _WARM_WORDS:
        try:
            kb.search([" ".join(["warm"] * words)], 5)
        except Exception as error:
            logging.warning("knowledge base %r failed in the warm-up: %s: %s", kb.name, type(error).__name__, error)
            return


# --- Runs the application of served knowledge bases. Running requests are finished at the end. ---


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
