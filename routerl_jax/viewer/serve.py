"""Runs the viewer's server."""

from __future__ import annotations

from collections.abc import Sequence

from routerl_jax.remote.asgi import run_server
from routerl_jax.viewer.app import create_app
from routerl_jax.viewer.runs import Run


def serve(runs: Sequence[Run], host: str, port: int) -> None:
    """Serves until SIGTERM or SIGINT; prints the address.

    Anybody who reaches the host and port can read the records. On this machine's own address a request must name it as its
    host; on others any name will do.

    Raises:
      ValueError: it can't listen there, or a package is missing.
    """
    own = host in ("127.0.0.1", "localhost", "::1")
    app = create_app(runs, **({} if own else {"hosts": ("*",)}))
    run_server(
        app,
        host,
        port,
        lambda url: "\n".join([f"{url}/", *(f"  {run.name}: {run.path}" for run in runs)]),
        shutdown_seconds=2,
    )
