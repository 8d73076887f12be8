"""What the stages were asked, what they answered from what is kept, and how often they failed."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
from aiohttp import web as aioweb

from routerl_jax.core.types import TextAndImage
from routerl_jax.knowledge.client.kb import HttpKB, RetrieveKB
from routerl_jax.knowledge.client.transport import Retries, Unavailable
from routerl_jax.knowledge.hybrid import HybridKB
from routerl_jax.knowledge.web.snapshot import WebError
from routerl_jax.parallel import multihost
from routerl_jax.services.cache import MemoryCache
from routerl_jax.training.health import (
    of_all_processes,
    together,
    tool_counts,
    tool_metrics,
    tool_results,
    tool_table,
)
from tests.extras.kb_server.servers import EchoKB, serving
from tests.web_servers import http_error
from tests.web_servers import serving as serving_web


def counted(asked: int, failures: int = 0, hits: int | None = None) -> dict[str, int]:
    return {"asked": asked, "failures": failures} | ({} if hits is None else {"hits": hits})


def test_every_stage(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    world.found = {"a": ["/page/1", "/gone", "/page/2"], "b": ["/page/1", "/page/3"], "c": []}
    kb = world.kb(pages=2)
    nothing = {stage: counted(0, hits=0) for stage in ("query", "search", "page", "summary")}
    assert kb.stage_counts() == nothing
    kb.search(["a"], k=2)
    kb.search(["b", "b", "c"], k=2)
    assert kb.stage_counts() == {
        "query": counted(4, hits=1),  # the second "b" joins the first
        "search": counted(3, hits=0),
        "page": counted(5, failures=1, hits=1),  # /page/1 for "b"
        "summary": counted(4, hits=0),
    }
    again = world.kb(pages=2)  # another one over the same cache
    again.search(["a"], k=2)
    assert again.stage_counts()["search"] == counted(1, hits=1)
    assert again.stage_counts()["page"] == counted(3, failures=1, hits=2)  # failures are not kept


def test_failures_of_search_engine_and_summariser(world: Any) -> None:
    kb = world.kb(cache__disk=False)
    world.searches.storm = [http_error(500) for _ in range(3)]
    with pytest.raises(WebError):
        kb.search(["down"], k=1)
    world.chats.reply = lambda messages: "ha " * 200
    kb.search(["up"], k=2)
    assert kb.stage_counts() == {
        "query": counted(2, failures=1, hits=0),
        "search": counted(2, failures=1, hits=0),
        "page": counted(2, hits=0),
        "summary": counted(2, failures=2, hits=0),
    }


def test_pictures_and_uploads(world: Any, tmp_path: pathlib.Path) -> None:
    from PIL import Image

    picture = tmp_path / "picture.png"
    Image.new("RGB", (4, 4), (9, 9, 9)).save(picture)
    fails = []

    async def store(request: Any) -> aioweb.Response:
        return aioweb.Response(status=403 if fails else 201)

    with serving_web(store) as server:
        kb = world.kb(mode="image", upload__url=server.url)
        kb.search([TextAndImage(image=str(picture))], k=3)
        fails.append(True)
        with pytest.raises(WebError):
            kb.search([TextAndImage(image=Image.new("RGB", (4, 4), (1, 1, 1)))], k=3)
    counts = kb.stage_counts()
    assert counts["upload"] == counted(2, failures=1)
    assert counts["search"] == counted(2, failures=1, hits=0)
    assert counts["picture"] == counted(3, hits=0)


def test_snapshots(world: Any, tmp_path: pathlib.Path) -> None:
    place = {"snapshot__directory": str(tmp_path / "web"), "cache__disk": False}
    world.kb(**place).search(["a"], k=2)
    kb = world.kb(**place, snapshot__mode="replay")
    kb.search(["a"], k=2)
    assert kb.stage_counts()["snapshot"] == counted(1, hits=1)
    assert kb.stage_counts()["query"] == counted(1, hits=1)
    with pytest.raises(WebError):
        kb.search(["b"], k=2)
    assert kb.stage_counts()["snapshot"] == counted(3, failures=2, hits=1)  # neither the answer nor the search
    assert kb.stage_counts()["search"] == counted(1, failures=1, hits=0)


def test_one_search_in_ten_fails(world: Any) -> None:
    """The rates are those of the services."""
    queries = [f"query {i}" for i in range(100)]
    bad = set(queries[::10])
    asks = world.searches._reply

    def reply(path: str, asked: dict[str, Any]) -> dict[str, Any]:
        return {"error": "out of order"} if asked["q"] in bad else asks(path, asked)

    world.searches._reply = reply
    kb = world.kb(cache__disk=False, failures="empty", pages=1)
    tools: dict[str, Any] = {"web": kb, "other": object()}
    before = tool_counts(tools)
    assert list(before) == ["web"]
    kb.search(queries, k=1)
    metrics = tool_metrics(tools, before)
    assert metrics["tools/web/search/asked"] == metrics["tools/web/query/asked"] == 100
    assert metrics["tools/web/search/failures"] == metrics["tools/web/query/failures"] == 10
    assert metrics["tools/web/page/hit_rate"] == 89 / 90  # one page for all
    assert set(tool_metrics(tools, tool_counts(tools)).values()) == {0}  # no rate where nothing was asked
    results = tool_results(tool_counts(tools))
    assert results["web"]["search"] == {
        **counted(100, 10, 0),
        "hit_rate": 0.0,
        "failure_rate": 0.1,
    }
    head, *lines = tool_table(tool_counts(tools)).splitlines()
    assert head.split()[:3] == ["tool", "stage", "asked"]
    assert lines[1].split() == ["web", "search", "100", "0.0%", "10.00%"]
    assert tool_table({"web": {"search": counted(0, hits=0)}}) == tool_table({}) == ""


def test_processes_and_sittings_are_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = {"web": {"page": counted(3, 1, 1), "upload": counted(2)}}
    theirs = {"web": {"page": counted(5, 0, 4), "upload": counted(1, 1)}}
    monkeypatch.setattr(multihost, "exchange", lambda values: [values, theirs])
    both = {"web": {"page": counted(8, 1, 5), "upload": counted(3, 1)}}
    assert of_all_processes(mine) == both
    assert of_all_processes({}) == {}  # no call that the others would wait for
    assert together(mine, theirs) == both
    assert together({}, mine) == mine


def test_served_knowledge_bases() -> None:
    with serving(EchoKB()) as url:
        cached, plain = HttpKB(url, cache=MemoryCache()), HttpKB(url)
        for kb in (cached, plain):
            kb.search(["a", "b", "a"])
            kb.search(["a"])
        assert cached.stage_counts() == {"cache": counted(3, hits=1), "server": counted(2)}
        assert plain.stage_counts() == {"server": counted(3)}
        assert HybridKB([cached]).stage_counts() == {
            "echo/cache": counted(3, hits=1),
            "echo/server": counted(2),
        }
        searched = RetrieveKB(f"{url}/retrieve")
        searched.search(["a", "b"])
        assert searched.stage_counts() == {"server": counted(2)}
    with serving(EchoKB()) as url:
        gone = HttpKB(url, retries=Retries(attempts=1))
    with pytest.raises(Unavailable):
        gone.search(["a", "b"])
    assert gone.stage_counts() == {"server": counted(2, failures=2)}
