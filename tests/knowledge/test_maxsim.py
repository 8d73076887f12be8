"""MaxSim beside a plain loop and the reference scores of real ColQwen vectors; ragged vectors on disk; pooling; two stages."""

from __future__ import annotations

import json
import pathlib
import re
from typing import Any, get_args

import jax
import ml_dtypes
import numpy as np
import pytest

from routerl_jax.knowledge.exact_index import ExactIndex
from routerl_jax.knowledge.pages import index as ragged
from routerl_jax.knowledge.pages.index import (
    FirstStage,
    MaxSim,
    PageIndex,
    Precision,
    Ragged,
    RaggedWriter,
    decode,
    encode,
    padded_length,
    page_recall,
    pool,
)
from routerl_jax.parallel.mesh import make_mesh
from tests.knowledge.helpers import InMemory
from tests.knowledge.late import max_similarity

RNG = np.random.default_rng(0)


def unit(*shape: int) -> np.ndarray:
    vectors = RNG.normal(size=shape).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def write(directory: pathlib.Path, pages: list[np.ndarray], precision: Precision = "float32", step: int = 4) -> Ragged:
    progress = directory / "progress"
    progress.mkdir(parents=True, exist_ok=True)
    options: Any = {"width": pages[0].shape[1], "precision": precision, "count": len(pages), "step": step}
    RaggedWriter(directory, progress, "vectors", **options).write(lambda start, stop: pages[start:stop])
    return Ragged(directory / "vectors", precision, memory_limit=0, hint="Build again")


@pytest.fixture(scope="module")
def colqwen(request: pytest.FixtureRequest) -> tuple[dict[str, np.ndarray], dict[str, dict[str, float]]]:
    """Vectors of 39 real pages by VRAG's ColQwen2, and reference scores of eight queries (vectors 5 to 20 of a page)."""
    shared_data = request.getfixturevalue("shared_data")
    file = np.load(shared_data("vrag_demo_pages/colqwen_vectors.npz"))
    reference = json.loads(shared_data("vrag_demo_pages/maxsim_reference.json").read_text())
    return {name: file[name] for name in file.files}, reference


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("devices", [1, 3])
def test_reference_scores_of_real_pages(colqwen: Any, dtype: Any, devices: int) -> None:
    """1e-4 of about 15: sums of 16 in another order. The vectors are bfloat16's, so that no dtype rounds them."""
    vectors, reference = colqwen
    pages = [page.astype(dtype) for page in vectors.values()]
    queries = [vectors[name][5:21].astype(np.float32) for name in reference]
    expected = [[reference[name][page] for page in vectors] for name in reference]
    mesh = make_mesh(devices=jax.devices()[:devices])
    np.testing.assert_allclose(MaxSim(pages, mesh=mesh).scores(queries), expected, rtol=0, atol=1e-4)


def test_queries_and_pages_of_any_length() -> None:
    """Many queries (several calls of the device), one, none; pages of one vector and of many; negative products only."""
    pages = [unit(n, 12) for n in (1, 2, 17, 300, 64, 1, 33)] + [-np.abs(unit(5, 12))]
    queries = [unit(n, 12) for n in (3, 1, 700, 500, 40)] + [np.abs(unit(4, 12)), np.zeros((0, 12), np.float32)]
    scorer = MaxSim(pages)
    found = scorer.scores(queries)
    np.testing.assert_allclose(found, max_similarity(queries, pages), rtol=1e-5, atol=1e-5)
    assert not found[-1].any()
    alone = scorer.scores(queries, alone=True)
    np.testing.assert_allclose(alone, found, rtol=1e-5, atol=1e-5)
    for row, query in enumerate(queries[:3]):  # equal to the last bit, whatever else is there
        np.testing.assert_array_equal(MaxSim(pages[2:]).scores([query], alone=True)[0], alone[row, 2:])
    assert scorer.scores([]).shape == (0, 8)
    for query, row in zip(queries, found):
        np.testing.assert_allclose(scorer.scores([query])[0], row, rtol=1e-5, atol=1e-5)


def test_queries_that_bfloat16_would_round_are_not_rounded() -> None:
    pages = [unit(20, 16).astype(ml_dtypes.bfloat16) for _ in range(3)]
    query = unit(10, 16)
    expected = max_similarity([query], [page.astype(np.float32) for page in pages])
    np.testing.assert_allclose(MaxSim(pages).scores([query]), expected, rtol=1e-6)


def test_padding_is_small() -> None:
    for length in (*range(1, 2000), 10_000):
        assert length <= padded_length(length) < length + max(16, length / 16)
    assert len({padded_length(length) for length in range(1, 2001)}) < 100


def test_what_is_no_page() -> None:
    with pytest.raises(ValueError, match=re.escape("page 1 has shape (0, 4), expected [at least 1, 4]")):
        MaxSim([unit(2, 4), unit(0, 4)])
    with pytest.raises(ValueError, match=re.escape("query 0 has shape (2, 5)")):
        MaxSim([unit(2, 4)]).scores([unit(2, 5)])
    with pytest.raises(ValueError, match="at least one page"):
        MaxSim([])


@pytest.mark.parametrize("precision", get_args(Precision))
def test_vectors_on_disk(tmp_path: pathlib.Path, precision: Precision) -> None:
    pages = [unit(n, 24) for n in (3, 1, 700, 40, 5, 9)]
    ragged = write(tmp_path, pages, precision)
    bound = {"float32": 0, "bfloat16": 2**-8, "int8": 0.5 / 127}[precision]
    for row, (page, found) in enumerate(zip(pages, ragged.read(0, 6), strict=True)):
        np.testing.assert_allclose(found.astype(np.float32), page, rtol=0, atol=bound * np.abs(page).max())
        np.testing.assert_array_equal(ragged.take([row])[0], found)
        np.testing.assert_array_equal(decode(encode(page, precision), precision), found)
    assert [len(page) for page in ragged.read(2, 4)] == [700, 40]
    np.testing.assert_array_equal(ragged.owner(), np.repeat(np.arange(6), [3, 1, 700, 40, 5, 9]))
    (tmp_path / "vectors" / "values" / "c" / "0" / "0").unlink()
    with pytest.raises(ValueError, match=r"is missing\. Build again"):
        Ragged(tmp_path / "vectors", precision, memory_limit=0, hint="Build again")


def test_bad_vectors_are_refused(tmp_path: pathlib.Path) -> None:
    (tmp_path / "progress").mkdir()
    for bad, message in (
        ([unit(2, 4), unit(0, 4)], re.escape("page 1 has shape (0, 4)")),
        ([unit(2, 4), np.full((1, 4), np.nan, np.float32)], "page 1 has values that are not finite"),
        ([unit(2, 4)], "1 pages came back for 2"),
    ):
        writer = RaggedWriter(tmp_path, tmp_path / "progress", "v", width=4, precision="float32", count=2, step=2)
        with pytest.raises(ValueError, match=message):
            writer.write(lambda start, stop, bad=bad: bad)


def test_pooling() -> None:
    """Ward finds the groups that are there; runs cut by place; one vector is the mean; few vectors stay."""
    centres = unit(5, 16)
    page = (centres.repeat(20, 0) + 0.01 * RNG.normal(size=(100, 16))).astype(np.float32)
    shuffled = page[RNG.permutation(100)]
    found = pool(shuffled, 5)
    np.testing.assert_allclose(np.sort((found @ centres.T).max(1)), np.ones(5), atol=0.02)
    np.testing.assert_allclose(pool(page, 5, "runs"), page.reshape(5, 20, 16).mean(1), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(pool(page, 1), page.mean(0, keepdims=True), rtol=1e-5)
    np.testing.assert_array_equal(pool(page[:3], 5), page[:3])


def test_two_stages(tmp_path: pathlib.Path) -> None:
    """Whatever the first stage proposes is scored in full; with enough candidates the result is the exact one."""
    topics = unit(30, 32)
    pages = []
    for _ in range(120):
        own = topics[RNG.choice(30, 4, replace=False)]
        vectors = own[RNG.integers(4, size=60)] + 0.1 * RNG.normal(size=(60, 32))
        pages.append((vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32))
    vectors = write(tmp_path / "v", pages, "bfloat16", step=32)
    pooled = write(tmp_path / "p", [pool(page, 6) for page in pages])
    rows = InMemory(pooled.values.read(0, len(pooled.values)))
    first = FirstStage(ExactIndex(rows), pooled.owner(), depth=200, candidates=40)
    index = PageIndex(vectors, first)
    queries = [page[RNG.permutation(60)[:9]] + 0.05 * unit(9, 32) for page in pages[::10]]
    stored = [page.astype(np.float32) for page in vectors.read(0, 120)]
    expected = max_similarity(queries, stored)
    for query, scores, (found, near), (exact, exact_near) in zip(
        queries, expected, index.search(queries, 5), index.exact(queries, 5), strict=True
    ):
        np.testing.assert_array_equal(exact, np.lexsort((np.arange(120), -scores))[:5])
        np.testing.assert_allclose(exact_near, scores[exact], rtol=1e-5)
        np.testing.assert_allclose(near, scores[found], rtol=1e-5)
        alone, alone_near = index.search([query], 5)[0]
        np.testing.assert_array_equal(alone, found)
        np.testing.assert_array_equal(alone_near, near)
    recall = page_recall(index, queries, [20, 40, 120], k=5)
    assert recall[20] <= recall[40] <= recall[120] == 1
    assert recall[40] > 0.9
    everything = PageIndex(vectors, first._replace(depth=len(rows.matrix), candidates=120)).search(queries, 5)
    small = PageIndex(vectors, resident_bytes=10_000)  # read in parts
    for one, other, third in zip(everything, index.exact(queries, 5), small.search(queries, 5), strict=True):
        np.testing.assert_array_equal(one[0], other[0])
        np.testing.assert_array_equal(one[1], other[1])
        np.testing.assert_array_equal(third[0], other[0])


def test_equal_pages_are_in_order(tmp_path: pathlib.Path) -> None:
    page = unit(7, 8)
    vectors = write(tmp_path, [unit(3, 8), page, page, unit(2, 8), page])
    (rows, scores) = PageIndex(vectors).search([page[:2]], 4)[0]
    assert rows[:3].tolist() == [1, 2, 4]
    assert scores[0] == scores[1] == scores[2]


def test_a_lost_shard_is_made_again(tmp_path: pathlib.Path) -> None:
    """Of a build that was killed after its last step: a later one would find nothing to do."""
    pages = [unit(n, 24) for n in (3, 1, 7, 4, 5, 9)]
    whole = write(tmp_path, pages).read(0, 6)
    (tmp_path / "vectors" / "values" / "c" / "0" / "0").unlink()
    made: list[int] = []
    options: Any = {"width": 24, "precision": "float32", "count": 6, "step": 4}
    for expected in ([0, 4], []):  # all of it, then nothing
        made.clear()
        writer = RaggedWriter(tmp_path, tmp_path / "progress", "vectors", **options)
        writer.write(lambda start, stop: made.append(start) or pages[start:stop])
        assert made == expected
    for page, found in zip(whole, Ragged(tmp_path / "vectors", "float32", memory_limit=0, hint="").read(0, 6)):
        np.testing.assert_array_equal(page, found)


def test_a_killed_build_of_slow_pages_loses_one_batch(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes long is saved before its step is full."""
    pages, made = [unit(n, 24) for n in (3, 1, 7, 4, 5, 9)], list[int]()
    expected = write(tmp_path / "fast", pages).read(0, 6)
    monkeypatch.setattr(ragged, "SAVE_SECONDS", 0.0)
    (tmp_path / "progress").mkdir()
    options: Any = {"width": 24, "precision": "float32", "count": 6, "step": 4, "batch": 2}

    def make(start: int, stop: int) -> list[np.ndarray]:
        if made == [0, 2]:
            made.clear()
            raise KeyboardInterrupt
        made.append(start)
        return pages[start:stop]

    with pytest.raises(KeyboardInterrupt):
        RaggedWriter(tmp_path, tmp_path / "progress", "vectors", **options).write(make)
    writer = RaggedWriter(tmp_path, tmp_path / "progress", "vectors", **options)
    writer.write(make)
    assert (writer.resumed, made) == (4, [4])
    for page, found in zip(expected, Ragged(tmp_path / "vectors", "float32", memory_limit=0, hint="").read(0, 6)):
        np.testing.assert_array_equal(page, found)
