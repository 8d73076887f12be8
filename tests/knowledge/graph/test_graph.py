"""Phrases, facts and edges of a small corpus against numbers worked out by hand; synonyms against all pairs."""

import pathlib
import re

import numpy as np
import pytest

from routerl_jax.knowledge.graph.graph import Graph, Neighbours, make_graph, phrases_of, synonyms
from routerl_jax.knowledge.graph.triples import normalised
from tests.knowledge.helpers import InMemory, clustered

NONE = Neighbours(np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, np.float32))


def test_normalised() -> None:
    assert normalised("  Dr. O'Neil (b. 1960) ") == "dr  o neil  b  1960"
    assert normalised("Étienne") == "tienne"  # as HippoRAG has it
    assert normalised("Москва!") == "москва"  # where HippoRAG has nothing left
    assert normalised("?!") == ""


def test_hand_computed_graph() -> None:
    passages = [
        [("Ada", "knows", "Bob"), ("Bob", "likes", "Ada"), ("Ada", "is", "Ada")],
        [("ADA", "knows", "bob"), ("Bob", "is in", "Rome")],
        [],
    ]
    phrases = phrases_of(passages)
    assert phrases.entities == ["ada", "bob", "rome"]
    assert phrases.facts == [
        ("ada", "knows", "bob"),
        ("bob", "likes", "ada"),
        ("ada", "is", "ada"),
        ("bob", "is in", "rome"),
    ]
    assert phrases.fact_ends.tolist() == [[0, 1], [1, 0], [0, 0], [1, 2]]
    assert sorted(map(tuple, phrases.mentions.tolist())) == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]
    graph = make_graph(phrases, 3, NONE)
    assert (graph.entities, graph.passages, graph.nodes) == (3, 3, 6)
    assert graph.passages_of.tolist() == [2, 2, 1]
    # three triples join ada and bob, each as an edge in both directions; the loop is no edge; passage 2 has none
    expected = np.zeros((6, 6))
    expected[0, 1], expected[1, 2] = 6, 2
    expected[0, 3] = expected[1, 3] = expected[0, 4] = expected[1, 4] = expected[2, 4] = 1
    np.testing.assert_array_equal(graph.adjacency.toarray(), expected + expected.T)

    alike = Neighbours(np.array([0, 1, 0]), np.array([2, 0, 1]), np.array([0.9, 0.8, 0.8], np.float32))
    # ada -> rome is new; between ada and bob the cosine takes the place of the count, at both ends
    expected[0, 1], expected[0, 2] = 1.6, 0.9
    np.testing.assert_allclose(make_graph(phrases, 3, alike).adjacency.toarray(), expected + expected.T, rtol=1e-6)
    one_sided = Neighbours(np.array([0]), np.array([1]), np.array([0.8], np.float32))
    assert make_graph(phrases, 3, one_sided).adjacency[1, 0] == pytest.approx(3.8)


def test_save_and_load(tmp_path: pathlib.Path) -> None:
    graph = make_graph(phrases_of([[("a", "b", "c")]]), 1, NONE)
    graph.save(tmp_path / "index")
    again = Graph.load(tmp_path / "index")
    np.testing.assert_array_equal(again.adjacency.toarray(), graph.adjacency.toarray())
    assert again.passages_of.tolist() == [1, 1]
    path = tmp_path / "index" / "graph.npz"
    content = path.read_bytes()
    for damaged in (content[: len(content) // 2], b"", b"x" * 100):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=re.escape(str(path))):
            Graph.load(tmp_path / "index")
    path.unlink()
    with pytest.raises(ValueError, match="missing"):
        Graph.load(tmp_path / "index")


def test_a_graph_without_triples() -> None:
    graph = make_graph(phrases_of([[], []]), 2, NONE)
    assert (graph.entities, graph.nodes, graph.adjacency.nnz) == (0, 2, 0)


@pytest.mark.parametrize(("count", "most"), [(300, 101), (300, 3), (2500, 4), (2, 101), (1, 101), (0, 5)])
def test_synonyms_are_those_of_all_pairs(count: int, most: int) -> None:
    vectors = 3 * clustered(max(count, 1), 16, noise=0.15)[:count]
    phrases = [f"phrase {i}" if i % 10 else f"{i % 7}!" for i in range(count)]
    found = synonyms(phrases, InMemory(vectors), threshold=0.8, most=most)
    cosines = (vectors @ vectors.T) / 9
    expected = []
    for i in range(count):
        if i % 10:
            order = np.lexsort((np.arange(count), -cosines[i]))
            expected += [(i, j) for j in order[order != i] if cosines[i, j] >= 0.8][: min(most, count)]
    pairs = list(zip(found.sources.tolist(), found.targets.tolist()))
    # the order of cosines that differ by rounding alone is free
    assert len(pairs) == len(expected)
    assert len(set(pairs) - set(expected)) <= 0.01 * len(expected)
    np.testing.assert_allclose(found.cosines, cosines[found.sources, found.targets], atol=1e-5)


def test_synonyms_by_an_index_and_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = clustered(400, 16, noise=0.15)
    phrases = [f"phrase {i}" for i in range(400)]
    plain = synonyms(phrases, InMemory(vectors), most=5)
    exact = synonyms(phrases, InMemory(vectors), most=5, index="exact")
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")  # the device's program, run by the CPU
    device = synonyms(phrases, InMemory(vectors), most=5)
    for other in (exact, device):
        same = set(zip(plain.sources.tolist(), plain.targets.tolist()))
        assert len(same ^ set(zip(other.sources.tolist(), other.targets.tolist()))) <= 0.01 * len(same)
        np.testing.assert_allclose(np.sort(other.cosines), np.sort(plain.cosines), atol=1e-5)
