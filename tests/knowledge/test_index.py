"""Vector indexes against numpy: exact results, ties, independence of batch and devices, ScaNN's recall and its files."""

import pathlib
import sys
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest

from routerl_jax.knowledge import exact_index
from routerl_jax.knowledge.build import BuildConfig, build_from_passages
from routerl_jax.knowledge.exact_index import ExactIndex
from routerl_jax.knowledge.index import INDEXES, VectorIndex
from routerl_jax.knowledge.scann_index import ScannIndex
from routerl_jax.parallel.devices import compiled_programs
from routerl_jax.parallel.mesh import make_mesh
from tests.knowledge.helpers import HashEncoder, InMemory, clustered, make_passages

# Thresholds that send 2000 vectors to each of ScaNN's three ways of searching.
REGIMES: dict[str, dict[str, Any]] = {
    "brute_force": {},
    "hashing": {"brute_force_below": 1000},
    "tree": {"brute_force_below": 100, "tree_from": 1000},
}
BACKENDS = [("exact", {}), *(("scann", settings) for settings in REGIMES.values())]
IDS = ["exact", *REGIMES]
BUILT = [name for name in INDEXES if name != "faiss_ivf"]  # which searches lists that FAISS has made (test_faiss)


def reference(vectors: np.ndarray, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """All inner products in float64, rounded to float32; the k largest, ties by lower id."""
    scores = (queries.astype(np.float64) @ vectors.astype(np.float64).T).astype(np.float32)
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return order, np.take_along_axis(scores, order, 1)


def near(vectors: np.ndarray, count: int, seed: int = 1) -> np.ndarray:
    """Queries near some of the vectors."""
    rng = np.random.default_rng(seed)
    chosen = vectors[rng.integers(len(vectors), size=count)]
    return (chosen + 0.3 * rng.normal(size=chosen.shape) / chosen.shape[1] ** 0.5).astype(np.float32)


def build(name: str, vectors: np.ndarray, settings: dict[str, Any], **options: Any) -> VectorIndex:
    return INDEXES.get(name).build(InMemory(vectors), settings, **options)


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (1, 5), (7, 3), (7, 10), (100, 40), (1003, 5), (1003, 1)])
def test_exact_equals_numpy(n: int, k: int, devices: int) -> None:
    vectors = (
        np.random.default_rng(n).normal(size=(n, 24)).astype(np.float32)
    )  # lengths differ: inner product, not cosine
    index = ExactIndex(InMemory(vectors), mesh=make_mesh(devices=jax.devices()[:devices]))
    for count in (1, 3, 70):
        queries = near(vectors, count)
        ids, scores = index.search(queries, k)
        expected_ids, expected_scores = reference(vectors, queries, min(k, n))
        np.testing.assert_array_equal(ids, expected_ids)
        np.testing.assert_allclose(
            scores, expected_scores, rtol=2e-7
        )  # one unit in the last place: sums in another order
    assert index.search(np.zeros((0, 24)), k)[0].shape == (0, min(k, n))


@pytest.mark.parametrize(("name", "settings"), BACKENDS, ids=IDS)
def test_equal_vectors_go_by_id(name: str, settings: dict[str, Any]) -> None:
    """More copies than the spare candidates, so that a careless top-k would return any of them."""
    vectors = clustered(2000, 32)
    copies = np.random.default_rng(2).permutation(2000)[:300]
    vectors[copies] = vectors[copies[0]]
    index = build(name, vectors, settings)
    ids, scores = index.search(np.concatenate([vectors[copies[:1]], near(vectors, 3)]), 7)
    np.testing.assert_array_equal(ids[0], np.sort(copies)[:7])
    assert len(set(scores[0].tolist())) == 1


class Adverse(VectorIndex):
    """A backend whose rounding prefers the last of equal vectors, and which finds only `most` of them."""

    most = 10**9

    @classmethod
    def build(cls, vectors, settings, *, mesh=None):
        return cls(vectors)

    load = build

    def save(self, directory):
        return {}

    def candidates(self, queries: np.ndarray, count: int) -> np.ndarray:
        scores = (queries @ self.vectors.read(0, len(self)).T).round(4)
        ids = len(self) - 1 - np.argsort(-scores[:, ::-1], axis=1, kind="stable")[:, :count]
        return np.where(np.arange(ids.shape[1]) < self.most, ids, -1)


def test_equal_vectors_go_by_id_whatever_the_backend_prefers() -> None:
    vectors = clustered(2000, 32)
    copies = np.random.default_rng(2).permutation(2000)[:300]
    vectors[copies] = vectors[copies[0]]
    queries = np.concatenate([vectors[copies[:1]], near(vectors, 5)])
    ids, scores = Adverse(InMemory(vectors)).search(queries, 7)
    expected_ids, expected_scores = reference(vectors, queries, 7)
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_allclose(scores, expected_scores, rtol=2e-7)


@pytest.mark.parametrize("name", BUILT)
def test_more_candidates_than_are_scored_at_a_time(name: str) -> None:
    """A large k, and more equal vectors than one block of candidates holds."""
    vectors = clustered(12_000, 8)
    copies = np.random.default_rng(2).permutation(12_000)[:6000]
    vectors[copies] = vectors[copies[0]]
    index, queries = build(name, vectors, {}), vectors[copies[:2]]
    for k in (5, 9000):
        ids, scores = index.search(queries, k)
        expected_ids, expected_scores = reference(vectors, queries, k)
        np.testing.assert_array_equal(ids, expected_ids)
        np.testing.assert_allclose(scores, expected_scores, rtol=2e-7)


def test_the_search_for_equal_vectors_ends() -> None:
    """Of a million equal vectors not all are read; what is found is still a result."""
    vectors = np.broadcast_to(np.ones(2, np.float32), (10**6, 2))
    index = Adverse(InMemory(vectors))
    asked: list[int] = []
    index.candidates = lambda queries, count: asked.append(count) or np.arange(count)[None]  # type: ignore[method-assign]
    np.testing.assert_array_equal(index.search(vectors[:1], 5)[0], [range(5)])
    assert max(asked) < 20_000


def test_a_backend_may_find_fewer() -> None:
    vectors = clustered(100, 8)
    index = Adverse(InMemory(vectors))
    index.most = 3
    ids, scores = index.search(near(vectors, 4), 5)
    assert (ids[:, :3] >= 0).all()
    assert (ids[:, 3:] == -1).all()
    assert np.isneginf(scores[:, 3:]).all()


@pytest.mark.parametrize(("name", "settings"), BACKENDS, ids=IDS)
def test_a_result_does_not_depend_on_the_batch(name: str, settings: dict[str, Any]) -> None:
    vectors = clustered(2000, 48)
    index, queries = build(name, vectors, settings), near(vectors, 90)
    ids, scores = index.search(queries, 6)
    for rows in ([0], [5, 4], list(range(90))[::-1], list(range(40, 60))):
        some_ids, some_scores = index.search(queries[rows], 6)
        np.testing.assert_array_equal(some_ids, ids[rows])
        np.testing.assert_array_equal(some_scores, scores[rows])  # to the bit
    for k in (1, 3):
        np.testing.assert_array_equal(index.search(queries, k)[1], scores[:, :k])


def test_exact_does_not_depend_on_the_number_of_devices() -> None:
    vectors = clustered(1001, 48)
    queries = near(vectors, 20)
    results = [
        ExactIndex(InMemory(vectors), mesh=make_mesh(devices=jax.devices()[:n])).search(queries, 9) for n in (1, 3, 8)
    ]
    for ids, scores in results[1:]:
        np.testing.assert_array_equal(ids, results[0][0])
        np.testing.assert_array_equal(scores, results[0][1])


def test_exact_copies_no_vectors_to_pad_them() -> None:
    vectors = clustered(16, 8)
    with mock.patch.object(np, "pad", side_effect=AssertionError("sixteen vectors fit eight devices as they are")):
        ExactIndex(InMemory(vectors))


def test_exact_compiles_few_programs() -> None:
    vectors = np.random.default_rng(0).normal(size=(500, 16)).astype(np.float32)
    index, before = ExactIndex(InMemory(vectors)), compiled_programs(exact_index._best_of_shards)
    for count in range(1, 140, 9):
        for k in (1, 2, 3, 5, 8, 10, 16):
            index.search(near(vectors, count), k)
    assert compiled_programs(exact_index._best_of_shards) <= before + 5
    index.search(near(vectors, 2), 100)
    assert compiled_programs(exact_index._best_of_shards) <= before + 6


def test_approximate_top_k_reaches_its_target() -> None:
    vectors = clustered(4000, 32)
    queries = near(vectors, 64)
    ids, _ = build("exact", vectors, {"recall_target": 0.9}).search(queries, 10)
    expected, _ = reference(vectors, queries, 10)
    assert np.mean([len(set(a) & set(b)) / 10 for a, b in zip(ids, expected)]) >= 0.9


@pytest.mark.parametrize(("regime", "lowest"), [("brute_force", 1.0), ("hashing", 0.99), ("tree", 0.97)])
@pytest.mark.parametrize("noise", [0.2, 0.5])
def test_scann_recall(regime: str, lowest: float, noise: float) -> None:
    vectors = clustered(3000, 96, noise=noise)
    queries = near(vectors, 128)
    index = ScannIndex.build(InMemory(vectors), REGIMES[regime])
    assert index.regime == regime
    ids, scores = index.search(queries, 10)
    expected, expected_scores = reference(vectors, queries, 10)
    assert np.mean([len(set(a) & set(b)) / 10 for a, b in zip(ids, expected)]) >= lowest
    assert (np.diff(scores, axis=1) <= 0).all()
    found = (queries[:, None] * vectors[ids]).sum(-1)
    np.testing.assert_allclose(scores, found, rtol=1e-5)  # scores are inner products of what was found
    assert (scores <= expected_scores + 1e-6).all()


@pytest.mark.parametrize(("reorder", "k", "scored"), [(1, 1, 17), (1, 5, 50), (120, 5, 120), (120, 20, 200)])
def test_scann_scores_as_many_candidates_as_the_setting_says(reorder: int, k: int, scored: int) -> None:
    index = ScannIndex.build(InMemory(clustered(2000, 16)), {**REGIMES["hashing"], "reorder": reorder})
    searcher = mock.Mock(wraps=index._searcher)
    index._searcher = searcher
    index.search(near(clustered(2000, 16), 1), k)
    assert searcher.search_batched_parallel.call_args_list[0].args[2] == scored


@pytest.mark.parametrize("regime", REGIMES)
def test_scann_gives_k_results_even_beyond_the_leaves_it_searches(regime: str) -> None:
    vectors = clustered(2000, 16)
    index = ScannIndex.build(InMemory(vectors), {**REGIMES[regime], "leaves_to_search": 2})
    for k in (300, 5000):
        ids, scores = index.search(near(vectors, 4), k)
        assert ids.shape == (4, min(k, 2000))
        assert all(len(set(row)) == len(row) for row in ids.tolist())
        assert ids.min() >= 0
        assert np.isfinite(scores).all()


@pytest.mark.parametrize("regime", REGIMES)
def test_scann_saved_moved_and_loaded(tmp_path: pathlib.Path, regime: str) -> None:
    vectors = clustered(2000, 32)
    queries = near(vectors, 10)
    index = ScannIndex.build(InMemory(vectors), REGIMES[regime])
    settings = index.save(tmp_path / "a" / "index")
    (tmp_path / "a").rename(tmp_path / "b")
    loaded = ScannIndex.load(tmp_path / "b" / "index", InMemory(vectors), settings)
    assert loaded.settings == index.settings
    for ours, theirs in zip(loaded.search(queries, 5), index.search(queries, 5)):
        np.testing.assert_array_equal(ours, theirs)
    (tmp_path / "b" / "index" / "scann_assets.pbtxt").unlink()
    with pytest.raises(ValueError, match=r"scann_assets\.pbtxt is missing"):
        ScannIndex.load(tmp_path / "b" / "index", InMemory(vectors), settings)


def test_without_scann(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scann", None)
    message = r"needs the package scann.*\[scann\].*'exact'"
    with pytest.raises(ValueError, match=message):
        build("scann", np.ones((3, 4), np.float32), {})
    encoder = HashEncoder()
    with pytest.raises(ValueError, match=message):
        build_from_passages(make_passages(3), BuildConfig(index="scann"), tmp_path / "kb", encoder=encoder)
    assert encoder.seen == []  # it is noticed before the work begins


def test_bad_arguments() -> None:
    vectors = np.ones((5, 4), np.float32)
    for name in BUILT:
        index = build(name, vectors, {})
        for k in (0, -1):
            with pytest.raises(ValueError, match=f"k={k} must be at least 1"):
                index.search(vectors[:1], k)
        with pytest.raises(ValueError, match=r"\[Q, 4\].*got \(2, 3\)"):
            index.search(np.ones((2, 3)), 1)
        with pytest.raises(ValueError, match="at least one vector"):
            build(name, np.zeros((0, 4), np.float32), {})
        with pytest.raises(ValueError, match="nonsense"):
            build(name, vectors, {"nonsense": 1})
    with pytest.raises(ValueError, match="recall_target=0 must lie in"):
        build("exact", vectors, {"recall_target": 0})
    with pytest.raises(ValueError, match="did you mean 'scann'"):
        INDEXES.get("scan")
