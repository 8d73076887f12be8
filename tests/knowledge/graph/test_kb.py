"""Graph knowledge bases from end to end, against a walk worked out step by step; real MuSiQue questions."""

import asyncio
import dataclasses
import gzip
import io
import json
import pathlib

import numpy as np
import pytest
from rich.console import Console

from routerl_jax.agents.calls import search_calls
from routerl_jax.core.rows import read_rows
from routerl_jax.core.types import Episode, Example, Turn, Walk
from routerl_jax.evaluation.records import episode_of, write_records
from routerl_jax.evaluation.trajectory import render
from routerl_jax.knowledge.base import TimedResults
from routerl_jax.knowledge.client.kb import HttpKB
from routerl_jax.knowledge.corpus import read_corpus
from routerl_jax.knowledge.graph.build import GraphConfig, build_graph_from_passages
from routerl_jax.knowledge.graph.kb import GraphKB, RecognitionFilter, WalkSettings
from routerl_jax.knowledge.graph.triples import PrecomputedTriples
from routerl_jax.knowledge.hybrid import HybridKB
from routerl_jax.knowledge.load import load_kb
from routerl_jax.models.families.bert import Encoder
from routerl_jax.services.cache import MemoryCache
from routerl_jax.services.config import ChatModelConfig
from tests.extras.kb_server.servers import EchoKB, search, serving
from tests.knowledge.graph.helpers import PASSAGES, TRIPLES, Scripted, write_triples
from tests.knowledge.helpers import HashEncoder

QUERIES = ["Where was the teacher of Ada Byron born?", "Thames", " ", "Jed Water", "it rains"]


@pytest.fixture(scope="module")
def kb(tmp_path_factory: pytest.TempPathFactory) -> GraphKB:
    home = tmp_path_factory.mktemp("graph")
    config = GraphConfig(extractor="given", triples=write_triples(home / "triples.jsonl"))
    build_graph_from_passages(PASSAGES, config, home / "kb", progress=False, encoder=HashEncoder(16))
    opened = load_kb(home / "kb", encoder=HashEncoder(16))
    assert isinstance(opened, GraphKB)
    return opened


def thames_only(_: ChatModelConfig) -> Scripted:
    """A model that finds one fact of use for questions about the Thames, and none for others."""
    return Scripted(
        lambda messages: '{"keep": [1]}' if "Thames" in messages[-1].content.split("\n")[0] else '{"keep": []}'
    )


def by_hand(query: str) -> dict[str, float]:
    """Ranks of the passages of the small corpus."""
    ranks = nodes_by_hand(query)
    return {passage.id: ranks[passage.id] for passage in PASSAGES}


def nodes_by_hand(query: str) -> dict[str, float]:
    """Ranks of all nodes of the small corpus, with dense matrices and no code of the package but the encoder's."""
    encoder = HashEncoder(16)
    facts = list(dict.fromkeys(tuple(p.lower() for p in t) for triples in TRIPLES.values() for t in triples))
    entities = sorted({part for s, _, o in facts for part in (s, o)})
    vector = encoder.embed([query])[0]
    fact_scores = encoder.embed([" ".join(fact) for fact in facts]) @ vector
    fact_scores = (fact_scores - fact_scores.min()) / np.ptp(fact_scores)
    dense = encoder.embed([f"{p.title}\n{p.text}" for p in PASSAGES]) @ vector
    dense = (dense - dense.min()) / np.ptp(dense)
    counts = {e: sum(any(e in (s.lower(), o.lower()) for s, _, o in t) for t in TRIPLES.values()) for e in entities}
    weights: dict[str, list[float]] = {}
    for i in np.argsort(-fact_scores)[:5]:
        for phrase in (facts[i][0], facts[i][2]):
            weights.setdefault(phrase, []).append(fact_scores[i] / counts[phrase])
    mean = {phrase: np.mean(values) for phrase, values in weights.items()}
    top = sorted(mean, key=lambda phrase: -mean[phrase])[:5]
    nodes = [*entities, *(p.id for p in PASSAGES)]
    matrix = np.zeros((len(nodes), len(nodes)))
    vectors = encoder.embed(entities)
    for i in range(len(entities)):
        for j in range(len(entities)):
            if i != j and vectors[i] @ vectors[j] >= 0.8:
                raise AssertionError("the corpus should have no synonyms")
    for id, triples in TRIPLES.items():
        for s, _, o in triples:
            matrix[nodes.index(s.lower()), nodes.index(o.lower())] += 2
        for phrase in {part.lower() for s, _, o in triples for part in (s, o)}:
            matrix[nodes.index(phrase), nodes.index(id)] += 1
    matrix += matrix.T
    reset = np.array([mean[n] if n in top else 0 for n in entities] + [0.05 * value for value in dense])
    reset /= reset.sum()
    degrees = matrix.sum(0)
    step = np.where(
        degrees > 0, matrix / np.where(degrees > 0, degrees, 1), reset[:, None]
    )  # stuck walks go to the reset
    rank = reset
    for _ in range(200):
        rank = 0.5 * step @ rank + 0.5 * reset
    return dict(zip(nodes, rank))


@pytest.mark.parametrize("query", ["Where was the teacher of Ada Byron born?", "Thames", "Jed Water", "x y z"])
@pytest.mark.parametrize("backend", ["host", "device"])
def test_scores_by_hand(kb: GraphKB, query: str, backend: str) -> None:
    expected = by_hand(query)
    found = kb.with_settings(backend=backend).search([query], 5)[0]
    assert [p.id for p in found] == sorted(expected, key=lambda id: -expected[id])
    for passage in found:
        assert passage.score == pytest.approx(expected[passage.id], abs=1e-6)
        assert passage.text == next(p.text for p in PASSAGES if p.id == passage.id)


def test_batches(kb: GraphKB) -> None:
    """A query finds the same in any company, a blank one nothing, and k may exceed the corpus."""
    found = kb.search(QUERIES * 30, 99)
    assert [len(passages) for passages in found[:5]] == [5, 5, 0, 5, 5]
    alone = [kb.search([query], 99)[0] for query in QUERIES]
    assert found == alone * 30
    assert [p[:2] for p in alone] == kb.search(QUERIES, 2)


def test_where_a_walk_began_is_recorded_with_the_call(kb: GraphKB, tmp_path: pathlib.Path) -> None:
    calls = asyncio.run(search_calls({"graph": kb}, "graph", QUERIES, 2, 60.0))
    for query, call in zip(QUERIES, calls):
        expected = kb.triples(row for row, _ in kb.link([query])[0]) if query.strip() else []
        assert call.facts == tuple(" | ".join(triple) for triple in expected)
        assert len(call.facts) == (5 if query.strip() else 0)
        ranks = nodes_by_hand(query) if query.strip() else {}
        phrases = [node for node in ranks if node not in [passage.id for passage in PASSAGES]]
        assert list(call.nodes) == sorted(phrases, key=lambda phrase: -ranks[phrase])[:8]
    turn = Turn(text="", stop_reason="stop", tokens=0, calls=calls)
    episode = Episode(
        example=Example(id="1", question="?", answers=()), sample=0, answer=None, turns=[turn], sequences=[]
    )
    write_records(tmp_path / "records.jsonl", [episode])
    ((place, record),) = read_rows(tmp_path / "records.jsonl", lines=True)
    assert episode_of(record, place).calls == calls
    console = Console(width=400, record=True, file=io.StringIO())
    console.print(render(record))
    text = console.export_text(clear=False)
    assert "; ".join(calls[0].facts) in text
    assert "through " + "; ".join(calls[0].nodes) in text


def test_walks_of_a_served_one_and_of_a_member_are_known(kb: GraphKB) -> None:
    walks = kb.search(QUERIES, 2).walks
    with serving(kb, EchoKB()) as url:
        served = HttpKB(f"{url}/{kb.name}", cache=MemoryCache(10), batch=2)
        for _ in range(2):  # the second time from the cache
            assert served.search(QUERIES, 2).walks == walks
        assert "walks" not in search(f"{url}/echo", {"queries": ["x"]}).json()
        assert HybridKB([EchoKB(), served, kb]).search(QUERIES, 2).walks == walks
    with pytest.raises(ValueError, match="walks of 1 queries for 2 results"):
        TimedResults([[], []], [0.0, 0.0], [Walk()])


def test_phrase_weights_as_released(kb: GraphKB) -> None:
    released = kb.with_settings(phrase_weights="released")
    queries = [f"question {i}" for i in range(40)]
    ours, theirs = kb.search(queries, 5), released.search(queries, 5)
    assert ours != theirs
    assert all({p.id for p in a} == {p.id for p in b} for a, b in zip(ours, theirs))


def test_filter(kb: GraphKB) -> None:
    """What the filter leaves decides where the walk starts; if that is nothing, the dense scores rank."""
    model = thames_only(ChatModelConfig())
    filtered = GraphKB(kb.store, kb.encoder, fact_filter=RecognitionFilter(model))
    assert [len(facts) for facts in filtered.link(["Thames", "x"])] == [1, 0]
    assert [facts[0] for facts in kb.link(["Thames"])] == [facts[0] for facts in filtered.link(["Thames"])]
    assert '1. ["' in model.asked[0]
    walked, dense = filtered.search(["Thames", "x"], 5)
    assert walked != kb.search(["Thames"], 5)[0]
    vectors = kb.store.embeddings.read(0, 5)
    scores = vectors @ kb.encoder.embed(["x"])[0]
    assert [p.id for p in dense] == [PASSAGES[i].id for i in np.argsort(-scores)]
    assert (dense[0].score, dense[-1].score) == (1, 0)


def test_a_filter_that_is_built_in(kb: GraphKB, tmp_path: pathlib.Path) -> None:
    model = ChatModelConfig(kind=f"{__name__}:thames_only", model="m", extra={"seed": 1})
    triples = write_triples(tmp_path / "triples.jsonl")
    config = GraphConfig(extractor="given", triples=triples, walk=WalkSettings(filter=model))
    build_graph_from_passages(PASSAGES, config, tmp_path / "kb", progress=False, encoder=HashEncoder(16))
    filtered = load_kb(tmp_path / "kb", encoder=HashEncoder(16))
    assert isinstance(filtered, GraphKB)
    assert filtered.settings.filter == model
    assert [len(facts) for facts in filtered.link(["Thames", "x"])] == [1, 0]
    assert filtered.with_settings(filter=ChatModelConfig()).link(["x"]) == kb.link(["x"])
    assert kb.with_settings(filter=model).link(["x"]) == [[]]


def test_settings(kb: GraphKB) -> None:
    for wrong in (
        {"link_facts": 0},
        {"passage_weight": 0.0},
        {"damping": 1.0},
        {"backend": "gpu"},
        {"tolerance": 0.0},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            kb.with_settings(**wrong)
    with pytest.raises(ValueError, match="'host' or on the 'device'"):
        load_kb(kb.store.directory, index="scann", encoder=kb.encoder)
    assert load_kb(kb.store.directory, index="device", encoder=kb.encoder).search(["Thames"], 1)[0][0].id
    other = kb.with_settings(tolerance=1e-12)
    assert other.graph is kb.graph
    assert (other.settings.tolerance, kb.settings.tolerance) == (1e-12, 1e-6)
    exact = other.search(["Thames"], 5)[0]
    assert exact[0].score == pytest.approx(
        by_hand("Thames")[exact[0].id], abs=1e-9
    )  # the expected one has float32 products
    with pytest.raises(ValueError, match="width 8, but"):
        GraphKB(kb.store, HashEncoder(8)).search(["x"])
    assert dataclasses.asdict(WalkSettings())["damping"] == 0.5


def test_without_triples(tmp_path: pathlib.Path) -> None:
    """A corpus of which nothing was extracted is ranked by dense scores."""
    triples = write_triples(tmp_path / "triples.jsonl", {"p0": [], "p4": []})
    config = GraphConfig(extractor="given", triples=triples)
    report = build_graph_from_passages(PASSAGES, config, tmp_path / "kb", progress=False, encoder=HashEncoder())
    assert report.numbers.items() >= {"entities": 0, "facts": 0, "edges": 0, "isolated": 5}.items()
    kb = load_kb(tmp_path / "kb", encoder=HashEncoder())
    assert kb.search([f"{PASSAGES[3].title}\n{PASSAGES[3].text}"], 1)[0][0].id == "p3"


def test_one_passage(tmp_path: pathlib.Path) -> None:
    config = GraphConfig()
    build_graph_from_passages(PASSAGES[:1], config, tmp_path / "kb", progress=False, encoder=HashEncoder())
    assert [p.id for p in load_kb(tmp_path / "kb", encoder=HashEncoder()).search(["Ada"], 3)[0]] == ["p0"]


@pytest.mark.slow
def test_musique(shared_data, tmp_path: pathlib.Path, minilm: Encoder) -> None:
    """Real two-hop questions, real triples: the graph finds at least what dense search does."""
    triples = shared_data("musique/triples.jsonl.gz")
    given = PrecomputedTriples(triples)
    corpus = [p for p in read_corpus(shared_data("musique/corpus.jsonl.gz")) if given.of(p)]
    there = {p.id for p in corpus}
    with gzip.open(shared_data("musique/questions_dev.jsonl.gz"), "rt", encoding="utf-8") as file:
        rows = [row for row in map(json.loads, file) if set(row["supporting"]) <= there][:8]
    gold = {id for row in rows for id in row["supporting"]}
    passages = [p for i, p in enumerate(corpus) if p.id in gold or i % 60 == 0]
    config = GraphConfig(extractor="given", triples=str(triples))
    build_graph_from_passages(passages, config, tmp_path / "kb", progress=False, encoder=minilm)
    kb = load_kb(tmp_path / "kb", encoder=minilm)
    assert isinstance(kb, GraphKB)
    questions = [row["question"] for row in rows]

    def recall(found: list[set[str]]) -> float:
        return float(
            np.mean([len(ids & set(row["supporting"])) / len(row["supporting"]) for ids, row in zip(found, rows)])
        )

    graph = recall([{p.id for p in found} for found in kb.search(questions, 5)])
    scores = minilm.embed(questions, prefix="") @ kb.store.embeddings.read(0, len(kb)).T
    dense = recall([{passages[i].id for i in np.argsort(-row)[:5]} for row in scores])
    assert graph >= dense
    assert graph > 0.6
