"""Web search: our scatter and gather beside the ways that others go, over local servers that take their time.

    python -m benchmarks.web [--queries 64] [--repeats 3] [--json]

The servers speak SerpApi's, Jina Reader's and OpenAI's protocols in a process of their own; each reply takes about 100, 150
and 200 ms (an exponential tail on top), and one page in ten fails. All sides search, read and summarise five pages a query,
and none has a cache. Peers, written with `requests`: `sequential`, one query and one page at a time; `threads`, MMSearch-R1's
`parallel_tool_call`: eight threads, a query each, whose pages are read together, then summarised together, in rounds until
five have succeeded (its paper's appendix C).
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import multiprocessing
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

PAGES, DELAYS = 5, {"search": 0.10, "page": 0.15, "summary": 0.20}
SUMMARY = "This is what the page says about the question, in a sentence or two, with names and numbers."


def serve(pipe: Any) -> None:
    """All three services on one port, until the pipe closes."""
    import asyncio
    import random

    from aiohttp import web

    async def search(request: web.Request) -> web.Response:
        await asyncio.sleep(DELAYS["search"] + rng.expovariate(20))
        query = request.query["q"]
        rows = [{"link": f"http://page.test/{query}/{i}", "title": f"{query} {i}", "snippet": ""} for i in range(10)]
        return web.json_response({"organic_results": rows})

    async def page(request: web.Request) -> web.Response:
        await asyncio.sleep(DELAYS["page"] + rng.expovariate(20))
        url = request.path.removeprefix("/reader/")
        if url.endswith(("/3", "/7")) and len(url) % 2:  # one in ten
            return web.json_response({"code": 503}, status=503)
        return web.json_response({"code": 200, "data": {"title": url, "content": f"All about {url}. " * 800}})

    async def chat(request: web.Request) -> web.Response:
        await request.read()
        await asyncio.sleep(DELAYS["summary"] + rng.expovariate(20))
        message = {"message": {"role": "assistant", "content": SUMMARY}, "finish_reason": "stop"}
        return web.json_response({"choices": [message]})

    async def main() -> None:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_get("/search.json", search)
        app.router.add_get("/reader/{url:.*}", page)
        app.router.add_post("/v1/chat/completions", chat)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, backlog=1024)
        await site.start()
        pipe.send(site._server.sockets[0].getsockname()[1])  # type: ignore[union-attr]
        await asyncio.to_thread(pipe.recv)

    rng = random.Random(0)
    asyncio.run(main())


class Peer:
    """Search, read and summarise with blocking requests."""

    def __init__(self, url: str) -> None:
        self._url, self._local = url, threading.local()

    def sequential(self, queries: list[str]) -> list[list[str]]:
        results = []
        for query in queries:
            summaries: list[str] = []
            for url in self._hits(query):
                if len(summaries) < PAGES and (text := self._page(url)) is not None:
                    summaries.append(self._summary(query, text))
            results.append(summaries)
        return results

    def threads(self, queries: list[str]) -> list[list[str]]:
        with (
            concurrent.futures.ThreadPoolExecutor(8) as pool,
            concurrent.futures.ThreadPoolExecutor(8 * PAGES) as inner,
        ):
            return list(pool.map(lambda query: self._rounds(query, inner), queries))

    def _rounds(self, query: str, pool: concurrent.futures.Executor) -> list[str]:
        hits, summaries = self._hits(query), []
        while hits and len(summaries) < PAGES:
            some, hits = hits[: PAGES - len(summaries)], hits[PAGES - len(summaries) :]
            texts = [text for text in pool.map(self._page, some) if text is not None]
            summaries += pool.map(lambda text: self._summary(query, text), texts)
        return summaries

    @property
    def _session(self) -> Any:
        import requests

        if not hasattr(self._local, "session"):
            self._local.session = requests.Session()
        return self._local.session

    def _hits(self, query: str) -> list[str]:
        reply = self._session.get(f"{self._url}/search.json", params={"q": query, "engine": "google"})
        return [row["link"] for row in reply.json()["organic_results"]]

    def _page(self, url: str) -> str | None:
        reply = self._session.get(f"{self._url}/reader/{url}", headers={"Accept": "application/json"})
        return reply.json()["data"]["content"][:30_000] if reply.ok else None

    def _summary(self, query: str, text: str) -> str:
        body = {"model": "m", "messages": [{"role": "user", "content": f"{query}\n{text}"}], "max_tokens": 512}
        reply = self._session.post(f"{self._url}/v1/chat/completions", json=body)
        return reply.json()["choices"][0]["message"]["content"]


def ours(url: str) -> Callable[[list[str]], list[list[str]]]:
    """Our knowledge base without caches."""
    from routerl_jax.knowledge.web.config import CacheConfig, ReaderConfig, SearchConfig, SummaryConfig, WebConfig
    from routerl_jax.knowledge.web.kb import web_kb
    from routerl_jax.services.config import ChatModelConfig

    writer = ChatModelConfig(model="m", base_url=f"{url}/v1", concurrency=512)
    config = WebConfig(
        search=SearchConfig(url=url, api_key_env="", concurrency=512),
        reader=ReaderConfig(kind="jina", url=f"{url}/reader", concurrency=512, retries=0),
        summary=SummaryConfig(model=writer),
    )

    def run(queries: list[str]) -> list[list[str]]:
        kb = web_kb(dataclasses.replace(config, cache=CacheConfig(disk=False)))
        try:
            return [[passage.text for passage in passages] for passages in kb.search(queries, k=PAGES)]
        finally:
            kb.close()

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queries", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    here, there = multiprocessing.get_context("spawn").Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(there,), daemon=True)
    server.start()
    url = f"http://127.0.0.1:{here.recv()}"
    peer = Peer(url)
    sides = {"ours": ours(url), "threads": peer.threads, "sequential": peer.sequential}
    rates: dict[str, list[float]] = {name: [] for name in sides}
    cpu: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(arguments.repeats):
        for name, run in sides.items():
            count = (
                4 if name == "sequential" else arguments.queries
            )  # its time per query doesn't depend on their number
            queries = [f"{name}{repeat}q{i:03d}" for i in range(count)]
            started, used = time.perf_counter(), time.process_time()
            results = run(queries)
            rates[name].append(count / (time.perf_counter() - started))
            cpu[name].append((time.process_time() - used) / count)
            assert [len(passages) for passages in results] == [PAGES] * count, (name, results)
    server.kill()
    medians = {name: statistics.median(values) for name, values in rates.items()}
    ratios = {f"web_vs_{name}": medians["ours"] / medians[name] for name in ("threads", "sequential")}
    if arguments.json:
        seconds = {name: statistics.median(values) for name, values in cpu.items()}
        report = {"ratios": ratios, "queries_per_second": medians, "cpu_seconds_per_query": seconds}
        print(json.dumps({**report, "queries": arguments.queries}))
        return
    print("| side | queries/s (range) | ours, times as many | CPU ms a query |\n|---|---:|---:|---:|")
    for name, values in rates.items():
        row = f"{medians[name]:.2f} ({min(values):.2f}-{max(values):.2f}) | {medians['ours'] / medians[name]:.1f}x"
        print(f"| {name} | {row} | {1000 * statistics.median(cpu[name]):.0f} |")


if __name__ == "__main__":
    main()
