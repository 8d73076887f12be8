"""Adding and deleting: results as of a fresh build of the same passages, crashes before and after the change, bad input."""

import dataclasses
import itertools
import os
import pathlib
import random
import resource
import shutil
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest

from routerl_jax.core.types import Passage
from routerl_jax.knowledge import update as update_module
from routerl_jax.knowledge import writer as writer_module
from routerl_jax.knowledge.base import KnowledgeBase
from routerl_jax.knowledge.bm25 import Bm25Config, build_bm25
from routerl_jax.knowledge.build import BuildConfig, build_from_passages, build_kb
from routerl_jax.knowledge.dense import DenseKB, UpdatedIndex
from routerl_jax.knowledge.exact_index import ExactIndex
from routerl_jax.knowledge.load import load_kb
from routerl_jax.knowledge.store import Manifest, Store
from routerl_jax.knowledge.update import add, delete, read_added, update
from routerl_jax.knowledge.writer import StoreWriter
from tests.knowledge.helpers import HashEncoder, InMemory, build_words, clustered, make_passages, write_jsonl

ENCODER = HashEncoder()
HOW: dict[str, Any] = {"mesh": None, "index": None, "encoder": ENCODER}


def new(*numbers: int) -> list[Passage]:
    return [Passage(id=f"n{i}", title="New", text=f"Fresh text number {i}") for i in numbers]


def build(kind: str, passages: list[Passage], directory: pathlib.Path) -> KnowledgeBase:
    if kind == "bm25":
        build_words(passages, directory, Bm25Config(name="kb"))
        return load_kb(directory)
    build_from_passages(passages, BuildConfig(name="kb", index=kind), directory, progress=False, encoder=ENCODER)
    return load_kb(directory, encoder=ENCODER)


def opened(kind: str, directory: pathlib.Path) -> KnowledgeBase:
    return load_kb(directory) if kind == "bm25" else load_kb(directory, encoder=ENCODER)


QUERIES = ["New\nFresh text number 3", "Tïtle 7\nText № 7 — end", "Text № 11", "number 2 word"]


@pytest.mark.parametrize(("kind", "compact_above"), [("scann", 100.0), ("scann", 0.2), ("exact", 100.0), ("bm25", 0.2)])
def test_as_a_fresh_build(tmp_path: pathlib.Path, kind: str, compact_above: float) -> None:
    """After several changes every search gives what a knowledge base built of the same passages gives."""
    build(kind, make_passages(60), tmp_path / "kb")
    now = {p.id: p for p in make_passages(60)}
    steps = [
        ([], ["p3", "p7"]),
        (new(1, 2, 3), []),
        (new(4), ["n2", "p11"]),
        ([Passage(id="p5", title="Tïtle", text="replaced")], ["p5"]),
        (new(*range(10, 30)), []),
    ]
    compacted = []
    for number, (adds, deletes) in enumerate(steps, 1):
        report = update(tmp_path / "kb", add=adds, delete=deletes, compact_above=compact_above, encoder=ENCODER)
        compacted.append(report.compacted)
        for name in deletes:
            del now[name]
        now |= {p.id: p for p in adds}
        assert (report.count, report.added, report.deleted) == (len(now), len(adds), len(deletes))
        kb = opened(kind, tmp_path / "kb")
        fresh = build(kind, list(now.values()), tmp_path / f"fresh-{number}")
        assert len(kb) == len(now)
        for query, k in itertools.product(QUERIES, (1, 100)):
            found, expected = kb.search([query], k)[0], fresh.search([query], k)[0]
            assert {p.id for p in found} <= set(now)
            np.testing.assert_allclose([p.score for p in found], [p.score for p in expected], rtol=1e-6)
            if kind != "bm25":  # whose ties are many
                assert [(p.id, p.text) for p in found] == [(p.id, p.text) for p in expected]
    expected = {100.0: [kind == "bm25"] * 5, 0.2: [kind == "bm25"] * 4 + [True]}
    assert compacted == expected[compact_above]
    assert not [path for path in tmp_path.iterdir() if ".tmp-" in path.name or "replaced" in path.name]
    assert len(list((tmp_path / "kb").glob("delta-*"))) <= 2


def test_most_of_it_deleted() -> None:
    """Rows that were deleted stand before the first that is left, by hundreds; equal vectors go by id."""
    vectors = clustered(1000, 16)
    vectors[500:] = vectors[0]
    main = ExactIndex(InMemory(vectors))
    deleted = np.array(sorted(random.Random(0).sample(range(1, 1000), 900)))
    added = clustered(7, 16, seed=3)
    index = UpdatedIndex(main, InMemory(added), deleted)
    everything = np.concatenate([vectors, added])
    scores = (everything[[0, 3, 600]].astype(np.float64) @ everything.astype(np.float64).T).astype(np.float32)
    scores[:, deleted] = -np.inf
    order = np.argsort(-scores, axis=1, kind="stable")
    assert len(index) == 107
    for k in (1, 30, 107, 500):
        ids, found = index.search(everything[[0, 3, 600]], k)
        np.testing.assert_array_equal(ids, order[:, : min(k, 107)])
        np.testing.assert_allclose(found, np.take_along_axis(scores, ids, 1), rtol=2e-7)


BAD = {
    "there already": (
        {"add": [make_passages(4)[3]]},
        r"has a passage 'p3' already\. Give the new one another id, or delete",
    ),
    "twice": ({"add": new(1, 1)}, "id 'n1' occurs twice"),
    "empty": ({"add": [Passage(id="x", title="", text=" ")]}, r"\('x'\) is empty"),
    "not there": ({"delete": ["p1", "zzz", "y"]}, "has no passage 'zzz', 'y', which should be deleted"),
    "all": ({"delete": [f"p{i}" for i in range(20)]}, "nothing would be left"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_changes_nothing(tmp_path: pathlib.Path, case: str) -> None:
    build("exact", make_passages(20), tmp_path / "kb")
    before = (tmp_path / "kb" / "kb.json").read_bytes()
    arguments, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        update(tmp_path / "kb", encoder=ENCODER, **arguments)
    assert (tmp_path / "kb" / "kb.json").read_bytes() == before
    assert not list((tmp_path / "kb").glob("*delta*"))


class Crash(BaseException):
    pass


@pytest.mark.parametrize("where", ["write_passages", "sync_tree", "Manifest.write"])
def test_a_crash_changes_nothing(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """At every stage before kb.json is replaced the old state stands, and the update can simply be run again."""
    kb = build("exact", make_passages(20), tmp_path / "kb")
    expected = kb.search(["anything"], 20)
    target = Manifest if where == "Manifest.write" else update_module
    with monkeypatch.context() as patch:
        patch.setattr(target, where.rpartition(".")[2], lambda *_: (_ for _ in ()).throw(Crash))
        with pytest.raises(Crash):
            add(tmp_path / "kb", new(1), encoder=ENCODER)
    assert opened("exact", tmp_path / "kb").search(["anything"], 20) == expected
    add(tmp_path / "kb", new(1), encoder=ENCODER)
    after = opened("exact", tmp_path / "kb")
    assert isinstance(after, DenseKB)
    assert after.search(["New\nFresh text number 1"], 1)[0][0].id == "n1"


def test_a_crash_while_compacting(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The change itself is in place; the next update compacts."""
    build("exact", make_passages(20), tmp_path / "kb")
    with monkeypatch.context() as patch:
        patch.setattr(update_module.StoreWriter, "commit", lambda *_: (_ for _ in ()).throw(Crash))
        with pytest.raises(Crash):
            update(tmp_path / "kb", add=new(*range(8)), encoder=ENCODER)
    assert len(opened("exact", tmp_path / "kb")) == 28
    with monkeypatch.context() as patch:  # what was copied is not copied again
        patch.setattr(writer_module, "write_passages", lambda *_: pytest.fail("passages are there"))
        assert update(tmp_path / "kb").compacted
    assert not list(tmp_path.glob("kb.tmp-*"))
    assert delete(tmp_path / "kb", [f"n{i}" for i in range(7)]).compacted
    kb = opened("exact", tmp_path / "kb")
    assert len(kb) == 21
    assert isinstance(kb, DenseKB)
    assert kb.store.manifest.delta is None
    assert kb.store.manifest.updates == 2


@pytest.mark.parametrize("memory_limit", [0, 2**30])
def test_who_has_it_open_never_gets_rows_of_the_new_one(tmp_path: pathlib.Path, memory_limit: int) -> None:
    """Compacted under its feet, an open knowledge base gives what was there as far as it is in memory, or an error."""
    build("exact", make_passages(20), tmp_path / "kb")
    fresh, used = (DenseKB.open(Store(tmp_path / "kb", memory_limit=memory_limit), **HOW) for _ in range(2))
    expected = used.search(QUERIES, 3)
    update(tmp_path / "kb", delete=["p0", "p1"], compact_above=0, encoder=ENCODER)
    with pytest.raises(RuntimeError, match=r"was replaced since the knowledge base was opened .*: open it again"):
        fresh.search(QUERIES, 3)
    if memory_limit:
        assert used.search(QUERIES, 3) == expected
    else:
        with pytest.raises(RuntimeError, match="open it again"):
            used.search(QUERIES, 3)
    assert opened("exact", tmp_path / "kb").search([QUERIES[1]], 1)[0][0].id == "p7"


@pytest.mark.parametrize("kind", ["exact", "bm25"])
def test_a_crash_between_the_two_renames(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Nothing is at its place then: opening says where it is, and any further update begins by putting it back."""
    build(kind, make_passages(20), tmp_path / "kb")
    rename = pathlib.Path.rename

    def crash(path: pathlib.Path, target: pathlib.Path) -> None:
        if target == tmp_path / "kb":
            raise Crash
        rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(pathlib.Path, "rename", crash)
        with pytest.raises(Crash):
            update(tmp_path / "kb", delete=["p1"], compact_above=0, encoder=ENCODER)
    with pytest.raises(ValueError, match=r"\.kb\.replaced is what was there when a build or an update was killed"):
        load_kb(tmp_path / "kb")
    more = write_jsonl(tmp_path / "more.jsonl", [{"id": "n1", "text": "Fresh text number 1"}])
    update(tmp_path / "kb", add=read_added(tmp_path / "kb", more), delete=["p2"], encoder=ENCODER)
    left = {f"p{i}" for i in range(20)} - {"p2"} | {"n1"}
    if kind == "exact":  # its deletion had been made current before the compaction began
        left -= {"p1"}
    store = Store(tmp_path / "kb")
    assert {passage.id for _, passage in store.live()} == left
    assert not (tmp_path / ".kb.replaced").exists()


def test_an_update_that_waited_starts_from_what_the_other_made(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a killed update has left is not gone on with where another one came between."""
    build("bm25", make_passages(20), tmp_path / "kb")
    with monkeypatch.context() as patch:
        patch.setattr(update_module, "index_words", lambda *_: (_ for _ in ()).throw(Crash))
        with pytest.raises(Crash):
            add(tmp_path / "kb", new(1))
    waiting = threading.Thread(target=add, args=(tmp_path / "kb", new(1)))
    with StoreWriter(tmp_path / "kb", "0" * 12):
        waiting.start()
        time.sleep(0.3)
        build("bm25", make_passages(30), tmp_path / "other")
        manifest = dataclasses.replace(Manifest.read(tmp_path / "other"), updates=1)
        shutil.rmtree(tmp_path / "kb")
        shutil.copytree(tmp_path / "other", tmp_path / "kb")
        manifest.write(tmp_path / "kb")
    waiting.join()
    assert len(load_kb(tmp_path / "kb")) == 31


def test_no_room(tmp_path: pathlib.Path) -> None:
    """What was there stays, and the message says so; with room the same update goes through."""
    passages = [Passage(id=f"p{i}", title="", text=f"{i:09}") for i in range(9)]
    more = [Passage(id=f"n{i}", title="", text=os.urandom(400).hex()) for i in range(99)]
    for kind in ("exact", "bm25"):
        build(kind, passages, tmp_path / kind)
        signal_before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
        try:
            with pytest.raises(ValueError, match=r"no room to write \(.*run the same command again"):
                update(tmp_path / kind, add=more, encoder=ENCODER, compact_above=100)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, signal_before)
        assert len(opened(kind, tmp_path / kind)) == 9
        assert update(tmp_path / kind, add=more, encoder=ENCODER, compact_above=100).count == 108


def test_rows_of_a_table_are_added_to_words(tmp_path: pathlib.Path) -> None:
    """BM25 reads tables when it is built, so also when it is updated."""
    (tmp_path / "cities.csv").write_text("name,country\nAccra,Ghana\n")
    build_bm25(Bm25Config(corpus=str(tmp_path / "cities.csv")), tmp_path / "kb", progress=False)
    (tmp_path / "more.csv").write_text("name,country\nLima,Peru\n")
    update(tmp_path / "kb", add=read_added(tmp_path / "kb", tmp_path / "more.csv"))
    assert [passage.id for passage in load_kb(tmp_path / "kb").search(["Peru"], k=1)[0]] == ["more#0"]


SPLIT: dict[str, Any] = {"passage_words": 10, "least_words": 2}


@pytest.mark.parametrize("kind", ["dense_text", "bm25"])
def test_what_is_added_is_read_as_it_was_built(tmp_path: pathlib.Path, kind: str) -> None:
    """Long texts are split by the settings of the build."""
    long = [{"id": name, "title": name, "text": " ".join(f"{name}{i}" for i in range(25))} for name in "ab"]
    first, second = (write_jsonl(tmp_path / f"{row['id']}.jsonl", [row]) for row in long)
    if kind == "bm25":
        build_bm25(Bm25Config(corpus=str(first), **SPLIT), tmp_path / "kb", progress=False)
    else:
        config = BuildConfig(corpus=str(first), index="exact", **SPLIT)
        build_kb(config, tmp_path / "kb", progress=False, encoder=ENCODER)
    found = read_added(tmp_path / "kb", second)
    assert [p.id for p in found] == ["b#0", "b#1", "b#2"]
    assert update(tmp_path / "kb", add=found, encoder=ENCODER).count == 6


def test_tables_are_added_as_tables(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update_module, "shared_encoder", lambda _: ENCODER)
    rows = {"header": ["Name", "Moons"], "rows": [["Mars", 2], ["Venus", 0], ["Earth", 1]]}
    first, second = (write_jsonl(tmp_path / f"{name}.jsonl", [{"id": name, "title": name, **rows}]) for name in "ab")
    config = BuildConfig(kind="dense_table", corpus=str(first), index="exact", rows_per_passage=2)
    build_kb(config, tmp_path / "kb", progress=False, encoder=ENCODER)
    found = read_added(tmp_path / "kb", second)
    assert [(p.id, p.text) for p in found] == [
        ("b#0-1", "b | Name: Mars | Moons: 2\nName: Venus | Moons: 0"),
        ("b#2", "b | Name: Earth | Moons: 1"),
    ]
    assert update(tmp_path / "kb", add=found, encoder=ENCODER).count == 4


def test_damage_and_rebuild(tmp_path: pathlib.Path) -> None:
    build("exact", make_passages(20), tmp_path / "kb")
    delete(tmp_path / "kb", ["p1"])
    with pytest.raises(ValueError, match="already holds a knowledge base"):  # the same corpus is not the same any more
        build("exact", make_passages(20), tmp_path / "kb")
    os.unlink(tmp_path / "kb" / "delta-1" / "deleted.npy")
    with pytest.raises(ValueError, match=r"delta-1/deleted\.npy is missing or damaged"):
        load_kb(tmp_path / "kb", encoder=ENCODER)
