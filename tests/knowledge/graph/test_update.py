"""Passages added to a graph and deleted from it: as a fresh build, and nothing that stays is asked or embedded again."""

import pathlib

import pytest

from routerl_jax.core.types import Passage
from routerl_jax.knowledge.graph.build import GraphConfig, build_graph_from_passages
from routerl_jax.knowledge.graph.kb import WalkSettings
from routerl_jax.knowledge.load import load_kb
from routerl_jax.knowledge.store import Manifest
from routerl_jax.knowledge.update import read_added, update
from tests.knowledge.graph.helpers import PASSAGES, Scripted, knowing, write_triples
from tests.knowledge.helpers import HashEncoder, files_of, write_jsonl

CONFIG = GraphConfig(extractor="llm", name="kb", walk=WalkSettings(link_facts=3))
QUERIES = ["Who taught Ada Byron?", "Jed Water", "What does it do?"]


def build(passages: list[Passage], directory: pathlib.Path, config: GraphConfig = CONFIG) -> None:
    llm = Scripted(knowing) if config.extractor == "llm" else None
    build_graph_from_passages(passages, config, directory, progress=False, encoder=HashEncoder(32), llm=llm)


def test_as_a_fresh_build_and_only_new_texts_cost_anything(tmp_path: pathlib.Path) -> None:
    build(PASSAGES[:3], tmp_path / "kb")
    (tmp_path / "kb.extractions.sqlite").unlink()  # the answers of the model are not needed for what stays
    encoder, llm = HashEncoder(32), Scripted(knowing)
    report = update(tmp_path / "kb", add=PASSAGES[3:], delete=["p1"], encoder=encoder, llm=llm)
    assert (report.added, report.deleted, report.count, report.compacted) == (2, 1, 4, True)
    assert {text.partition("\n")[0] for text in llm.asked} == {"London", "Weather"}
    embedded = {text for text in encoder.seen if text != "width"}
    assert embedded == {
        "London\nLondon lies on the Thames.",
        "Weather\nit rains.",
        "thames",
        "london lies on thames",
    }
    build([PASSAGES[0], *PASSAGES[2:]], tmp_path / "fresh")
    ours, fresh = files_of(tmp_path / "kb"), files_of(tmp_path / "fresh")
    assert {name for name in fresh if ours.get(name) != fresh[name]} <= {"kb.json", "graph.json"}
    one, other = (load_kb(tmp_path / name, encoder=HashEncoder(32)) for name in ("kb", "fresh"))
    assert one.search(QUERIES, 4) == other.search(QUERIES, 4)
    manifest = Manifest.read(tmp_path / "kb")
    assert (manifest.updates, manifest.count, manifest.index["walk"]["link_facts"]) == (1, 4, 3)


def test_a_replaced_passage_is_extracted_anew(tmp_path: pathlib.Path) -> None:
    build(PASSAGES, tmp_path / "kb", GraphConfig(extractor="rules"))
    changed = Passage(id="p3", title="London", text="London lies on the river Fleet.")
    rows = [{"id": changed.id, "title": changed.title, "text": changed.text}]
    added = read_added(tmp_path / "kb", write_jsonl(tmp_path / "more.jsonl", rows))
    assert added == [changed]
    update(tmp_path / "kb", add=added, delete=["p3"], encoder=HashEncoder(32))
    build([*PASSAGES[:3], PASSAGES[4], changed], tmp_path / "fresh", GraphConfig(extractor="rules"))
    for name in ("triples.jsonl.gz", "index/graph.npz"):
        assert (tmp_path / "kb" / name).read_bytes() == (tmp_path / "fresh" / name).read_bytes()


def test_given_triples_are_read_again(tmp_path: pathlib.Path) -> None:
    config = GraphConfig(extractor="given", triples=write_triples(tmp_path / "triples.jsonl"))
    build(PASSAGES[:2], tmp_path / "kb", config)
    update(tmp_path / "kb", add=PASSAGES[2:], encoder=HashEncoder(32))
    build(PASSAGES, tmp_path / "fresh", config)
    assert (tmp_path / "kb/index/graph.npz").read_bytes() == (tmp_path / "fresh/index/graph.npz").read_bytes()
    (tmp_path / "triples.jsonl").unlink()
    with pytest.raises(ValueError, match=r"triples\.jsonl"):
        update(tmp_path / "kb", delete=["p0"], encoder=HashEncoder(32))
    assert len(load_kb(tmp_path / "kb", encoder=HashEncoder(32))) == 5


def test_a_failure_leaves_what_was_there(tmp_path: pathlib.Path) -> None:
    build(PASSAGES[:3], tmp_path / "kb")

    class Failing(HashEncoder):
        def embed(self, inputs, /, *, prefix=None, batch_size=32):
            if "Weather\nit rains." in inputs:
                raise RuntimeError("no power")
            return super().embed(inputs, prefix=prefix, batch_size=batch_size)

    with pytest.raises(RuntimeError, match="no power"):
        update(tmp_path / "kb", add=PASSAGES[3:], encoder=Failing(32), llm=Scripted(knowing))
    assert [p.id for p in load_kb(tmp_path / "kb", encoder=HashEncoder(32)).search(["it rains"], 5)[0]] != []
    assert len(load_kb(tmp_path / "kb", encoder=HashEncoder(32))) == 3
    llm = Scripted(knowing)
    update(tmp_path / "kb", add=PASSAGES[3:], encoder=HashEncoder(32), llm=llm)
    assert not llm.asked  # their triples were there when the first attempt failed
    assert len(load_kb(tmp_path / "kb", encoder=HashEncoder(32))) == 5


def test_a_model_that_nobody_names(tmp_path: pathlib.Path) -> None:
    config = GraphConfig(extractor="llm")
    build_graph_from_passages(
        PASSAGES, config, tmp_path / "kb", progress=False, encoder=HashEncoder(), llm=Scripted(knowing)
    )
    new = [Passage(id="new", title="New", text="New is new.")]
    with pytest.raises(ValueError, match=r"kb.json describes none .*Give it: update\(.., llm=MODEL\)"):
        update(tmp_path / "kb", add=new, encoder=HashEncoder())
