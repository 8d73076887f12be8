"""The peers' endpoints, asked as the peers' own clients ask and read as they read (files named in kb_server/adapters.py)."""

import re

import pytest
import requests

from routerl_jax.core.types import Passage
from routerl_jax.extras.kb_server.app import Served, create_app
from routerl_jax.knowledge.base import KnowledgeBase
from tests.extras.kb_server.servers import error_of, get, running, search


class Pages(KnowledgeBase):
    """Three passages, the same for every query, under a mode's name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __len__(self) -> int:
        return 3

    def _search(self, queries: list, k: int) -> list[list[Passage]]:
        return [
            [
                Passage(
                    id=f"{i}", title=f"{self.name} {i}", text=f"{query}\nline", score=1 - i / 4, image=f"/img/{i}.jpg"
                )
                for i in range(min(k, 3))
            ]
            for query in queries
        ]


@pytest.fixture(scope="module")
def url():
    modes = {name: Pages(name) for name in ("passage", "graph", "hybrid")}
    with running(create_app([Served("wiki", modes), Served("plain", {"default": Pages("plain")})])) as url:
        yield url


@pytest.mark.parametrize("kb", ["", "/wiki"])
def test_search_r1(url: str, kb: str) -> None:
    payload = {"queries": ["who", "where"], "topk": 2, "return_scores": True}
    results = requests.post(f"{url}{kb}/retrieve", json=payload, timeout=30).json()["result"]
    assert [len(result) for result in results] == [2, 2]
    rendered = ""
    for rank, item in enumerate(results[1]):  # as generation.py's _passages2string takes a document apart
        lines = item["document"]["contents"].split("\n")
        rendered += f"Doc {rank + 1}(Title: {lines[0]}) " + "\n".join(lines[1:]) + "\n"
    assert rendered == 'Doc 1(Title: "passage 0") where\nline\nDoc 2(Title: "passage 1") where\nline\n'
    assert [item["score"] for item in results[0]] == [1.0, 0.75]
    assert results[0][0]["document"]["id"] == "0"


def test_search_r1_without_scores_and_with_its_default_number(url: str) -> None:
    body = requests.post(f"{url}/retrieve", json={"queries": ["who"]}, timeout=30).json()
    assert [document["contents"].split("\n")[0] for document in body["result"][0]] == [
        f'"passage {i}"' for i in range(3)
    ]


def test_skyrl(url: str) -> None:
    headers = {"Content-Type": "application/json", "Accept": "application/json"}
    payload = {"query": "who", "topk": 3, "return_scores": True}
    reply = requests.post(f"{url}/retrieve", headers=headers, json=payload, timeout=30)
    reply.raise_for_status()
    results = reply.json().get("result", [])
    assert len(results) == 1
    assert results[0][0]["document"]["contents"].strip() == '"passage 0"\nwho\nline'


def test_routerag(url: str) -> None:
    queries = ["[passage] who", "[graph][passage] where", "[graph] when", "why", "[graph]"]
    payload = {"queries": queries, "topk": 3, "return_scores": True, "return_times": True}
    reply = requests.post(f"{url}/search", json=payload, timeout=30).json()
    firsts = [result[0]["document"].split("\n")[:2] if result else [] for result in reply["result"]]
    assert firsts == [["passage 0", "who"], ["hybrid 0", "where"], ["graph 0", "when"], ["passage 0", "why"], []]
    assert len(reply["time"]) == len(queries)
    assert sum(reply["time"]) > 0
    bare = requests.post(f"{url}/search", json={"queries": ["who"], "topk": 1}, timeout=30).json()
    assert bare == {"result": [["passage 0\nwho\nline"]], "time": []}


def test_routerag_on_a_knowledge_base_without_modes(url: str) -> None:
    assert requests.post(f"{url}/plain/search", json={"queries": ["[passage] who"]}, timeout=30).status_code == 200
    assert error_of(search(url, {"queries": ["[graph] who"]}, "/plain/search"))[:2] == (400, "unknown_mode")


def test_vrag(url: str) -> None:
    reply = requests.get(f"{url}/search", params={"queries": ["who", "where"]}, timeout=30).json()
    assert reply == [[{"idx": i, "image_file": f"/img/{i}.jpg"} for i in range(3)]] * 2
    one = requests.get(f"{url}/search", params={"queries": "who"}, timeout=30).json()
    assert [item["image_file"] for item in one[0]] == [f"/img/{i}.jpg" for i in range(3)]
    assert requests.get(f"{url}/search", timeout=30).status_code == 400


def test_r1_searcher(url: str) -> None:
    reply = requests.post(f"{url}/queries", json={"queries": ["who", "where"], "k": 2}, timeout=30)
    assert reply.status_code == 200
    answers = reply.json()["answers"]
    documents = [re.sub(r"^\d+\s+", "", line) for line in answers[1]]  # as eval_search_loacl.py cuts the number off
    assert documents == ["Title: passage 0 Text: where line", "Title: passage 1 Text: where line"]
    assert reply.json()["queries"] == ["who", "where"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/retrieve", {"query": 3}),
        ("/retrieve", {"queries": ["x"], "topk": -1}),
        ("/search", {}),
        ("/queries", {"queries": 1}),
    ],
)
def test_mistakes_are_client_errors(url: str, path: str, body: dict) -> None:
    status, kind, _ = error_of(search(url, body, path))
    assert (status, kind) == (400, "invalid_request")


@pytest.mark.parametrize("k", ["9" * 5000, "1e30", "-1", "\N{SUPERSCRIPT TWO}"])
def test_a_number_in_an_address_that_is_none(url: str, k: str) -> None:
    status, kind, _ = error_of(get(f"{url}/search", params={"queries": "x", "k": k}))
    assert (status, kind) == (400, "invalid_request")
