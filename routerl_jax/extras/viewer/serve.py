"""Runs the viewer's server."""

from __future__ import annotations

from collections.abc import Sequence

from routerl_jax.extras.viewer.app import create_app
from routerl_jax.extras.viewer.runs import Run
from routerl_jax.services.asgi import bound_hosts, run_server


def serve(runs: Sequence[Run], host: str, port: int) -> None:
    """Serves until SIGTERM or SIGINT; prints the address.

    Anybody who reaches the host and port can read the records; pages of other sites can't (`services.asgi.SameSite`).

    Raises:
      ValueError: it can't listen there, or a package is missing.
    """
    app = create_app(runs, bound_hosts(host))
    run_server(
        app,
        host,
        port,
        lambda url: "\n".join([f"{url}/", *(f"  {run.name}: {run.path}" for run in runs)]),
        shutdown_seconds=2,
    )
