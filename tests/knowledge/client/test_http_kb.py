"""Served knowledge bases as if they were here, beside true servers: results, faults, caches, limits, replicas."""

import asyncio
import concurrent.futures
import gzip
import io
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import httpx2
import numpy as np
import pytest
from PIL import Image

from routerl_jax.core import background
from routerl_jax.core.time_limit import time_limit
from routerl_jax.core.types import TextAndImage
from routerl_jax.extras.kb_server.app import Served, ServerSettings, create_app
from routerl_jax.extras.kb_server.requests import Limits
from routerl_jax.knowledge.client import transport
from routerl_jax.knowledge.client.kb import HttpKB, RetrieveKB
from routerl_jax.knowledge.client.transport import CircuitBreaker, RequestRefused, Retries, Timeouts, Unavailable
from routerl_jax.knowledge.hybrid import HybridKB
from routerl_jax.knowledge.load import load_kb
from routerl_jax.services import limits
from routerl_jax.services.cache import LayeredCache, MemoryCache, RedisCache
from routerl_jax.services.limits import LocalRateLimiter, RedisRateLimiter
from tests.clock import Clock
from tests.extras.kb_server.servers import EchoKB, get, running, scripted, serving, wait_until
from tests.programs import ROOT

FAST = Retries(attempts=4, base=0.01, cap=0.05, seed=0)
ABOUT = {"name": "x", "default_mode": "default", "modes": {"default": {"size": 1, "cost": 1.0, "reads": ["text"]}}}
PASSAGE = {"id": "1", "title": "t", "text": "found", "score": 1.0, "image": ""}
HELLO = (200, {}, ABOUT)
FOUND = (200, {}, {"results": [[PASSAGE]], "seconds": 0, "cost": 1, "mode": "default"})


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_it_is_the_knowledge_base() -> None:
    here = EchoKB("wiki", cost=3.0)
    with serving(EchoKB(), here) as url:
        kb = load_kb(f"{url}/wiki")
        queries = ["who", " ", "wo № ü", "who", "\ud800 lone"]
        assert kb.search(queries[:4], k=3) == here.search(queries[:4], k=3)
        assert len(kb.search(queries, k=3)[4]) == 3
        assert (kb.name, len(kb), kb.cost, kb.reads) == ("wiki", 10, 3.0, {"text"})
        assert load_kb(url).name == "echo"  # the server's first
        with pytest.raises(ValueError, match="k=0"):
            kb.search(["x"], k=0)


def test_more_than_a_search_gives_is_refused_here_and_there() -> None:
    here = EchoKB()
    with serving(here) as url:
        for kb in (here, load_kb(url), load_kb(f"{url}/retrieve"), HybridKB([here])):
            with pytest.raises(ValueError, match=r"k=1001 is more than .* gives \(1000\)"):
                kb.search(["x"], k=1001)
            assert len(kb.search(["x"], k=1000)[0]) == 10
        assert httpx2.post(f"{url}/v1/search", json={"queries": ["x"], "k": 1001}, timeout=60).status_code == 400
    with pytest.raises(ValueError, match="k=1001"):
        Limits(k=1001)


def test_pictures_arrive_as_they_are(tmp_path: pathlib.Path) -> None:
    pixels = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    path = tmp_path / "a.png"
    Image.fromarray(pixels).save(path)
    here = EchoKB("pictures", reads=frozenset({"text", "image"}), image=str(path))
    with serving(here) as url:
        kb = load_kb(f"{url}/pictures")
        for image in (str(path), path.read_bytes(), pixels, Image.fromarray(pixels)):
            query = TextAndImage(text="q", image=image)
            found = kb.search([query], k=1)[0][0]
            asked = here.calls[-1][0][0]
            assert np.array_equal(np.asarray(Image.open(io.BytesIO(asked.image))), pixels)
            assert found.image.startswith("data:image/png;base64,")


@pytest.mark.parametrize("reads", [("image",), ("image", "url")])
def test_the_url_of_a_picture_travels_to_who_reads_it(reads: tuple[str, ...]) -> None:
    pixels = np.zeros((4, 4, 3), np.uint8)
    here = EchoKB("pictures", reads=frozenset(reads))
    with serving(here) as url:
        kb = load_kb(f"{url}/pictures")
        kb.search([TextAndImage(image=pixels, url="https://a.b/c.jpg"), TextAndImage(url="https://a.b/c.jpg")], k=1)
        (asked, _), *rest = here.calls
        assert asked[0].url == ("https://a.b/c.jpg" if "url" in reads else "")
        assert not rest
        assert len(asked) == len(reads)  # a URL that nobody reads asks nothing
        wrong = httpx2.post(f"{url}/v1/search", json={"queries": [{"url": "file:///etc/passwd"}]}, timeout=60)
        assert wrong.status_code == 400
        assert "queries[0].url must begin with http:// or https://" in wrong.text


def test_long_lists_go_in_requests_of_bounded_size() -> None:
    here = EchoKB()
    with serving(here, settings=ServerSettings(max_batch=1000)) as url:
        kb = HttpKB(url, batch=10, concurrency=3)
        queries = [f"q{i}" for i in range(95)]
        assert [found[0].text for found in kb.search(queries, k=1)] == [f"q{i} (0)" for i in range(95)]
    assert sorted({query for asked, _ in here.calls for query in asked}) == sorted(queries)


def test_many_threads() -> None:
    with serving(EchoKB(seconds=0.001)) as url:
        kb = HttpKB(url)
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            results = list(pool.map(lambda i: kb.search([f"q{i}"], k=1)[0][0].text, range(200)))
    assert results == [f"q{i} (0)" for i in range(200)]


def test_modes_by_url() -> None:
    dense, graph = EchoKB(), EchoKB(cost=4.0)
    with running(create_app([Served("wiki", {"passage": dense, "graph": graph})])) as url:
        kb = load_kb(f"{url}/wiki?mode=graph")
        kb.search(["x"], k=1)
        assert (kb.cost, len(graph.calls), len(dense.calls)) == (4.0, 1, 0)
        with pytest.raises(ValueError, match="no mode 'images'; it has: passage, graph"):
            load_kb(f"{url}/wiki?mode=images")


@pytest.mark.parametrize("url", ["ftp://x/wiki", "http://", "http://h/wiki?k=3", "http://h/wiki#part"])
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(ValueError, match=r"not the URL|only \?mode"):
        HttpKB(url)


def test_arguments_that_are_the_servers() -> None:
    with pytest.raises(ValueError, match="those of the server"):
        load_kb("http://127.0.0.1:1/x", index="exact")
    with pytest.raises(ValueError, match="token is for URLs"):
        load_kb("kb/wiki", token="x")


def test_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(EchoKB(), token="s3cret") as url:
        with pytest.raises(RequestRefused, match=r"HTTP 401.*ROUTERL_KB_TOKEN"):
            load_kb(url)
        assert load_kb(url, token="s3cret").search(["x"], k=1)[0]
        monkeypatch.setenv("ROUTERL_KB_TOKEN", "s3cret")
        assert load_kb(url).search(["x"], k=1)[0]


def test_what_the_server_refuses_is_not_asked_again() -> None:
    here = EchoKB()
    with serving(here) as url:
        kb = HttpKB(url, retries=FAST)
        with pytest.raises(RequestRefused, match="32768"):
            kb.search(["x" * 100_000], k=1)
        with pytest.raises(RequestRefused, match="odd queries are not for me"):
            kb.search(["odd"], k=1)
        assert len(here.calls) == 1
        with pytest.raises(Unavailable, match=r"after 4 attempts.*HTTP 500: RuntimeError: the disk is gone"):
            kb.search(["boom"], k=1)
        assert len(here.calls) == 5


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_storms_are_ridden_out(status: int) -> None:
    storm = (status, {}, {"error": {"type": "x", "message": "not now"}})
    with scripted(HELLO, storm, storm, FOUND) as (url, seen):
        assert HttpKB(url, retries=FAST).search(["x"], k=1)[0][0].text == "found"
        assert len(seen) == 4
    with scripted(HELLO, storm) as (url, seen):
        with pytest.raises(Unavailable, match=f"after 4 attempts.*HTTP {status}: not now"):
            HttpKB(url, retries=FAST).search(["x"], k=1)
        assert len(seen) == 5


def test_retry_after_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, transport)
    with scripted(HELLO, (429, {"Retry-After": "10"}, {}), FOUND) as (url, _):
        HttpKB(url, retries=FAST, timeouts=Timeouts(total=20.0)).search(["x"], k=1)
    assert clock.slept == [pytest.approx(10, abs=1)]
    with scripted(HELLO, (503, {"Retry-After": "3600"}, {}), FOUND) as (url, seen):
        kb = HttpKB(url, retries=FAST, timeouts=Timeouts(total=20.0))
        with pytest.raises(Unavailable, match="HTTP 503"):  # no use waiting
            kb.search(["x"], k=1)
        assert len(seen) == 2
    assert len(clock.slept) == 1


def test_an_error_under_status_200_is_read() -> None:
    """As its code says: 429 and 5xx are asked again, others are refused."""
    for passing in (
        {"error": {"code": 429, "message": "later"}},
        {"detail": "out of memory", "code": 503, "results": []},
    ):
        with scripted(HELLO, (200, {}, passing), FOUND) as (url, seen):
            assert HttpKB(url, retries=FAST).search(["x"], k=1)[0][0].text == "found"
            assert len(seen) == 3
    refusal = {"error": {"type": "authentication_error", "message": "who are you"}}
    with scripted(HELLO, (200, {}, refusal)) as (url, seen):
        with pytest.raises(RequestRefused, match=r"who are you.*ROUTERL_KB_TOKEN"):
            HttpKB(url, retries=FAST).search(["x"], k=1)
        assert len(seen) == 2


def test_redirects_stay_at_the_server() -> None:
    """One that does is followed with its body; of another the message has the URL to give, and no key is sent there."""
    there = (307, {"location": "/x/v1/search/"}, {})
    with scripted(HELLO, there, FOUND) as (url, seen):
        assert HttpKB(f"{url}/x", retries=FAST).search(["x"], k=1)[0][0].text == "found"
        assert seen[1:] == ["/x/v1/search", "/x/v1/search/"]
    with scripted(FOUND) as (other, visits):
        for status, location in ((308, f"{other}/x/v1/search"), (302, "/y/v1/search")):
            with scripted(HELLO, (status, {"location": location}, {})) as (url, seen):
                kb = HttpKB(f"{url}/x", token="s3cret", retries=FAST)
                whole = location if location.startswith("http") else url + location
                with pytest.raises(
                    RequestRefused, match=re.escape(f" to {whole.removesuffix('/v1/search')}: give that URL")
                ):
                    kb.search(["x"], k=1)
                assert len(seen) == 2
        assert not visits
    with scripted(HELLO, there) as (url, seen), pytest.raises(RequestRefused, match="give that URL"):
        HttpKB(f"{url}/x", retries=FAST).search(["x"], k=1)
    assert len(seen) < 10


def test_the_last_slash_of_an_address_is_kept() -> None:
    with scripted((200, {}, {"result": [[{"contents": "t\nfound"}]]})) as (url, seen):
        assert load_kb(f"{url}/retrieve/").search(["x"], k=1)[0][0].text == "found"
        assert load_kb(f"{url}/retrieve").search(["x"], k=1)[0][0].text == "found"
    assert seen == ["/retrieve/", "/retrieve"]


def test_a_reply_without_end_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "_MOST_BYTES", 10_000)
    endless = (200, {}, {"results": [[{**PASSAGE, "text": "x" * 20_000}]]})
    with scripted(HELLO, endless) as (url, _), pytest.raises(RequestRefused, match="larger than 10000 bytes"):
        HttpKB(url, retries=FAST).search(["x"], k=1)


GOOD = {"id": "1", "contents": '"Accra"\nThe capital'}


@pytest.mark.parametrize(
    "odd",
    [
        {"document": {"id": "2", "title": "B", "text": None}},
        {"document": {"id": "2", "contents": None}},
        {"document": {"id": "2", "text": ["a"]}},
        {"document": {"id": "2", "text": "a", "contents": "b"}},
        {"document": {"text": "a"}, "score": "high"},
        {"document": {"text": "a"}, "score": [1]},
        {"document": {"title": " ", "text": ""}},
        {"document": None},
        {"hello": "world"},
        None,
        5,
    ],
)
def test_an_odd_document_is_left_out_and_harms_nobody(odd: Any, caplog: pytest.LogCaptureFixture) -> None:
    reply = {"result": [[odd, GOOD], [odd, GOOD], [{"document": GOOD, "score": None}, GOOD]]}
    with scripted((200, {}, reply)) as (url, _):
        kb = RetrieveKB(f"{url}/retrieve")
        found = kb.search(["a", "b", "c"], k=3)
    assert [[(p.id, p.title, p.text, p.score) for p in passages] for passages in found] == [
        [("1", "Accra", "The capital", 0.0)]
    ] * 3
    assert kb.stage_counts()["server"]["left_out"] == 2
    assert sum("left out" in record.getMessage() for record in caplog.records) == 1


def test_a_query_without_an_answer_harms_no_other() -> None:
    """But a reply that answers none is an error."""
    with scripted((200, {}, {"result": [None, [GOOD]]}), (200, {}, {"result": [None, None]})) as (url, _):
        kb = RetrieveKB(f"{url}/retrieve", retries=FAST)
        assert [len(passages) for passages in kb.search(["x", "y"], k=3)] == [0, 1]
        assert kb.stage_counts()["server"]["left_out"] == 1
        with pytest.raises(Unavailable, match="null"):
            kb.search(["x", "y"], k=3)


@pytest.mark.parametrize("change", [{"text": None}, {"score": None}, {"score": "nan"}, {"id": None}, {"title": ["t"]}])
def test_our_own_servers_odd_passage_is_left_out_too(change: dict[str, Any]) -> None:
    reply = {"results": [[{**PASSAGE, **change}, PASSAGE], [{**PASSAGE, **change}]]}
    with scripted(HELLO, (200, {}, reply)) as (url, _):
        kb = HttpKB(url, retries=FAST)
        assert [len(passages) for passages in kb.search(["x", "y"], k=3)] == [1, 0]
    assert kb.stage_counts()["server"]["left_out"] == 2


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        ({"document": {"_id": 3, "title": "A", "contents": "A\nb."}, "similarity": "0.5"}, ("3", "A", "b.", 0.5)),
        ({"document": {"docid": "d", "title": "A", "contents": "B is.\nC."}}, ("d", "A", "B is.\nC.", 0.0)),
        ({"id": "d", "text": "t", "contents": '"T"\nt', "score": 2}, ("d", "T", "t", 2.0)),
        ({"id": "d", "page_content": "t", "metadata": {"title": "M"}}, ("d", "M", "t", 0.0)),
        ({"document": "T\nb", "id": "x", "score": 1}, ("x", "T", "b", 1.0)),
    ],
)
def test_the_keys_of_documents(item: Any, expected: tuple) -> None:
    with scripted((200, {}, {"result": [[item]]})) as (url, _):
        (passage,) = RetrieveKB(f"{url}/retrieve").search(["x"], k=1)[0]
    assert (passage.id, passage.title, passage.text, passage.score) == expected


def test_documents_without_ids_are_told_apart_and_a_server_gives_no_more_than_asked_for() -> None:
    with scripted((200, {}, {"result": [["a", "b", "a", "c", "d"], ["b"]]})) as (url, _):
        first, second = RetrieveKB(f"{url}/retrieve").search(["x", "y"], k=4)
    assert [p.text for p in first] == ["a", "b", "c"]
    assert len({p.id for p in first}) == 3
    assert second[0].id == first[1].id


def test_a_reply_of_unknown_documents_is_an_error_and_no_empty_result() -> None:
    unknown = (200, {}, {"result": [[{"passage": "a"}], []]})
    with scripted(unknown) as (url, _), pytest.raises(Unavailable, match="another form than Search-R1's protocol"):
        RetrieveKB(f"{url}/retrieve", retries=FAST).search(["x", "y"], k=1)


def test_nonsense_is_an_error() -> None:
    path = {**PASSAGE, "image": "/etc/hostname"}  # would be read here
    for reply in (
        {"results": []},
        {"results": [["x"]]},
        {"results": [[path]]},
        {"results": [[{"id": 1}]]},
        ["?"],
        {"answer": 42},
    ):
        with (
            scripted(HELLO, (200, {}, reply)) as (url, _),
            pytest.raises(Unavailable, match=r"results for|another form"),
        ):
            HttpKB(url, retries=FAST).search(["x"], k=1)
    with (
        scripted((200, {}, {"hello": "world"})) as (url, _),
        pytest.raises(ValueError, match="not a server of knowledge"),
    ):
        HttpKB(url)


async def never() -> None:
    await asyncio.sleep(60)


def test_a_call_takes_no_longer_than_its_caller_waits() -> None:
    """On the event loop's thread, and in a hybrid's; without a limit of its own it would wait for a minute."""
    with scripted(HELLO, never) as (url, _):
        kb = HttpKB(url, retries=FAST, timeouts=Timeouts(read=30))
        for one in (kb, HybridKB([kb])):
            with time_limit(0.3), pytest.raises(Unavailable, match=r"no answer after .*no answer in time"):
                one.search(["x"], k=1)


def test_a_server_that_never_answers() -> None:
    with scripted(HELLO, never) as (url, _):
        kb = HttpKB(url, retries=FAST, timeouts=Timeouts(read=0.2, total=60))
        with pytest.raises(Unavailable, match=r"after 4 attempts.*no answer in time"):
            kb.search(["x"], k=1)
    with scripted(HELLO, never) as (url, _):
        kb = HttpKB(url, retries=FAST, timeouts=Timeouts(read=30, total=0.5))
        with pytest.raises(Unavailable, match="no answer in time"):
            kb.search(["x"], k=1)


def test_nobody_there() -> None:
    with pytest.raises(Unavailable, match="connection failed"):
        HttpKB(f"http://127.0.0.1:{free_port()}", retries=FAST)


def slow_server(port: int, seconds: float) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.extras.kb_server.servers", str(port), str(seconds)]
    return subprocess.Popen(command, cwd=ROOT, env=dict(os.environ))


def wait_for(url: str) -> None:
    def alive() -> bool:
        try:
            return get(f"{url}/healthz").status_code == 200
        except httpx2.TransportError:
            return False

    wait_until(alive, 300)


def test_a_server_killed_in_the_middle_of_a_search() -> None:
    ports = free_port(), free_port()
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    doomed, spare = slow_server(ports[0], 30.0), slow_server(ports[1], 0.0)
    try:
        for url in urls:
            wait_for(url)
        alone, both = HttpKB(urls[0], retries=FAST), HttpKB(urls, retries=FAST)
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            results = [pool.submit(kb.search, ["x"], 1) for kb in (alone, both)]
            metrics = f"{urls[0]}/metrics"
            wait_until(lambda: "kb_requests_in_flight 0.0" not in get(metrics).text)
            time.sleep(0.3)
            doomed.kill()
            with pytest.raises(Unavailable, match="connection failed"):
                results[0].result(120)
            assert results[1].result(120)[0][0].text == "x (0)"  # the other replica
    finally:
        doomed.kill()
        spare.kill()


def test_replicas_take_turns_and_a_dead_one_is_left_alone() -> None:
    first, second = EchoKB(), EchoKB()
    dead = f"http://127.0.0.1:{free_port()}"
    with serving(first) as a, serving(second) as b:
        kb = HttpKB([a, b, dead], retries=FAST, breaker=lambda: CircuitBreaker(threshold=2, cool_down=60))
        for i in range(12):
            kb.search([f"q{i}"], k=1)
    assert abs(len(first.calls) - len(second.calls)) <= 3
    assert len(first.calls) + len(second.calls) == 12


def test_the_circuit_opens_and_closes_again() -> None:
    down = (500, {}, {})
    with scripted(HELLO, down, down, FOUND) as (url, seen):
        kb = HttpKB(url, retries=Retries(attempts=1), breaker=lambda: CircuitBreaker(threshold=2, cool_down=0.5))
        for _ in range(2):
            with pytest.raises(Unavailable, match="HTTP 500"):
                kb.search(["x"], k=1)
        with pytest.raises(Unavailable, match="failed too often, not asked again"):
            kb.search(["x"], k=1)
        assert len(seen) == 3  # the last one was not sent
        time.sleep(0.6)
        assert kb.search(["x"], k=1)[0][0].text == "found"


def test_hedging_asks_again_when_it_takes_long() -> None:
    slow_once = threading.Event()

    async def sometimes() -> tuple:
        if slow_once.is_set():
            slow_once.clear()
            await asyncio.sleep(60)
            raise AssertionError("nobody waited for the second reply")
        return FOUND

    with scripted(HELLO, sometimes) as (url, _):
        kb = HttpKB(url, hedge=True, retries=FAST)
        for _ in range(30):
            kb.search(["x"], k=1)
        slow_once.set()
        assert kb.search(["x"], k=1)[0][0].text == "found"


def test_a_cache_is_asked_first() -> None:
    here, cache = EchoKB(), MemoryCache()
    with serving(here) as url:
        kb = HttpKB(url, cache=cache)
        first = kb.search(["a", "b"], k=2)
        assert kb.search(["b", "c", "a"], k=2) == [first[1], kb.search(["c"], k=2)[0], first[0]]
        assert [asked for asked, _ in here.calls] == [["a", "b"], ["c"]]
        kb.search(["a"], k=1)  # another k is another question
        assert len(here.calls) == 3
        cache.set_many({kb._digest(2, query): b"damaged" for query in "ab"})
        assert kb.search(["a", "b"], k=2) == first


def test_replies_are_shared_through_redis_and_its_end_ends_nothing(redis_server: Any) -> None:
    here = EchoKB()
    with serving(here) as url:
        one, other = (
            HttpKB(url, cache=LayeredCache([MemoryCache(), RedisCache(redis_server.url)]), ttl=60) for _ in range(2)
        )
        first = one.search(["a"], k=2)
        assert other.search(["a"], k=2) == first
        assert len(here.calls) == 1
        redis_server.kill()
        assert other.search(["a", "b"], k=2)[0] == first[0]  # from memory, and from the server
        assert one.search(["c"], k=1)[0][0].text == "c (0)"


def test_a_rate_limit_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, limits)
    with serving(EchoKB()) as url:
        kb = HttpKB(url, limiter=LocalRateLimiter(rate=10, burst=2), batch=2)
        kb.search(["a", "b", "c", "d"], k=1)
        assert clock.slept == [pytest.approx(0.2)]  # two at once, two more at 10 a second
        kb = HttpKB(url, limiter=LocalRateLimiter(rate=0.01, burst=1), timeouts=Timeouts(total=1.0))
        kb.search(["a"], k=1)
        with pytest.raises(Unavailable, match="no permit for 1 queries within 1 s"):
            kb.search(["b"], k=1)


def test_a_rate_limit_is_shared_through_redis(redis_server: Any) -> None:
    with serving(EchoKB()) as url:
        for i in range(2):
            limiter = RedisRateLimiter(redis_server.url, rate=0.01, burst=1)
            kb = HttpKB(url, limiter=limiter, timeouts=Timeouts(total=1.0))
            if i == 0:
                kb.search(["a"], k=1)
            else:
                with pytest.raises(Unavailable, match="rate limit"):
                    kb.search(["b"], k=1)


@pytest.mark.parametrize("kind", [HttpKB, RetrieveKB])
def test_a_forked_process_gets_connections_of_its_own(monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    """Its inherited sockets are its parent's, and so is the loop's thread."""
    with serving(EchoKB()) as url:
        kb = kind(url if kind is HttpKB else f"{url}/retrieve")
        kb.search(["x"], k=1)
        first = kb._connection._transport
        assert kb.search(["y"], k=1)[0][0].text.startswith("y (0)")
        assert kb._connection._transport is first
        monkeypatch.setattr(background, "_shared", (-1, background.shared_loop()))
        assert kb.search(["x"], k=1)[0][0].text.startswith("x (0)")
        assert kb._connection._transport is not first


def test_close_and_go_on() -> None:
    with serving(EchoKB()) as url:
        kb = HttpKB(url)
        kb.close()
        assert kb.search(["x"], k=1)[0]


def packed(body: Any) -> tuple[int, dict[str, str], bytes]:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return 200, {"content-encoding": "gzip"}, gzip.compress(content, 1)


def test_decompressed_bytes_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "_MOST_BYTES", 1_000_000)
    with scripted(HELLO, packed({"results": [[PASSAGE]]}), packed(b" " * 100_000_000), packed(b"{}")) as (url, seen):
        kb = HttpKB(url, retries=FAST)
        assert kb.search(["x"], k=1)[0][0].text == "found"
        with pytest.raises(RequestRefused, match="larger than 1000000 bytes; ask for fewer passages"):
            kb.search(["y"], k=1)
        assert len(seen) == 3  # it is not asked again


def test_a_damaged_body_is_asked_for_again() -> None:
    status, headers, content = packed({"results": [[PASSAGE]]})
    with scripted(
        HELLO, (status, headers, content[:-4]), (status, headers, b"no gzip"), (status, headers, content)
    ) as (
        url,
        seen,
    ):
        assert HttpKB(url, retries=FAST).search(["x"], k=1)[0][0].text == "found"
        assert len(seen) == 4


@pytest.mark.parametrize("score", ["9" * 5000, "[" * 100_000, "[" * 700 + "]" * 700])
def test_odd_json_is_an_error_of_the_server(score: str) -> None:
    body = json.dumps({"results": [[PASSAGE]]}).replace("1.0", score).encode()
    with scripted(HELLO, (200, {}, body)) as (url, _), pytest.raises(Unavailable, match="not JSON that can be used"):
        HttpKB(url, retries=FAST).search(["x"], k=1)


@pytest.mark.parametrize("k", [10**5000, -(10**5000), 10**9, 1e30], ids=["huge", "negative", "large", "float"])
def test_a_number_of_passages_that_is_none(k: Any) -> None:
    with pytest.raises(ValueError, match=r"^k=.* (is more than a search gives|must be a whole number of at least 1)"):
        EchoKB().search(["x"], k=k)
