"""The ASGI application of the viewer: the files of the page, and its data as JSON.

It only reads. Pages of other sites are refused (`services.asgi.SameSite`). The page may run only its own script files, whatever
a record contains.
"""

from __future__ import annotations

import contextlib
import pathlib
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from routerl_jax.core.packages import needs
from routerl_jax.extras.viewer.curves import Curves
from routerl_jax.extras.viewer.details import brief, details, picture, row_of
from routerl_jax.extras.viewer.index import (
    Follower,
    Index,
    facets,
    masks,
    ordered,
    passing,
    read_filter,
    whole_number,
)
from routerl_jax.extras.viewer.runs import Run
from routerl_jax.services.asgi import LOOPBACK, Address, Refusal, application, bound_hosts, json_reply, run_server

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import BaseRoute
    from starlette.types import ASGIApp, Lifespan, Receive, Scope, Send

STATIC = pathlib.Path(__file__).parent / "static"
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


class ViewerState:
    """The state behind the application: runs, their curves, the index of their episodes."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = list(runs)
        self.index = Index(self.runs)
        self.follower = Follower(self.runs, self.index)
        self._curves: dict[str, Curves] = {}

    def curves(self, name: str) -> Curves:
        """The metrics of a run. Raises ValueError if there is none of that name."""
        run = next((run for run in self.runs if run.name == name), None)
        if run is None:
            raise ValueError(f"there is no run {name!r} here; there are: {', '.join(run.name for run in self.runs)}")
        return self._curves.setdefault(name, Curves(run))

    def status(self) -> dict[str, Any]:
        """The status that the page polls: the progress of each run, and the version and size of the index."""
        runs = []
        for run in list(self.runs):
            rows, config = self.curves(run.name).rows, run.config()
            runs.append(
                {
                    "name": run.name,
                    "path": str(run.path),
                    **run.state(),
                    "recipe": config.get("recipe", ""),
                    "model": config.get("model", {}).get("path", ""),
                    "seed": config.get("seed"),
                    "steps": config.get("steps"),
                    "rows": len(rows),
                    "step": rows[-1]["step"] if rows else None,
                    "stage": rows[-1].get("stage", "") if rows else "",
                    "seconds": rows[-1].get("timing_s/step") if rows else None,
                }
            )
        skipped = sum(self.follower.skipped.values())
        return {
            "runs": runs,
            "version": self.index.version,
            "episodes": len(self.index),
            "settled": self.follower.settled,
            "skipped": skipped,
        }

    def episodes(self, query: Sequence[tuple[str, str]]) -> dict[str, Any]:
        """A page of the episodes that pass a filter, counts for each value of the filters, and the milliseconds it took."""
        started = time.perf_counter()
        chosen = read_filter(query)
        version = self.index.version
        rows = self.index.snapshot()
        field_masks = masks(self.index, rows, chosen)
        numbers = ordered(rows, passing(field_masks), chosen.order)
        page = numbers[chosen.offset : chosen.offset + chosen.limit]
        return {
            "version": version,
            "total": len(numbers),
            "offset": chosen.offset,
            "rows": [brief(self.index, rows, int(row)) for row in page],
            "facets": facets(self.index, rows, field_masks),
            "ms": round(1000 * (time.perf_counter() - started), 1),
        }


def create_app(runs: Sequence[Run], hosts: Collection[str] = LOOPBACK) -> Starlette:
    """The application over these runs; `app.state.viewer` is its ViewerState.

    Args:
      hosts: names that a request may give as its host; "*" for any.
    """
    with needs("the web page", "serve"):
        from starlette.routing import Route
    viewer = ViewerState(runs)

    def answer(find: Callable[[Request], Any]) -> Callable[[Request], Response]:
        def endpoint(request: Request) -> Response:
            try:
                return json_reply(find(request))
            except ValueError as error:
                raise Refusal(400, "invalid", str(error)) from error

        return endpoint

    def curves(request: Request) -> Curves:
        return viewer.curves(request.query_params.get("run", ""))

    def row(request: Request) -> int:
        return row_of(viewer.index, request.query_params.get("key", ""))

    def show(request: Request) -> Response:
        number = request.query_params.get("n", "")
        return picture_reply(lambda: picture(viewer.index, row(request), whole_number("n", number)))

    def columns(request: Request) -> dict[str, Any]:
        params = request.query_params
        return curves(request).columns(whole_number("after", params.get("after", "0")), params.get("mark", ""))

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        viewer.follower.start()
        yield
        viewer.follower.stop()

    routes = [
        Route("/api/state", answer(lambda _: viewer.status())),
        Route("/api/metrics", answer(columns)),
        Route("/api/health", answer(lambda request: curves(request).health())),
        Route("/api/episodes", answer(lambda request: viewer.episodes(request.query_params.multi_items()))),
        Route("/api/episode", answer(lambda request: details(viewer.index, row(request)))),
        Route("/api/picture", show),
    ]
    app = page_app("index.html", routes, lifespan, hosts)
    app.state.viewer = viewer
    return app


# --- what this page and that of extras/chat share ---


def page_app(
    page: str, routes: Sequence[BaseRoute], lifespan: Lifespan[Starlette], hosts: Collection[str] = LOOPBACK
) -> Starlette:
    """The application of a page in `static`, with its files and the routes of its data."""
    with needs("the web page", "serve"):
        from starlette.responses import FileResponse
        from starlette.routing import Mount, Route
        from starlette.staticfiles import StaticFiles
    files = [Route("/", lambda _: FileResponse(STATIC / page)), Mount("/static", StaticFiles(directory=STATIC))]
    app = application([*files, *routes], lifespan, hosts=hosts)
    app.add_middleware(SecurityHeaders)
    return app


def picture_reply(find: Callable[[], tuple[bytes, str]]) -> Response:
    """The picture that `find` gives, as bytes and format. Raises Refusal 404 if it raises ValueError or OSError."""
    from starlette.responses import Response

    try:
        content, form = find()
    except (ValueError, OSError) as error:
        raise Refusal(404, "no_picture", str(error)) from error
    return Response(content, media_type=f"image/{form}", headers={"cache-control": "private, max-age=600"})


class SecurityHeaders:
    """Middleware that adds _HEADERS to every reply. A reply that does not say how long it may be cached is checked again each
    time."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def guarded(message: Any) -> None:
            if message["type"] == "http.response.start":
                names = {name for name, _ in message["headers"]}
                more = _HEADERS if b"cache-control" in names else {**_HEADERS, "cache-control": "no-cache"}
                message["headers"] = [*message["headers"], *((k.encode(), v.encode()) for k, v in more.items())]
            await send(message)

        await self._app(scope, receive, guarded if scope["type"] == "http" else send)


def serve(runs: Sequence[Run], host: str, port: int) -> None:
    """Serves until SIGTERM or SIGINT; prints the address.

    Anybody who reaches the host and port can read the records; pages of other sites can't (`services.asgi.SameSite`).

    Raises:
      ValueError: it can't listen there, or a package is missing.
    """
    run_server(
        create_app(runs, bound_hosts(host)),
        Address(host=host, port=port, shutdown_seconds=2),
        lambda url: "\n".join([f"{url}/", *(f"  {run.name}: {run.path}" for run in runs)]),
    )
