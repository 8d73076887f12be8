r"""Serves knowledge bases over HTTP: our schema, the endpoints of Search-R1, SkyRL, RouteRAG, VRAG and R1-Searcher, MCP.

    python -m launch.serve_kb --kb=wiki=kb/hotpotqa --kb=tables=kb/tables --host=0.0.0.0 --port=8000 --token_file=token.txt
    python -m launch.serve_kb --kb=wiki:passage=kb/dense --kb=wiki:graph=kb/graph     # one knowledge base, two modes
    python -m launch.serve_kb --config=configs/serve_kb.py:wiki=kb/hotpotqa --config.limits.k=100
    python -m launch.serve_kb --kb=wiki=kb/hotpotqa --mcp=stdio                        # for an MCP client to start

SIGTERM or Ctrl-C: the server takes no new connections, finishes the running requests and ends.
"""

from __future__ import annotations

from routerl_jax.parallel.platform import tune_process

if __name__ == "__main__":
    tune_process()

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from absl import flags
from ml_collections import config_flags

from launch.command import read_config_as, start

if TYPE_CHECKING:
    from routerl_jax.extras.kb_server.app import ServeConfig

FLAGS = flags.FLAGS
_OVERRIDES = ("host", "port", "token_file", "max_batch", "max_wait_ms", "max_queue", "mcp")


def define_flags() -> None:
    from routerl_jax.extras.kb_server.app import ServeConfig

    default = ServeConfig()
    config_flags.DEFINE_config_file("config", None, "configs/serve_kb.py; keys as --config.key=value.")
    flags.DEFINE_multi_string("kb", [], "NAME=DIRECTORY, or NAME:MODE=DIRECTORY; may be repeated.")
    flags.DEFINE_string("host", None, f"Interface to listen at ({default.host}).")
    flags.DEFINE_integer("port", None, f"Port ({default.port}); 0 takes a free one.")
    flags.DEFINE_string("token_file", None, "File with the token that clients must give.")
    flags.DEFINE_integer("max_batch", None, f"Queries in one call of a knowledge base ({default.max_batch}).")
    flags.DEFINE_float("max_wait_ms", None, f"How long an idle knowledge base waits ({default.max_wait_ms:g}).")
    flags.DEFINE_integer("max_queue", None, f"Queries that may wait; more are refused ({default.max_queue}).")
    flags.DEFINE_enum("mcp", None, ["off", "http", "stdio"], "Offer the knowledge bases as MCP tools.")
    for name in ("token_file", "max_batch", "max_wait_ms", "max_queue"):
        flags.DEFINE_alias(name.replace("_", "-"), name)


def schemas() -> dict[str, type]:
    """The classes of configurations that --config may name, by their description."""
    from routerl_jax.extras.kb_server.app import ServeConfig

    return {"A server": ServeConfig}


def main(_: Sequence[str]) -> None:
    from routerl_jax.extras.kb_server.app import open_served, serve
    from routerl_jax.services.asgi import check_port

    config = read_serve_config()
    if config.mcp != "stdio":
        check_port(config.host, config.port)
    served = open_served(config)
    if config.mcp == "off":
        serve(served, config)
        return
    from routerl_jax.extras.kb_server.mcp import (  # the `mcp` package is loaded where it is asked for
        http_app,
        serve_stdio,
    )

    if config.mcp == "stdio":
        serve_stdio(served, config)
    else:
        serve(served, config, functools.partial(http_app, host=config.host))


def read_serve_config() -> ServeConfig:
    """The configuration file, if one is given, with the flags that are given in place of its fields."""
    from routerl_jax.extras.kb_server.app import ServeConfig

    config = read_config_as(ServeConfig) if FLAGS["config"].present else ServeConfig()
    changes: dict[str, Any] = {key: FLAGS[key].value for key in _OVERRIDES if FLAGS[key].value is not None}
    if FLAGS.kb:
        pairs, names = dict(config.knowledge_bases), set()
        for pair in FLAGS.kb:
            name, equals, directory = pair.partition("=")
            if not (name and equals and directory):
                raise ValueError(f"--kb={pair}: write --kb=NAME=DIRECTORY")
            if name in names:
                raise ValueError(f"--kb={pair}: there is another --kb={name}=..; give them different names or modes")
            names.add(name)
            pairs[name] = directory
        changes["knowledge_bases"] = pairs
    return dataclasses.replace(config, **changes)


if __name__ == "__main__":
    start(main, define_flags, schemas)
