r"""Serving: our server beside the pattern of Search-R1's, under concurrent clients.

    python -m launch.build_kb --config=configs/build_kb.py --workdir=kb/hotpotqa-2k --config.corpus=corpus-2k.jsonl
    python -m benchmarks.serving --kb=kb/hotpotqa-2k --questions=questions.jsonl.gz [--questions=more.jsonl.gz] \
        [--clients=200] [--repeats=3] [--json]

Three servers over the same knowledge base, each a process, clients in another; one query per request, `POST /retrieve`:

  ours      `serving.app`: dynamic batching.
  blocking  Search-R1's `search_r1/search/retrieval_server.py` (a14dc3a): FastAPI, a plain `def` endpoint that searches for the
            request's own queries, in uvicorn's thread pool. The encoder as our knowledge bases use it: 16 rows at a time, so
            that a query's vector does not depend on its neighbours.
  one row   the same with the encoder called for one row, as Search-R1's own encoder class does.

Twice: with the real encoder, and with vectors that cost nothing, which leaves HTTP, batching and the index. No vector is
remembered between requests on any side, and all queries are different questions. Three loads: one client at a time; `clients`
at once, each asking again as soon as it has its answer; `clients` that think between their questions, so that together they
ask half as much as ours can answer. "CPU" is the server's processor time per request, which a busy machine changes least.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
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

SIDES = ("ours", "blocking", "one row")
ENCODERS = ("real", "free")


def main() -> None:
    arguments = _arguments()
    if arguments.serve:
        serve(arguments.serve, arguments.encoder, arguments.kb, arguments.port)
        return
    if arguments.drive:
        print(json.dumps(asyncio.run(drive(arguments, _questions(arguments.questions)))))
        return
    rows = [row for encoder in arguments.encoders.split(",") for row in measure(encoder, arguments)]
    _print(rows, arguments)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kb", required=True, help="directory of a dense knowledge base")
    parser.add_argument(
        "--questions", action="append", required=True, help="jsonl(.gz) with `question`; may be repeated"
    )
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--requests", type=int, default=1000, help="of ours under load; the others get a fifth")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--encoders", default="real,free")
    parser.add_argument("--json", action="store_true")
    for name in ("serve", "drive", "encoder"):  # how it calls itself
        parser.add_argument(f"--{name}", default="", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--think", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--skip", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args()


class FreeEncoder:
    """Vectors from hashes: what is left is everything but the encoder."""

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


def serve(side: str, encoder: str, directory: str, port: int) -> None:
    """One of the servers, until it is killed."""
    import uvicorn

    from routerl_jax.knowledge.dense import DenseKB
    from routerl_jax.knowledge.load import load_kb
    from routerl_jax.knowledge.serving.config import warm_up

    found = load_kb(directory, encoder=FreeEncoder(_dim(directory)) if encoder == "free" else None)
    if not isinstance(found, DenseKB):
        sys.exit(f"{directory}: not a dense knowledge base")
    chosen: Any = OneRow(found.encoder) if side == "one row" and encoder == "real" else found.encoder
    kb = DenseKB(found.store, chosen, found.index, cache_size=0)
    warm_up(kb)
    if side == "ours":
        from routerl_jax.knowledge.serving.app import Served, create_app

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
                    for p in found
                ]
                for found in results
            ]
        }

    retrieve.__annotations__["body"] = Body  # the class is local, annotations are strings
    app.post("/retrieve")(retrieve)
    app.get("/healthz")(lambda: {})
    return app


def _dim(directory: str) -> int:
    return json.loads((pathlib.Path(directory) / "kb.json").read_text())["embedding"]["dim"]


async def drive(arguments: argparse.Namespace, questions: Sequence[str]) -> dict[str, Any]:
    """`clients` clients ask `requests` questions of one server. Returns throughput, latencies in seconds, failures."""
    import aiohttp

    todo = iter([questions[(arguments.skip + i) % len(questions)] for i in range(arguments.requests)])
    url = f"http://127.0.0.1:{arguments.port}/retrieve"
    latencies, failures = [], []
    rng = random.Random(arguments.skip)

    async def client(session: aiohttp.ClientSession) -> None:
        if arguments.think:
            await asyncio.sleep(rng.uniform(0, arguments.think))
        for question in todo:
            started = time.perf_counter()
            try:
                body = {"queries": [question], "topk": 3, "return_scores": True}
                async with session.post(url, json=body) as reply:
                    found = await reply.json()
                    if reply.status != 200 or len(found["result"][0]) != 3:
                        failures.append(f"HTTP {reply.status}: {str(found)[:200]}")
            except Exception as error:
                failures.append(f"{type(error).__name__}: {error}")
            latencies.append(time.perf_counter() - started)
            if arguments.think:
                await asyncio.sleep(rng.expovariate(1 / arguments.think))

    timeout = aiohttp.ClientTimeout(total=900)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        started = time.perf_counter()
        await asyncio.gather(*(client(session) for _ in range(arguments.clients)))
        seconds = time.perf_counter() - started
    latencies.sort()
    return {
        "throughput": len(latencies) / seconds,
        "p50": latencies[len(latencies) // 2],
        "p99": latencies[int(0.99 * (len(latencies) - 1))],
        "failed": len(failures),
        "failure": failures[0] if failures else "",
    }


def measure(encoder: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """All sides with one encoder, in turn, `repeats` times: one row per side and load."""
    sides = SIDES if encoder == "real" else SIDES[:2]
    servers = {side: _Server(side, encoder, arguments) for side in sides}
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
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
                    loads.append(("half", arguments.clients, many // 2, -1.0))
                for load, clients, requests, think in loads:
                    if repeat == 0:
                        requests = min(requests, max(2, clients // 4))
                    if think:
                        think = 2 * arguments.clients / capacity
                    result = server.drive(clients, requests, think, asked, arguments)
                    asked += requests
                    if load == "load" and side == "ours":
                        capacity = result["throughput"]
                    said = ", ".join(
                        f"{key} {result[key]:.4g}" for key in ("throughput", "p50", "p99", "cpu", "failed")
                    )
                    print(f"run {repeat}, {encoder}, {side}, {load}: {said}", file=sys.stderr, flush=True)
                    if repeat:
                        found.setdefault((side, load), []).append(result)
    finally:
        for server in servers.values():
            server.stop()
    rows = []
    for (side, load), results in found.items():
        row: dict[str, Any] = {"encoder": encoder, "side": side, "load": load}
        for key in ("throughput", "p50", "p99", "cpu"):
            row[key] = statistics.median(result[key] for result in results)
        row["failed"] = sum(result["failed"] for result in results)
        row["runs"] = results
        rows.append(row)
    return rows


class _Server:
    def __init__(self, side: str, encoder: str, arguments: argparse.Namespace) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._process = _self("--serve", side, "--encoder", encoder, "--port", str(self.port), arguments=arguments)

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
    settings = {"clients": arguments.clients, "requests": arguments.requests, **changes}
    command = [sys.executable, "-m", "benchmarks.serving", "--kb", arguments.kb]
    command += [word for path in arguments.questions for word in ("--questions", path)]
    command += [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    return subprocess.Popen([*command, *extra], stdout=subprocess.PIPE, text=True)


def _questions(paths: Sequence[str]) -> list[str]:
    questions: dict[str, None] = {}
    for path in paths:
        opener: Any = gzip.open if path.endswith(".gz") else open
        with opener(path, "rt", encoding="utf-8") as file:
            questions.update(dict.fromkeys(json.loads(line)["question"] for line in file if line.strip()))
    return list(questions)


def _print(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    of = {(row["encoder"], row["side"], row["load"]): row for row in rows}

    def ratio(key: str, encoder: str, peer: str, load: str = "load") -> float:
        ours, theirs = of[encoder, "ours", load][key], of[encoder, peer, load][key]
        return ours / theirs if key == "throughput" else theirs / ours

    ratios = {}
    for encoder in arguments.encoders.split(","):
        name = "server_vs_blocking" + ("" if encoder == "real" else "_free_encoder")
        ratios[name] = ratio("throughput", encoder, "blocking")
        ratios[f"{name}_cpu"] = ratio("cpu", encoder, "blocking")
        if encoder == "real":
            ratios["server_vs_blocking_one_row"] = ratio("throughput", encoder, "one row")
            ratios["server_vs_blocking_one_row_cpu"] = ratio("cpu", encoder, "one row")
    tails = {
        f"{encoder}_{load}": of[encoder, "ours", load]["p99"] / of[encoder, "ours", "one"]["p50"]
        for encoder in arguments.encoders.split(",")
        for load in ("load", "half")
    }
    failed = sum(row["failed"] for row in rows if row["side"] == "ours")
    if arguments.json:
        print(json.dumps({"ratios": ratios, "p99_over_single_median": tails, "failed": failed, "rows": rows}))
        return
    from benchmarks import peers

    print(peers.hardware())
    print(f"{arguments.clients} clients; medians of {arguments.repeats} runs in turn\n")
    print("| encoder | server | load | requests/s | p50, ms | p99, ms | CPU, ms | failed |")
    print("|---|---|---|---:|---:|---:|---:|---:|")
    for row in rows:
        times = " | ".join(f"{1000 * row[key]:,.1f}" for key in ("p50", "p99", "cpu"))
        print(
            f"| {row['encoder']} | {row['side']} | {row['load']} | {row['throughput']:,.1f} | {times} | {row['failed']} |"
        )
    for name, value in {
        **ratios,
        **{f"p99 / median of one client, {key}": value for key, value in tails.items()},
    }.items():
        print(f"{name}: {value:.1f}x")


if __name__ == "__main__":
    main()
