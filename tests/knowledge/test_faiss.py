"""Files that FAISS writes, against FAISS itself; and fixtures of it, where it is not installed."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import numpy as np
import pytest

from routerl_jax.core.types import Passage
from routerl_jax.knowledge.build import BuildConfig, build_kb
from routerl_jax.knowledge.faiss import FaissIVFIndex, FaissVectors
from routerl_jax.knowledge.load import load_kb
from routerl_jax.knowledge.update import add
from tests.knowledge.helpers import HashEncoder, clustered, make_passages, write_jsonl

FIXTURES = pathlib.Path(__file__).parent / "faiss_files"  # `write_fixtures` made them with faiss-cpu 1.15.1
VECTORS = clustered(40, 6, seed=3)


def faiss_file(path: pathlib.Path, vectors: np.ndarray, kind: str, *, metric: int = 0, probes: int = 0) -> pathlib.Path:
    """What Search-R1's index_builder writes: index_factory, train, add, write_index."""
    faiss = pytest.importorskip("faiss", reason="faiss-cpu is not installed")
    faiss.omp_set_num_threads(1)
    index = faiss.index_factory(vectors.shape[1], kind, metric)
    index.train(vectors)
    index.add(vectors)
    if probes:
        index.nprobe = probes
    faiss.write_index(index, str(path))
    return path


def write_fixtures() -> None:
    """python -c "from tests.knowledge.test_faiss import *; write_fixtures()"."""
    FIXTURES.mkdir(exist_ok=True)
    for name, kind, probes in (("flat", "Flat", 0), ("ivf", "IVF4,Flat", 2)):
        faiss_file(FIXTURES / f"{name}.index", VECTORS, kind, probes=probes)


@pytest.mark.parametrize("name", ["flat", "ivf"])
def test_fixtures_are_read_without_faiss(name: str) -> None:
    found = FaissVectors(FIXTURES / f"{name}.index")
    assert found.shape == (40, 6)
    np.testing.assert_array_equal(found.read(0, 40), VECTORS)
    np.testing.assert_array_equal(found.take(np.array([[7, 0], [39, 7]])), VECTORS[[[7, 0], [39, 7]]])
    np.testing.assert_array_equal(found.read(35, 99), VECTORS[35:])
    if name == "ivf":
        assert found.lists is not None
        assert found.lists.probes == 2
        assert sorted(np.concatenate(found.lists.ids)) == list(range(40))


@pytest.mark.parametrize("kind", ["Flat", "IVF16,Flat", "HNSW8,Flat"])
def test_vectors_of_what_faiss_writes(tmp_path: pathlib.Path, kind: str) -> None:
    vectors = clustered(700, 12, seed=1)
    found = FaissVectors(faiss_file(tmp_path / "x.index", vectors, kind))
    np.testing.assert_array_equal(found.read(0, 700), vectors)
    np.testing.assert_array_equal(found.take(np.array([699, 3])), vectors[[699, 3]])


@pytest.mark.parametrize("probes", [1, 5, 16])
def test_lists_are_searched_as_faiss_does(tmp_path: pathlib.Path, probes: int) -> None:
    """The same ids and scores, at the file's own nprobe, on unequal lists."""
    faiss = pytest.importorskip("faiss")
    vectors, queries = clustered(900, 12, seed=1), clustered(60, 12, seed=2)
    path = faiss_file(tmp_path / "x.index", vectors, "IVF16,Flat", probes=probes)
    scores, ids = faiss.read_index(str(path)).search(queries, 10)
    index = FaissIVFIndex(FaissVectors(path))
    assert index.probes == probes
    own_ids, own_scores = index.search(queries, 10)
    found = own_ids >= 0
    np.testing.assert_array_equal(own_ids, np.where(found, ids, -1))
    np.testing.assert_array_equal(found, ids >= 0)  # lists of fewer than ten
    np.testing.assert_allclose(own_scores[found], scores[found], rtol=1e-5)  # FAISS adds up in float32


def corpus(directory: pathlib.Path, count: int = 60) -> tuple[pathlib.Path, list[Passage]]:
    passages = make_passages(count)
    rows = [{"id": p.id, "contents": f'"{p.title}"\n{p.text}'} for p in passages]
    return write_jsonl(directory / "wiki.jsonl", rows), passages


def vectors_of(passages: list[Passage]) -> np.ndarray:
    return HashEncoder().embed([f"{p.title}\n{p.text}" for p in passages])


@pytest.mark.parametrize(("kind", "backend"), [("Flat", "exact"), ("IVF4,Flat", "faiss_ivf")])
def test_a_knowledge_base_over_an_index_where_it_lies(tmp_path: pathlib.Path, kind: str, backend: str) -> None:
    """Nothing is embedded and no vector is copied; the result is FAISS's. It can be updated, and then stands for itself."""
    faiss = pytest.importorskip("faiss")
    path, passages = corpus(tmp_path)
    file = faiss_file(tmp_path / "e5.index", vectors_of(passages), kind, probes=2 if "IVF" in kind else 0)
    config, encoder = BuildConfig(corpus=str(path), vectors=str(file)), HashEncoder()
    report = build_kb(config, tmp_path / "kb", progress=False, encoder=encoder)
    assert report.numbers["embedded"] == 0
    assert report.index.startswith(backend)
    assert not (tmp_path / "kb" / "embeddings").exists()
    assert len(encoder.seen) < 40  # the check that vectors and passages belong together
    assert build_kb(config, tmp_path / "kb", progress=False, encoder=encoder).seconds.keys() == {
        "check",
        "total",
    }  # is there already
    kb = load_kb(tmp_path / "kb", encoder=HashEncoder())
    query = f"{passages[11].title}\n{passages[11].text}"
    scores, ids = faiss.read_index(str(file)).search(HashEncoder().embed([query]), 5)
    found = kb.search([query], 5)[0]
    assert [passage.id for passage in found] == [f"p{i}" for i in ids[0] if i >= 0]
    np.testing.assert_allclose([passage.score for passage in found], scores[0][: len(found)], rtol=1e-5)
    assert found[0].title == passages[11].title

    add(tmp_path / "kb", [Passage(id="new", title="", text="added")], encoder=HashEncoder())
    assert load_kb(tmp_path / "kb", encoder=HashEncoder()).search(["added"], 1)[0][0].id == "new"
    more = [Passage(id=f"m{i}", title="", text=f"more {i}") for i in range(20)]
    add(
        tmp_path / "kb", more, encoder=HashEncoder()
    )  # enough changes: the main part is made anew, with vectors of its own
    file.unlink()
    kb = load_kb(tmp_path / "kb", encoder=HashEncoder(), index="exact")
    assert [kb.search([text], 1)[0][0].id for text in ("more 7", "added", query)] == ["m7", "new", "p11"]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"count": 59}, "holds 60 vectors, but the corpus has 59 passages"),
        ({"dim": 4}, "width 8, but the encoder gives 4"),
        ({"shift": 1}, "are not those of the corpus"),
    ],
)
def test_vectors_of_another_corpus_or_encoder_are_refused(
    tmp_path: pathlib.Path, change: dict[str, int], expected: str
) -> None:
    path, _ = corpus(tmp_path, change.get("count", 60))
    vectors = np.roll(vectors_of(make_passages(60)), change.get("shift", 0), axis=0)
    file = faiss_file(tmp_path / "e5.index", vectors, "Flat")
    encoder: Any = HashEncoder(change.get("dim", 8))
    with pytest.raises(ValueError, match=expected):
        build_kb(BuildConfig(corpus=str(path), vectors=str(file)), tmp_path / "kb", progress=False, encoder=encoder)


def test_a_file_that_was_replaced_is_noticed(tmp_path: pathlib.Path) -> None:
    path, passages = corpus(tmp_path)
    file = faiss_file(tmp_path / "e5.index", vectors_of(passages), "Flat")
    build_kb(BuildConfig(corpus=str(path), vectors=str(file)), tmp_path / "kb", progress=False, encoder=HashEncoder())
    faiss_file(file, vectors_of(passages)[::-1].copy(), "Flat")
    with pytest.raises(ValueError, match=r"e5\.index is not the file .* was built with"):
        load_kb(tmp_path / "kb", encoder=HashEncoder())
    file.unlink()
    with pytest.raises(ValueError, match=r"e5\.index: can't be read"):
        load_kb(tmp_path / "kb", encoder=HashEncoder())


def test_what_cannot_be_read_is_named(tmp_path: pathlib.Path) -> None:
    (tmp_path / "pq.index").write_bytes(b"IxPq" + bytes(100))
    with pytest.raises(ValueError, match=r"kind 'IxPq' has no vectors that can be read here: Flat, IVF"):
        FaissVectors(tmp_path / "pq.index")
    with pytest.raises(ValueError, match="nowhere: can't be read"):
        FaissVectors(tmp_path / "nowhere")
    whole = (FIXTURES / "ivf.index").read_bytes()
    for size in (0, 3, 20, 60, len(whole) - 1):
        (tmp_path / "cut.index").write_bytes(whole[:size])
        with pytest.raises(ValueError, match="cut short, or no FAISS index"):
            FaissVectors(tmp_path / "cut.index")


@pytest.mark.parametrize(
    ("kind", "metric", "expected"),
    [("Flat", 1, "made for L2 distances"), ("IVF4_HNSW8,Flat", 0, "its quantizer is of kind 'IHNf'")],
)
def test_what_faiss_writes_and_nobody_reads_here(tmp_path: pathlib.Path, kind: str, metric: int, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        FaissVectors(faiss_file(tmp_path / "x.index", clustered(200, 8), kind, metric=metric))


def test_settings_that_do_not_fit(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match="vectors is set, but kind='dense_table' does not use it"):
        dataclasses.replace(BuildConfig(kind="dense_table"), vectors="x.index")
    with pytest.raises(ValueError, match="these vectors have none"):
        FaissIVFIndex(FaissVectors(FIXTURES / "flat.index"))
    with pytest.raises(ValueError, match="probes=5 must be from 1 to 4"):
        FaissIVFIndex(FaissVectors(FIXTURES / "ivf.index"), probes=5)
