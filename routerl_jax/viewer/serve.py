"""The viewer under uvicorn, for the one who looks."""

from __future__ import annotations

from collections.abc import Sequence

from routerl_jax.core.extras import needs
from routerl_jax.core.listening import listen
from routerl_jax.viewer.app import create_app
from routerl_jax.viewer.runs import Run


def serve(runs: Sequence[Run], host: str, port: int) -> None:
    """Serves until SIGTERM or SIGINT; prints the address.

    Anybody who reaches the host and port can read the records. A host other than this machine's own is answered under any name.

    Raises:
      ValueError: nobody can listen there, or a package is missing.
    """
    with needs("the web page", "serve"):
        import uvicorn
    own = host in ("127.0.0.1", "localhost", "::1")
    app = create_app(runs, **({} if own else {"hosts": ("*",)}))
    with listen(host, port) as listener:
        shown = "127.0.0.1" if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
        print(f"http://{shown}:{listener.getsockname()[1]}/", flush=True)
        for run in runs:
            print(f"  {run.name}: {run.path}", flush=True)
        config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=2)
        uvicorn.Server(config).run(sockets=[listener])
