"""What goes wrong between client and server: full queues, slow searches, clients that leave, the end of the server."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import httpx2

from routerl_jax.extras.kb_server.app import ServerSettings
from routerl_jax.extras.kb_server.requests import Limits
from tests.extras.kb_server.servers import EchoKB, error_of, get, search, serving, wait_until
from tests.programs import ROOT


def test_a_full_queue_is_503_with_retry_after_and_not_ready() -> None:
    kb = EchoKB()
    with serving(kb, settings=ServerSettings(max_queue=2)) as url, ThreadPoolExecutor(4) as pool:
        kb.open.clear()
        first = pool.submit(search, url, {"queries": ["first"]})
        wait_until(lambda: kb.calls)
        waiting = pool.submit(search, url, {"queries": ["a", "b"]})
        wait_until(lambda: get(f"{url}/readyz").status_code == 503)
        refused = search(url, {"queries": ["c"]})
        kb.open.set()
        assert error_of(refused)[:2] == (503, "overloaded")
        assert int(refused.headers["retry-after"]) >= 1
        assert first.result().status_code == waiting.result().status_code == 200
        assert get(f"{url}/readyz").status_code == 200


def test_a_search_that_takes_too_long_is_504_and_the_next_one_is_answered() -> None:
    kb = EchoKB()
    with serving(kb, settings=ServerSettings(limits=Limits(seconds=0.3))) as url:
        kb.open.clear()
        late = search(url, {"queries": ["late"]})
        kb.open.set()
        assert error_of(late)[:2] == (504, "timeout")
        assert "0.3 s" in error_of(late)[2]
        assert search(url, {"queries": ["next"]}).status_code == 200


def test_a_client_may_ask_for_less_time() -> None:
    """The reply comes while the search is still under way."""
    kb = EchoKB()
    with serving(kb) as url:
        kb.open.clear()
        assert search(url, {"queries": ["x"]}, headers={"X-Timeout-Seconds": "0.1"}).status_code == 504
        kb.open.set()
        assert search(url, {"queries": ["x"]}, headers={"X-Timeout-Seconds": "soon"}).status_code == 200


def test_the_query_of_a_client_that_hangs_up_is_not_searched() -> None:
    kb = EchoKB()
    with serving(kb) as url, ThreadPoolExecutor(1) as pool:
        kb.open.clear()
        first = pool.submit(search, url, {"queries": ["first"]})
        wait_until(lambda: kb.calls)
        body = json.dumps({"queries": ["gone"]}).encode()
        with socket.create_connection(("127.0.0.1", urlsplit(url).port)) as raw:
            raw.sendall(
                b"POST /v1/search HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
            )
            wait_until(lambda: "kb_queue_queries{" in (text := get(f"{url}/metrics").text) and 'default"} 1.0' in text)
        wait_until(lambda: 'type="client_gone"} 1.0' in get(f"{url}/metrics").text)
        kb.open.set()
        assert first.result().status_code == 200
        assert search(url, {"queries": ["next"]}).status_code == 200
    assert [queries for queries, _ in kb.calls] == [["first"], ["next"]]


def test_a_body_that_breaks_off_harms_nobody() -> None:
    with serving(EchoKB()) as url:
        with socket.create_connection(("127.0.0.1", urlsplit(url).port)) as raw:
            raw.sendall(b'POST /v1/search HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"quer')
        wait_until(lambda: 'type="client_gone"} 1.0' in get(f"{url}/metrics").text)
        assert search(url, {"queries": ["x"]}).status_code == 200


def test_two_hundred_clients_at_once() -> None:
    kb = EchoKB(seconds=0.005)
    with serving(kb) as url:
        barrier = threading.Barrier(200)

        def client(i: int) -> str:
            connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
            barrier.wait()
            connection.request("POST", "/v1/search", json.dumps({"queries": [f"q{i}"], "k": 1}))
            return json.load(connection.getresponse())["results"][0][0]["text"]

        with ThreadPoolExecutor(200) as pool:
            assert list(pool.map(client, range(200))) == [f"q{i} (0)" for i in range(200)]
    assert max(len(queries) for queries, _ in kb.calls) <= 128
    assert len(kb.calls) < 200


def test_a_server_told_to_end_finishes_what_runs() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "tests.extras.kb_server.servers", str(port), "1.0"]
    process = subprocess.Popen(command, cwd=ROOT, env=dict(os.environ))
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: process.poll() is not None or _alive(url), 300)
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(search, url, {"queries": ["x"], "k": 1})
            wait_until(lambda: "kb_requests_in_flight 1.0" in get(f"{url}/metrics").text)
            process.send_signal(signal.SIGTERM)
            assert running.result().json()["results"][0][0]["text"] == "x (0)"
        process.wait(60)
    finally:
        process.kill()


class Hanging(EchoKB):
    """A search of which never ends."""

    def _search(self, queries: list, k: int) -> list:
        time.sleep(3600)
        return []


def test_a_search_that_never_ends_does_not_keep_the_server() -> None:
    """After the time that requests get at the end, they are told so, and the process ends in spite of the search's thread."""
    code = (
        "from routerl_jax.extras.kb_server.app import ServeConfig, Served, serve\n"
        "from tests.extras.kb_server.test_faults import Hanging\n"
        "serve([Served('x', {'default': Hanging()})], ServeConfig(port=0, shutdown_seconds=1))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        url = process.stdout.readline().split()[2]
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(search, url, {"queries": ["x"], "k": 1})
            wait_until(lambda: "kb_requests_in_flight 1.0" in get(f"{url}/metrics").text)
            process.send_signal(signal.SIGINT)
            assert running.result().status_code == 503
            assert running.result().json()["error"]["type"] == "shutting_down"
        process.wait(30)
    finally:
        process.kill()


def _alive(url: str) -> bool:
    try:
        return get(f"{url}/healthz").status_code == 200
    except httpx2.TransportError:
        return False
