"""The configuration of `launch.serve_kb`: knowledge bases, address and limits."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Literal

from absl import logging

from routerl_jax.core.config import Count, Range, checked
from routerl_jax.extras.kb_server.app import Served, ServerSettings
from routerl_jax.knowledge.base import KnowledgeBase

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
