r"""Serving: our server beside the pattern of Search-R1's, under concurrent clients.

    python -m benchmarks.serving [--setups=flat,hotpotqa,free] [--clients=200] [--repeats=3] [--quick] [--json]

Two servers over the same knowledge base, each a process, clients in another; one query per request, `POST /retrieve`:

  ours      `extras.kb_server.app`: dynamic batching.
  blocking  Search-R1's `search_r1/search/retrieval_server.py` (a14dc3a): FastAPI, a plain `def` endpoint that searches for the
            request's own queries, in uvicorn's thread pool; its encoder is called with one row, where ours gets eight, so that
            a query's vector does not depend on its neighbours.

Three setups:

  flat      a million vectors, all inner products (Search-R1's own setting is a flat index of 21 million), MiniLM
  hotpotqa  the 7,795 passages of HotpotQA, MiniLM, the index as built: on a CPU the encoder takes nearly all the time
  free      the same with vectors that cost nothing, which leaves HTTP, batching and the index

No vector is remembered between requests on any side, and all queries are different questions. Three loads: one client at a
time; `clients` at once, each asking again as soon as it has its answer; `clients` that think between their questions, so that
together they ask half as much as ours can answer. "CPU" is the server's processor time per request, which a busy machine
changes least. ROUTERL_TEST_DATA names the real datasets, ROUTERL_BENCH_CACHE where knowledge bases stay.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import pathlib
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks import build_scale
from benchmarks.passages import cache_directory, data_directory, dense_kb
from benchmarks.vectors import Mixture, real_vectors
from routerl_jax.core.rows import read_rows

SIDES = ("ours", "blocking")
SETUPS = ("flat", "hotpotqa", "free")
QUESTIONS = ("r1searcher_train", "2wikimultihopqa", "hotpotqa", "musique")  # whose questions are asked


def main() -> None:
    arguments = _arguments()
    if arguments.serve:
        serve(arguments.serve, arguments.setup, arguments.count, arguments.port)
        return
    if arguments.drive:
        print(json.dumps(asyncio.run(drive(arguments, _questions()))))
        return
    chosen = arguments.setups.split(",")
    if unknown := set(chosen) - set(SETUPS):
        sys.exit(f"unknown setup {unknown.pop()!r}; known: {', '.join(SETUPS)}")
    rows = [row for setup in chosen for row in _setup(setup, arguments)]
    _print(rows, arguments)


def measure(quick: bool) -> dict[str, Any]:
    """For benchmarks/retrieval.py."""
    arguments = _arguments(["--quick"] if quick else [])
    rows = [row for setup in arguments.setups.split(",") for row in _setup(setup, arguments)]
    return _summary(rows) | {"recall": {}, "rows": rows}


def _arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setups", default=",".join(SETUPS))
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--requests", type=int, default=1000, help="of ours under load; the other gets a fifth")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="100,000 vectors, one run")
    parser.add_argument("--json", action="store_true")
    for name in ("serve", "drive", "setup"):  # how it calls itself
        parser.add_argument(f"--{name}", default="", help=argparse.SUPPRESS)
    parser.add_argument("--count", type=int, default=1_000_000, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--think", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--skip", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.count, arguments.repeats = 100_000, 1
    return arguments


def prepare(setup: str, count: int) -> pathlib.Path:
    """The knowledge base of a setup, built at the first call."""
    hotpotqa = dense_kb("hotpotqa")
    if setup != "flat":
        return hotpotqa
    work = cache_directory() / f"flat_{count}"
    if not (work / "kb" / "kb.json").is_file():
        with contextlib.redirect_stdout(sys.stderr):
            print(build_scale.build(work, count, build_scale.Given(Mixture(real_vectors([hotpotqa]))), index="exact"))
    return work / "kb"


class FreeEncoder:
    """Vectors from hashes, so that everything but the encoder is measured."""

    def __init__(self, dim: int) -> None:
        import numpy as np

        self._vectors = np.random.default_rng(0).normal(size=(4096, dim)).astype(np.float32)

    def embed(self, inputs: Sequence[str], /, *, prefix: str | None = None, batch_size: int = 32) -> Any:
        return self._vectors[[int(hashlib.md5(text.encode()).hexdigest()[:8], 16) % 4096 for text in inputs]]


class OneRow:
    """The real encoder, one row at a time."""

    def __init__(self, encoder: Any) -> None:
        self._encoder = encoder

    def embed(self, inputs: Sequence[str], /, *, prefix: str | None = None, batch_size: int = 32) -> Any:
        return self._encoder.embed(inputs, prefix=prefix, batch_size=1)


def serve(side: str, setup: str, count: int, port: int) -> None:
    """One of the servers, until it is killed."""
    import uvicorn

    from routerl_jax.extras.kb_server.app import warm_up
    from routerl_jax.knowledge.dense import DenseKB
    from routerl_jax.knowledge.encoders import shared_encoder
    from routerl_jax.knowledge.load import load_kb

    directory = prepare(setup, count)
    encoder: Any = FreeEncoder(_dim(directory)) if setup == "free" else shared_encoder("all-MiniLM-L6-v2")
    if side == "blocking" and setup != "free":
        encoder = OneRow(encoder)
    loaded = load_kb(directory, encoder=encoder)
    if not isinstance(loaded, DenseKB):
        sys.exit(f"{directory}: not a dense knowledge base")
    kb = DenseKB(loaded.store, encoder, loaded.index, cache_size=0)
    warm_up(kb)
    if side == "ours":
        from routerl_jax.extras.kb_server.app import Served, create_app

        app: Any = create_app([Served("bench", {"default": kb})])
    else:
        app = blocking_app(kb)
    uvicorn.run(app, port=port, log_level="error", access_log=False, backlog=2048)


def blocking_app(kb: Any) -> Any:
    """One blocking search per request."""
    import fastapi
    import pydantic

    class Body(pydantic.BaseModel):
        queries: list[str]
        topk: int | None = None
        return_scores: bool = False

    app = fastapi.FastAPI()

    def retrieve(body: Body) -> Any:
        results = kb.search(body.queries, body.topk or 3)
        return {
            "result": [
                [
                    {"document": {"id": p.id, "contents": f'"{p.title}"\n{p.text}'}, "score": float(p.score)}
                    for p in passages
                ]
                for passages in results
            ]
        }

    retrieve.__annotations__["body"] = Body  # the class is local, annotations are strings
    app.post("/retrieve")(retrieve)
    app.get("/healthz")(lambda: {})
    return app


def _dim(directory: pathlib.Path) -> int:
    return json.loads((directory / "kb.json").read_text())["embedding"]["dim"]


async def drive(arguments: argparse.Namespace, questions: Sequence[str]) -> dict[str, Any]:
    """`clients` clients ask `requests` questions of one server. Returns throughput, latencies in seconds, failures."""
    import aiohttp

    todo = iter([questions[(arguments.skip + i) % len(questions)] for i in range(arguments.requests)])
    url = f"http://127.0.0.1:{arguments.port}/retrieve"
    latencies, answered, failures = [], [], []
    rng = random.Random(arguments.skip)

    async def client(session: aiohttp.ClientSession) -> None:
        if arguments.think:
            await asyncio.sleep(rng.uniform(0, arguments.think))
        for question in todo:
            started = time.perf_counter()
            try:
                body = {"queries": [question], "topk": 3, "return_scores": True}
                async with session.post(url, json=body) as reply:
                    content = await reply.json()
                    if reply.status != 200 or len(content["result"][0]) != 3:
                        failures.append(f"HTTP {reply.status}: {str(content)[:200]}")
            except Exception as error:
                failures.append(f"{type(error).__name__}: {error}")
            answered.append(time.perf_counter())
            latencies.append(answered[-1] - started)
            if arguments.think:
                await asyncio.sleep(rng.expovariate(1 / arguments.think))

    timeout = aiohttp.ClientTimeout(total=900)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        started = time.perf_counter()
        await asyncio.gather(*(client(session) for _ in range(arguments.clients)))
        seconds = max(answered) - started
    latencies.sort()
    return {
        "throughput": len(latencies) / seconds,
        "p50": latencies[len(latencies) // 2],
        "p99": latencies[int(0.99 * (len(latencies) - 1))],
        "failed": len(failures),
        "failure": failures[0] if failures else "",
    }


def _setup(setup: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Both sides in turn, `repeats` times: one row per side and load."""
    prepare(setup, arguments.count)
    servers = {side: _Server(side, setup, arguments) for side in SIDES}
    results_by_load: dict[tuple[str, str], list[dict[str, Any]]] = {}
    asked = 0
    try:
        for server in servers.values():
            server.wait()
        for repeat in range(arguments.repeats + 1):  # the first warms up
            capacity = 0.0
            for side, server in servers.items():
                many = arguments.requests if side == "ours" else max(arguments.clients, arguments.requests // 5)
                loads = [("one", 1, min(20, many), 0.0), ("load", arguments.clients, many, 0.0)]
                if side == "ours" and repeat:
                    loads.append(("half", arguments.clients, many, -1.0))
                for load, clients, requests, think in loads:
                    if repeat == 0:
                        requests = min(requests, max(2, clients // 4))
                    if think:
                        think = 2 * arguments.clients / capacity
                    result = server.drive(clients, requests, think, asked, arguments)
                    asked += requests
                    if load == "load" and side == "ours":
                        capacity = result["throughput"]
                    numbers = ", ".join(
                        f"{key} {result[key]:.4g}" for key in ("throughput", "p50", "p99", "cpu", "failed")
                    )
                    print(f"run {repeat}, {setup}, {side}, {load}: {numbers}", file=sys.stderr, flush=True)
                    if repeat:
                        results_by_load.setdefault((side, load), []).append(result)
    finally:
        for server in servers.values():
            server.stop()
    rows = []
    for (side, load), results in results_by_load.items():
        row: dict[str, Any] = {"setup": setup, "side": side, "load": load}
        for key in ("throughput", "p50", "p99", "cpu"):
            row[key] = statistics.median(result[key] for result in results)
        row["failed"] = sum(result["failed"] for result in results)
        row["runs"] = results
        rows.append(row)
    return rows


class _Server:
    def __init__(self, side: str, setup: str, arguments: argparse.Namespace) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._process = _self("--serve", side, "--setup", setup, "--port", str(self.port), arguments=arguments)

    def wait(self) -> None:
        import httpx2

        for _ in range(6000):
            if self._process.poll() is not None:
                sys.exit("a server ended; see above")
            try:
                if httpx2.get(f"http://127.0.0.1:{self.port}/healthz", timeout=5).status_code == 200:
                    return
            except httpx2.TransportError:
                time.sleep(0.1)
        sys.exit("a server did not start")

    def drive(
        self, clients: int, requests: int, think: float, skip: int, arguments: argparse.Namespace
    ) -> dict[str, Any]:
        extra = ["--drive", "yes", "--port", str(self.port), "--think", str(think), "--skip", str(skip)]
        before = self._cpu()
        process = _self(*extra, arguments=arguments, clients=clients, requests=requests)
        output, _ = process.communicate()
        if process.returncode:
            sys.exit("the clients failed; see above")
        result = json.loads(output)
        result["cpu"] = (self._cpu() - before) / requests
        if result["failed"]:
            print(f"failed: {result['failed']}: {result['failure']}", file=sys.stderr)
        return result

    def _cpu(self) -> float:
        """Processor seconds of the server (Linux)."""
        fields = pathlib.Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()


def _self(*extra: str, arguments: argparse.Namespace, **changes: int) -> subprocess.Popen[str]:
    settings = {"clients": arguments.clients, "requests": arguments.requests, "count": arguments.count, **changes}
    command = [sys.executable, "-m", "benchmarks.serving"]
    command += [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    return subprocess.Popen([*command, *extra], stdout=subprocess.PIPE, text=True)


def _questions() -> list[str]:
    questions: dict[str, None] = {}
    for name in QUESTIONS:
        rows = read_rows(data_directory() / name / "questions_dev.jsonl.gz")
        questions.update(dict.fromkeys(row["question"] for _, row in rows))
    return list(questions)


def _summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    of = {(row["setup"], row["side"], row["load"]): row for row in rows}
    ratios, tails = {}, {}
    for setup in dict.fromkeys(row["setup"] for row in rows):
        name = "server_vs_blocking" + ("" if setup == SETUPS[0] else f"_{setup}")
        ours, theirs = of[setup, "ours", "load"], of[setup, "blocking", "load"]
        ratios[name] = ours["throughput"] / theirs["throughput"]
        ratios[f"{name}_cpu"] = theirs["cpu"] / ours["cpu"]
        for load in ("load", "half"):
            tails[f"{setup}, {load}"] = of[setup, "ours", load]["p99"] / of[setup, "ours", "one"]["p50"]
    failed = sum(row["failed"] for row in rows if row["side"] == "ours")
    return {"ratios": ratios, "p99_over_single_median": tails, "failed": failed}


def _print(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    summary = _summary(rows)
    if arguments.json:
        print(json.dumps({**summary, "rows": rows}))
        return
    from benchmarks import peers

    print(peers.hardware())
    print(f"{arguments.clients} clients; medians of {arguments.repeats} runs in turn\n")
    print("| setup | server | load | requests/s | p50, ms | p99, ms | CPU, ms | failed |")
    print("|---|---|---|---:|---:|---:|---:|---:|")
    for row in rows:
        times = " | ".join(f"{1000 * row[key]:,.1f}" for key in ("p50", "p99", "cpu"))
        print(
            f"| {row['setup']} | {row['side']} | {row['load']} | {row['throughput']:,.1f} | {times} | {row['failed']} |"
        )
    for name, value in summary["ratios"].items():
        print(f"{name}: {value:.1f}x")
    for name, value in summary["p99_over_single_median"].items():
        print(f"p99 / median of one client, {name}: {value:.1f}x")


if __name__ == "__main__":
    main()
