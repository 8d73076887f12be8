"""The application of the viewer: the files of the page, and its data as JSON, which is the state of runs, their curves and
health, lists of episodes, and one episode with its relatives.

It only reads. Pages of other sites are refused (`services.asgi.SameSite`). The page may run only its own script files, whatever
a record contains.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import pathlib
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Int

from routerl_jax.core.config import from_config_dict
from routerl_jax.core.packages import needs
from routerl_jax.evaluation.records import picture_path
from routerl_jax.evaluation.trajectory import looks
from routerl_jax.extras.viewer.index import (
    FAILURES,
    LAST_BIT,
    Follower,
    Index,
    facets,
    masks,
    ordered,
    passing,
    read_filter,
    read_record,
    whole_number,
)
from routerl_jax.extras.viewer.runs import Run
from routerl_jax.models.images import encoded_image, is_data
from routerl_jax.services.asgi import LOOPBACK, Address, Refusal, application, bound_hosts, json_reply, run_server
from routerl_jax.training.callbacks import Alarm
from routerl_jax.training.loggers import read_metrics
from routerl_jax.training.sections import WatchConfig
from routerl_jax.training.watch import Watch

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
      hosts: names that a request may give as its host; "*" for any. If other machines may ask, only pictures in the
        directories of the runs are shown.
    """
    with needs("the web page", "serve"):
        from starlette.routing import Route
    viewer, local = ViewerState(runs), set(hosts) <= set(LOOPBACK)

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
        return picture_reply(lambda: picture(viewer.index, row(request), whole_number("n", number), local))

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


# --- The metrics of a run as columns, sent as they grow, and the health panel, their state according to config.watch. ---


# Metrics of the health panel, and what each means. The metrics that config.watch bounds are in the panel, too.
_VITALS = {
    "reward/total": "mean reward of the step",
    "rollout/frac_reward_zero_std": "groups whose attempts are all rewarded alike: nothing to learn from",
    "rollout/entropy": "uncertainty per sampled token, in nats",
    "actor/kl": "distance from the reference policy",
    "actor/grad_norm": "length of the gradient before it is clipped",
    "actor/clip_fraction": "tokens whose ratio was clipped",
    "ratio/effective_sample_share": "how much of the step's data still counts under the current weights",
    "sampler_gap/mean": "sampler and learner disagree on log-probabilities; 0 if numerics agree",
    "importance/kl": "how far the weights that sampled are from the learner's",
    "importance/capped_share": "tokens whose importance was cut off",
    "importance/masked_tokens": "tokens of sequences that were left out, too far off the policy",
    "rollout/well_formed_rate": "episodes that keep to the protocol",
    "rollout/invalid_action_rate": "turns without an action that can be executed",
    "rollout/truncated_rate": "episodes that a token limit ended",
    "rollout/answered_rate": "episodes with an answer",
    "rollout/repeated_search_rate": "searches that ask the same again",
    "rollout/tool_error_rate": "tool calls that failed",
}

_Stamp = tuple[int, ...]  # inode, size and time of change of a file; () where there is none
_Read = tuple[_Stamp, list[dict[str, Any]]]


class Curves:
    """The metrics of one run, read again when their file changes."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._read: _Read = ((), [])
        self._health: tuple[_Stamp, dict[str, Any]] | None = None

    @property
    def rows(self) -> list[dict[str, Any]]:
        """All rows of metrics.jsonl so far."""
        return self._latest()[1]

    def _latest(self) -> _Read:
        """The rows, and which state of the file they are of. Several threads ask, so both are kept as one value."""
        try:
            status = (self.run.path / "metrics.jsonl").stat()
        except OSError:
            return (), []
        stamp = (status.st_ino, status.st_size, status.st_mtime_ns)
        read = self._read
        if stamp != read[0]:
            read = self._read = stamp, read_metrics(self.run.path)
        return read

    def columns(self, after: int, mark: str) -> dict[str, Any]:
        """Steps and values of every metric from row `after` on. From the first row on if the file is no longer the one of
        `mark`: a resumed run writes its last rows again."""
        stamp, rows = self._latest()
        current = str(stamp[0]) if stamp else ""  # an inode may be larger than numbers of JavaScript are exact
        first = after if mark == current and after <= len(rows) else 0
        new = rows[first:]
        names = sorted({name for row in new for name, value in row.items() if _is_number(value) and name != "step"})
        return {
            "mark": current,
            "first": first,
            "count": len(rows),
            "steps": [row["step"] for row in new],
            "stages": [row.get("stage", "") for row in new],
            "values": {name: [_rounded(row.get(name)) for row in new] for name in names},
        }

    def health(self) -> dict[str, Any]:
        """Alarms and vitals.

        `alarms` are the steps at which config.watch stops a run, with the reason. `vitals` has for each metric its last value,
        its bound, its meaning, and whether it is "good", "bad" (out of its bounds now) or "unwatched".
        """
        stamp, rows = self._latest()
        cached = self._health
        if cached is None or cached[0] != stamp:
            try:
                config = from_config_dict(WatchConfig, self.run.config().get("watch", {}))
            except ValueError:  # of another version
                config = WatchConfig()
            cached = self._health = stamp, _health(rows, config)
        return cached[1]


def _health(rows: Sequence[Mapping[str, Any]], config: WatchConfig) -> dict[str, Any]:
    watch = Watch(config)
    alarms = _alarms(watch, rows)
    bad = {name for name, count in watch.state()["bad"].items() if count}
    bounds = _bounds(config)
    vitals = []
    for name in dict.fromkeys((*bounds, *_VITALS)):
        values = [row[name] for row in rows if name in row]
        if values:
            state = "unwatched" if name not in bounds else "bad" if name in bad else "good"
            vitals.append(
                {
                    "metric": name,
                    "last": _rounded(values[-1]),
                    "recent": [_rounded(value) for value in values[-60:]],
                    "bound": bounds.get(name, ""),
                    "meaning": _VITALS.get(name, ""),
                    "state": "bad" if values[-1] is None else state,
                }
            )
    order = {"bad": 0, "good": 1, "unwatched": 2}
    vitals.sort(key=lambda vital: order[vital["state"]])
    return {
        "alarms": [dataclasses.asdict(alarm) for alarm in alarms[:50]],
        "vitals": vitals,
        "patience": config.patience,
    }


def _alarms(watch: Watch, rows: Sequence[Mapping[str, Any]]) -> list[Alarm]:
    """The alarms of these rows. An alarm that lasts is given once, at its beginning."""
    alarms: list[Alarm] = []
    lasting = ""
    for row in rows:
        try:
            # null stands for a value that was not finite (training.loggers)
            numbers = {
                name: math.nan if value is None else value
                for name, value in row.items()
                if value is None or _is_number(value)
            }
            alarm = watch.judge(row["step"], row.get("stage", ""), numbers)
        except ValueError as error:  # a bound of a metric that there isn't
            return [*alarms, Alarm(row["step"], "config.watch", str(error))]
        if alarm is not None and alarm.metric != lasting:
            alarms.append(alarm)
        lasting = alarm.metric if alarm else ""
    return alarms


def _bounds(config: WatchConfig) -> dict[str, str]:
    bounds: dict[str, list[str]] = {}
    for name, least in config.least.items():
        bounds.setdefault(name, []).append(f"≥ {least:g}")
    for name, most in config.most.items():
        bounds.setdefault(name, []).append(f"≤ {most:g}")
    for name, share in config.falls.items():
        bounds.setdefault(name, []).append(f"≥ {share:g} × best")
    for name, drop in config.drops.items():
        bounds.setdefault(name, []).append(f"≥ best − {drop:g}")
    return {name: ", ".join(texts) for name, texts in bounds.items()}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _rounded(value: Any) -> float | None:
    return float(f"{value:.6g}") if _is_number(value) and math.isfinite(value) else None


# --- One episode: its record, its group, its forks, and other episodes of the same question. ---


_RELATED = 200  # most related episodes of a kind


def key_of(index: Index, row: int) -> str:
    """The name of a record in the page's address: its run, file and line."""
    location = index.location_of(row)
    run = index.runs[location.run]
    return f"{run.name}|{location.path.relative_to(run.path)}|{location.line}"


def row_of(index: Index, key: str) -> int:
    """The row that a key names. Raises ValueError if there is none."""
    name, _, rest = key.partition("|")
    file, _, line = rest.rpartition("|")
    run = next((run for run in index.runs if run.name == name), None)
    row = None if run is None else index.row(run.path / file, whole_number("line", line))
    if row is None:
        raise ValueError(f"there is no episode {key!r} (any more); its file may have been written anew")
    return row


def brief(index: Index, rows: np.ndarray, row: int) -> dict[str, Any]:
    """A row of a list of episodes."""
    entry = rows[row]
    question, text = index.questions.all[entry["question"]]
    kbs = [name for number, name in enumerate(index.kbs.all) if int(entry["kbs"]) >> min(number, LAST_BIT) & 1]
    return {
        "key": key_of(index, row),
        "run": index.runs[entry["run"]].name,
        "source": index.sources.all[entry["source"]],
        "step": int(entry["step"]),
        "sample": int(entry["sample"]),
        "id": question,
        "question": text,
        "answer": index.answers[row],
        "reward": _finite(entry["reward"]),
        "advantage": _finite(entry["advantage"]),
        "correct": int(entry["correct"]),
        "trained": int(entry["trained"]),
        "turns": int(entry["turns"]),
        "searches": int(entry["searches"]),
        "tokens": int(entry["tokens"]),
        "forked": bool(entry["forked"]),
        "kbs": kbs,
        "failures": [name for bit, name in enumerate(FAILURES) if int(entry["failures"]) >> bit & 1],
        "datasets": sorted(index.dataset_sets.all[entry["datasets"]]),
    }


def details(index: Index, row: int) -> dict[str, Any]:
    """The record of a row and its related episodes. Pictures in the record are replaced by numbers (`picture`).

    `siblings` are the other attempts at the question in the same step or evaluation, `forks` all branches of the same attempt,
    `elsewhere` the same question at other steps, in evaluations and in other runs.

    Raises:
      ValueError: the record has changed meanwhile, or is gone.
    """
    rows = index.snapshot()
    location = index.location_of(row)
    record = read_record(location)
    own = rows[row]
    same = np.flatnonzero(rows["alive"] & (rows["question"] == own["question"]))
    same_file = rows["file"][same] == own["file"]
    attempt = same_file & (rows["sample"][same] == own["sample"])
    elsewhere = same[~same_file]
    elsewhere = elsewhere[np.lexsort((rows["sample"][elsewhere], rows["step"][elsewhere], rows["run"][elsewhere]))]
    return {
        "key": key_of(index, row),
        "brief": brief(index, rows, row),
        "file": f"{location.path}, line {location.line + 1}",
        **page_data(record)[0],
        "siblings": _briefs(index, rows, same[same_file & ~attempt]),
        "forks": _briefs(index, rows, same[attempt]) if attempt.sum() > 1 else [],
        "elsewhere": _briefs(index, rows, elsewhere),
        "elsewhere_count": len(elsewhere),
    }


def picture(index: Index, row: int, number: int, outside: bool = True) -> tuple[bytes, str]:
    """A picture of a record, by its number in `details`: the file's bytes and its format ("png", "jpeg", ..).

    Only files that the record names are read, and only if they are pictures. A record may name any file; without `outside`,
    only those in the run's directory are read.

    Raises:
      ValueError: there is no such picture, or it can't be read (any more).
    """
    location = index.location_of(row)
    within = None if outside else index.runs[location.run].path
    return picture_of(read_record(location), location.path.parent, number, within)


def page_data(record: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The data from which the page draws a conversation, and the names of its numbered pictures."""
    numbers: dict[str, int] = {}
    shown = {
        "looks": [_numbered(look, numbers) for look in looks(record)],
        "record": _numbered(record, numbers),
        "pictures": [name if not name.startswith("data:") else "in the record" for name in numbers],
    }
    return shown, list(numbers)


def picture_of(
    record: Mapping[str, Any], directory: pathlib.Path, number: int, within: pathlib.Path | None = None
) -> tuple[bytes, str]:
    """A picture of a record by its number in `page_data`, as `picture` gives it. `directory`: of the record's file; `within`:
    where the picture must lie, if it is a file."""
    names = page_data(record)[1]
    if number >= len(names):
        raise ValueError(f"the record has {len(names)} pictures, and no number {number}")
    name = picture_path(directory, names[number])
    if within and not is_data(name) and not pathlib.Path(name).resolve().is_relative_to(within.resolve()):
        raise ValueError("a picture outside the run's directory is only shown on the machine itself (--host=127.0.0.1)")
    return encoded_image(name)


def _briefs(index: Index, rows: np.ndarray, chosen: Int[np.ndarray, " N"]) -> list[dict[str, Any]]:
    return [brief(index, rows, int(row)) for row in chosen[:_RELATED]]


def _numbered(value: Any, numbers: dict[str, int]) -> Any:
    """A copy in which the pictures (under the keys `image` and `images`) are numbers from 0 on, in the order of their first
    place; None where there is no picture. The `image` of a call is a digest, and stays."""
    if isinstance(value, Mapping):
        numbered = {}
        for key, item in value.items():
            if key == "images" and isinstance(item, list):
                numbered[key] = [_number_of(image, numbers) for image in item]
            elif key == "image" and "tool" not in value:
                numbered[key] = _number_of(item, numbers)
            else:
                numbered[key] = _numbered(item, numbers)
        return numbered
    return [_numbered(item, numbers) for item in value] if isinstance(value, list | tuple) else value


def _number_of(image: Any, numbers: dict[str, int]) -> int | None:
    return numbers.setdefault(image, len(numbers)) if isinstance(image, str) and image else None


def _finite(value: np.floating) -> float | None:
    return None if math.isnan(value) else round(float(value), 4)
