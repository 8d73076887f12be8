"""Indexes at scale: reduced types, blocks that pass through the devices, and settings that the build chooses itself."""

import dataclasses
import pathlib
from typing import Any

import jax
import numpy as np
import pytest

from routerl_jax.knowledge import exact_index
from routerl_jax.knowledge.exact_index import ExactIndex
from routerl_jax.knowledge.index import INDEXES, jittered, kth_best, recall
from routerl_jax.knowledge.scann_index import ScannIndex, ScannSettings, _matrix
from routerl_jax.knowledge.store import StoredArray, create_array
from routerl_jax.parallel.mesh import make_mesh
from tests.knowledge.helpers import InMemory, clustered
from tests.knowledge.test_index import reference

TREE: dict[str, Any] = {"brute_force_below": 100, "tree_from": 1000, "leaves": 100}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("device_bytes", [0, 8 * 1000])
def test_exact_types_and_blocks(dtype: str, device_bytes: int) -> None:
    """float32 is numpy's top-k to the bit, in one piece or in blocks; reduced types propose what is then ranked in full."""
    vectors = clustered(4001, 32) * np.random.default_rng(3).uniform(0.5, 2, (4001, 1)).astype(np.float32)
    index = ExactIndex(InMemory(vectors), dtype=dtype, device_bytes=device_bytes, mesh=make_mesh(devices=jax.devices()))
    assert index.streams == (index.blocks > 1) == (device_bytes > 0)
    queries = jittered(InMemory(vectors), 70)
    ids, scores = index.search(queries, 10)
    expected_ids, expected_scores = reference(vectors, queries, 10)
    if dtype == "float32":
        np.testing.assert_array_equal(ids, expected_ids)
    else:
        assert (scores >= expected_scores[:, -1:] - 1e-5).mean() > 0.999
    np.testing.assert_allclose(scores[:, 0], expected_scores[:, 0], rtol=2e-7)
    again, _ = index.search(queries, 10)  # from what was kept of the blocks
    np.testing.assert_array_equal(again, ids)


def test_exact_is_numpys_top_k_in_float32() -> None:
    """Small whole numbers have exact products in float32, so numpy's own float32 scores must come back to the bit."""
    rng = np.random.default_rng(0)
    vectors, queries = (rng.integers(-8, 9, (n, 24)).astype(np.float32) for n in (3000, 9))
    scores = queries @ vectors.T
    order = np.argsort(-scores, axis=1, kind="stable")[:, :7]
    ids, found = ExactIndex(InMemory(vectors)).search(queries, 7)
    np.testing.assert_array_equal(ids, order)
    np.testing.assert_array_equal(found, np.take_along_axis(scores, order, 1))


@pytest.mark.parametrize(
    ("n", "device_bytes", "blocks"), [(8 * 256 * 128 + 1, 0, 1), (600_000, 0, 2), (600_000, 1_060_000, 3)]
)
def test_the_best_of_many_by_groups(n: int, device_bytes: int, blocks: int) -> None:
    """Few values, so that many are equal: the lowest ids win, whichever group of rows they are in."""
    vectors = np.random.default_rng(0).integers(-3, 4, (n, 4)).astype(np.float32)
    index = ExactIndex(InMemory(vectors), mesh=make_mesh(devices=jax.devices()), device_bytes=device_bytes)
    assert index._rows % (8 * exact_index._GROUP) == 0
    assert (index.blocks, index.streams) == (blocks, device_bytes > 0)
    queries = vectors[[5, n - 1, 17]] + np.float32(0.5)
    ids = index.candidates(queries, 20)
    expected = np.argsort(-(queries @ vectors.T), axis=1, kind="stable")[:, :20]
    np.testing.assert_array_equal(ids[:, :20], expected)


def test_names_stand_for_types(tmp_path: pathlib.Path) -> None:
    vectors = InMemory(clustered(50, 8))
    for name, dtype in (("exact", "float32"), ("exact_bf16", "bfloat16"), ("exact_int8", "int8")):
        index = INDEXES.get(name).build(vectors, {})
        settings = index.save(tmp_path)
        assert settings["dtype"] == dtype
        assert INDEXES.get(name).load(tmp_path, vectors, settings).search(vectors.matrix[:3], 1)[0].tolist() == [
            [0],
            [1],
            [2],
        ]
    for bad, message in (
        ({"dtype": "int4"}, "not one of"),
        ({"device_bytes": -1}, "negative"),
        ({"leaves": 1}, "no setting"),
    ):
        with pytest.raises(ValueError, match=message):
            INDEXES.get("exact").build(vectors, bad)


def test_scann_tunes_itself(tmp_path: pathlib.Path) -> None:
    """The fewest leaves that reach the target; what was set by hand stays; settings are kept for loading."""
    vectors = InMemory(clustered(5000, 32, noise=0.15))
    queries = jittered(vectors, 100, seed=5)
    counts = {}
    for target in (0.5, 0.9, 0.99):
        index = ScannIndex.build(vectors, {**TREE, "recall_target": target})
        assert recall(index, vectors, queries) >= target - 0.05  # other queries than those it was tuned with
        counts[target] = index.settings.leaves_to_search
    assert counts[0.5] <= counts[0.9] <= counts[0.99]
    assert counts[0.5] < counts[0.99]
    settings = index.save(tmp_path / "index")
    loaded = ScannIndex.load(tmp_path / "index", vectors, settings)
    np.testing.assert_array_equal(loaded.search(queries, 5)[0], index.search(queries, 5)[0])
    fixed = ScannIndex.build(vectors, {**TREE, "leaves_to_search": 7, "reorder": 120})
    assert (fixed.settings.leaves_to_search, fixed.settings.reorder) == (7, 120)
    plain = ScannIndex.build(vectors, {**TREE, "recall_target": 0.0})
    assert plain.leaves == (100, 20)


def test_a_target_that_is_out_of_reach(caplog: pytest.LogCaptureFixture) -> None:
    vectors = InMemory(clustered(3000, 16))
    with caplog.at_level("WARNING", logger="absl"):
        index = ScannIndex.build(vectors, {**TREE, "leaves_to_search": 1, "recall_target": 0.999})
    assert "reaches a recall of 0.999" in caplog.text
    assert index.settings.leaves_to_search == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_scann_may_keep_smaller_vectors(dtype: str, tmp_path: pathlib.Path) -> None:
    vectors = InMemory(clustered(3000, 32))
    queries = jittered(vectors, 50)
    sizes = []
    for kept in ("float32", dtype):
        index = ScannIndex.build(vectors, {**TREE, "reorder_dtype": kept})
        assert recall(index, vectors, queries) >= 0.93
        index.save(tmp_path / kept)
        sizes.append(sum(file.stat().st_size for file in (tmp_path / kept).iterdir()))
    assert sizes[1] < sizes[0] - 3000 * 32
    with pytest.raises(ValueError, match="is not one of float32"):
        ScannSettings(reorder_dtype="float64")


def test_large_matrices_go_through_a_file(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = clustered(500, 16)
    array = create_array(tmp_path / "embeddings", vectors.shape, "float32", 128, 16, compress=False)
    array.write(vectors).result()
    stored = StoredArray(tmp_path / "embeddings", memory_limit=0, hint="")
    monkeypatch.setattr("routerl_jax.knowledge.scann_index._MAPPED", 0)
    monkeypatch.setattr("routerl_jax.knowledge.scann_index._BLOCK", 100)
    with _matrix(stored) as matrix:
        assert isinstance(matrix, np.memmap)
        np.testing.assert_array_equal(matrix, vectors)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["embeddings"]
    index = ScannIndex.build(stored, dataclasses.asdict(ScannSettings(brute_force_below=100)))
    assert recall(index, stored, vectors[:20]) >= 0.95


def test_kth_best_and_jitter() -> None:
    vectors = clustered(300, 16)
    queries = jittered(InMemory(vectors), 40)
    expected = np.sort(queries @ vectors.T, axis=1)[:, -10]
    np.testing.assert_allclose(kth_best(InMemory(vectors), queries, 10), expected, rtol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(queries, axis=1), 1, rtol=1e-5)
    starts = vectors[np.unique(np.linspace(0, 299, 40).astype(int))]
    assert 0.5 < np.median((queries * starts).sum(1)) < 0.85
