"""The native schema over HTTP: what is answered, what is refused and how, health, metrics, limits and tokens."""

import base64
import pathlib
import re

import httpx2
import pytest

from routerl_jax.extras.kb_server.app import Served, ServerSettings, create_app
from routerl_jax.extras.kb_server.requests import Limits
from tests.extras.kb_server.servers import EchoKB, error_of, get, running, search, serving

PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
SMALL = ServerSettings(limits=Limits(body_bytes=200_000, queries=8, query_chars=1000, k=50))


@pytest.fixture(scope="module")
def kbs() -> list[EchoKB]:
    return [EchoKB("wiki", cost=2.5), EchoKB("pictures", reads=frozenset({"text", "image"}))]


@pytest.fixture(scope="module")
def url(kbs: list[EchoKB]):
    with serving(*kbs, settings=SMALL) as url:
        yield url


def test_a_search(url: str) -> None:
    reply = search(url, {"queries": ["a", {"text": "b"}, "  "], "k": 2}).json()
    assert [[passage["text"] for passage in found] for found in reply["results"]] == [
        ["a (0)", "a (1)"],
        ["b (0)", "b (1)"],
        [],
    ]
    assert reply["results"][0][1] == {"id": "1", "title": "Title 1", "text": "a (1)", "score": 0.5, "image": ""}
    assert (reply["mode"], reply["cost"]) == ("default", 7.5)
    assert reply["seconds"] > 0


def test_every_knowledge_base_has_a_path_and_the_first_is_at_the_root(url: str, kbs: list[EchoKB]) -> None:
    before = len(kbs[1].calls)
    assert search(url, {"queries": ["x"]}, "/pictures/v1/search").status_code == 200
    assert len(kbs[1].calls) == before + 1
    assert search(url, {"queries": []}).json()["results"] == []


def test_pictures_travel_both_ways(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "page.png"
    path.write_bytes(base64.b64decode(PNG))
    with serving(EchoKB("p", reads=frozenset({"text", "image"}), image=str(path))) as url:
        query = {"text": "q", "image": f"data:image/png;base64,{PNG}"}
        found = search(url, {"queries": [query], "k": 1}).json()["results"][0]
        bare = search(url, {"queries": ["q"], "k": 1, "images": False}).json()["results"][0]
    assert found[0]["image"] == f"data:image/png;base64,{PNG}"
    assert found[0]["text"].startswith("q")
    assert len(found[0]["text"]) == len("q (0)") + 8  # the digest of the picture that came with the query
    assert bare[0]["image"] == ""


def test_k_beyond_the_corpus_gives_all(url: str) -> None:
    assert len(search(url, {"queries": ["x"], "k": 50}).json()["results"][0]) == 10


@pytest.mark.parametrize(
    ("body", "status", "kind", "message"),
    [
        ([], 400, "invalid_request", "JSON object"),
        ({}, 400, "invalid_request", "queries must be a list"),
        ({"queries": "x"}, 400, "invalid_request", "queries must be a list"),
        ({"queries": [1]}, 400, "invalid_request", r"queries\[0\] must be a string"),
        ({"queries": ["x"], "k": 0}, 400, "invalid_request", "k=0"),
        ({"queries": ["x"], "k": True}, 400, "invalid_request", "k=True"),
        ({"queries": ["x"], "k": 51}, 400, "invalid_request", r"more than this server gives \(50\)"),
        ({"queries": ["x"], "topk": 3}, 400, "invalid_request", "unknown key 'topk'"),
        ({"queries": ["x"], "mode": "graph"}, 400, "unknown_mode", "'wiki' has no mode 'graph'; it has: default"),
        ({"queries": ["x"] * 9}, 413, "too_large", "9 queries"),
        ({"queries": ["x" * 100_000]}, 413, "too_large", "100000 characters"),
        ({"queries": ["x" * 300_000]}, 413, "too_large", "200000 bytes"),
        ({"queries": [{"image": "/etc/passwd"}]}, 400, "invalid_request", "data URI"),
        ({"queries": [{"image": "data:image/png;base64,%%"}]}, 400, "invalid_request", "base64"),
        ({"queries": [{"image": f"data:image/png;base64,{PNG}"}]}, 400, "invalid_request", "searched by text alone"),
        ({"queries": ["odd"]}, 400, "invalid_request", "odd queries are not for me"),
        ({"queries": ["boom"]}, 500, "search_failed", "RuntimeError: the disk is gone"),
    ],
)
def test_refusals(url: str, body: object, status: int, kind: str, message: str) -> None:
    got = error_of(search(url, body))
    assert got[:2] == (status, kind)
    assert re.search(message, got[2]), got[2]
    assert search(url, {"queries": ["fine"]}).status_code == 200  # and the server goes on


def test_json_that_is_none(url: str) -> None:
    status, kind, message = error_of(httpx2.post(f"{url}/v1/search", content=b'{"queries": ["x"'))
    assert (status, kind) == (400, "invalid_json")
    assert "column" in message
    for nested in ("[" * 700 + "]" * 700, "[" * 100_000, '{"a":' * 300 + "1" + "}" * 300):
        status, kind, message = error_of(
            httpx2.post(f"{url}/v1/search", content=f'{{"queries": ["x"], "k": {nested}}}')
        )
        assert (status, kind) == (400, "invalid_json")


def test_paths_and_methods(url: str) -> None:
    assert error_of(search(url, {}, "/nowhere"))[:2] == (404, "unknown_path")
    assert error_of(search(url, {}, "/other/v1/search"))[1:] == (
        "unknown_kb",
        "there is no knowledge base 'other' here; there are: wiki, pictures",
    )
    assert get(f"{url}/v1/search").status_code == 405
    assert get(f"{url}/retrieve").status_code == 405


def test_listing_health_and_page(url: str) -> None:
    kbs = {kb["name"]: kb for kb in get(f"{url}/v1/kbs").json()["kbs"]}
    assert (kbs["wiki"]["size"], kbs["wiki"]["cost"], kbs["wiki"]["reads"]) == (10, 2.5, ["text"])
    assert kbs["pictures"]["modes"] == {
        "default": {"size": 10, "cost": 1.0, "reads": ["image", "text"], "pictures": False}
    }
    assert get(f"{url}/wiki/v1/kbs").json() == kbs["wiki"]
    assert get(f"{url}/healthz").status_code == get(f"{url}/readyz").status_code == 200
    page = get(url)
    assert "v1/search" in page.text
    assert "http" not in page.text.replace(url, "")  # nothing from elsewhere


def test_metrics() -> None:
    with serving(EchoKB("m")) as url:
        search(url, {"queries": ["a", "b"]})
        search(url, {"queries": ["boom"]})
        search(url, {}, "/elsewhere/v1/search")
        text = get(f"{url}/metrics").text
    for line in (
        'kb_requests_total{endpoint="v1",kb="m",status="200"} 1.0',
        'kb_requests_total{endpoint="v1",kb="m",status="500"} 1.0',
        'kb_errors_total{kb="m",type="search_failed"} 1.0',
        'kb_errors_total{kb="",type="unknown_kb"} 1.0',
        'kb_batch_queries_sum{kb="m",mode="default"} 2.0',
        'kb_queue_queries{kb="m",mode="default"} 0.0',
        "kb_requests_in_flight 0.0",
    ):
        assert line in text


def test_a_token_guards_everything_but_health_and_the_page() -> None:
    with serving(EchoKB(), token="s3cret") as url:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "s3cret"}):
            assert error_of(search(url, {"queries": ["x"]}, headers=headers))[:2] == (401, "unauthorized")
            assert get(f"{url}/metrics", headers=headers).status_code == 401
        assert search(url, {"queries": ["x"]}, headers={"Authorization": "Bearer s3cret"}).status_code == 200
        assert [get(url + path).status_code for path in ("/", "/healthz", "/readyz")] == [200] * 3


def test_modes() -> None:
    dense, graph = EchoKB(cost=1.0), EchoKB(cost=3.0)
    with running(create_app([Served("wiki", {"passage": dense, "graph": graph})])) as url:
        replies = [search(url, {"queries": ["x"], "mode": mode}).json() for mode in (None, "passage", "graph")]
    assert [(reply["mode"], reply["cost"]) for reply in replies] == [("passage", 1.0), ("passage", 1.0), ("graph", 3.0)]
    assert (len(dense.calls), len(graph.calls)) == (2, 1)


@pytest.mark.parametrize("name", ["", "a/b", "v1", "metrics", "a b"])
def test_names_that_would_clash_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="can't be called"):
        Served(name, {"default": EchoKB()})
