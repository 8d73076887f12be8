"""A working directory as HippoRAG 2 leaves it, read as it is."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from routerl_jax.core.types import Passage
from routerl_jax.knowledge.corpus import passage_text
from routerl_jax.knowledge.graph.build import GraphConfig, build_graph, build_graph_from_passages
from routerl_jax.knowledge.graph.kb import ENTITIES, FACTS, GraphKB
from routerl_jax.knowledge.graph.triples import normalised
from routerl_jax.knowledge.load import load_kb
from routerl_jax.knowledge.store import EMBEDDINGS, StoredArray
from routerl_jax.knowledge.update import add
from tests.knowledge.graph.helpers import PASSAGES, TRIPLES, write_triples
from tests.knowledge.helpers import HashEncoder

LLM, ENCODER = "meta-llama_Llama-3.3-70B", "facebook_contriever"
QUERIES = ["Where was the teacher of Ada Byron born?", "Thames", "it rains."]


def write_store(directory: pathlib.Path, store: str, rows: Mapping[str, str], encoder: HashEncoder) -> None:
    """As `EmbeddingStore._save_data`: a frame of hash_id, content and embedding, the latter a list of floats."""
    place = directory / f"{store}_embeddings"
    place.mkdir(parents=True)
    table = pa.table(
        {
            "hash_id": list(rows),
            "content": list(rows.values()),
            "embedding": pa.array(list(encoder.embed(list(rows.values())))),
        }
    )
    pq.write_table(table, place / f"vdb_{store}.parquet")


def left_by_hipporag(save: pathlib.Path, *, dim: int = 8) -> pathlib.Path:
    """SAVE_DIR of the passages and triples of `helpers`; returns SAVE_DIR/LLM_ENCODER."""
    directory, encoder = save / f"{LLM}_{ENCODER}", HashEncoder(dim)
    facts = {tuple(map(normalised, triple)) for triples in TRIPLES.values() for triple in triples}
    phrases = sorted({fact[end] for fact in facts for end in (0, 2)})
    write_store(directory, "chunk", {f"chunk-{p.id}": passage_text(p) for p in PASSAGES}, encoder)
    write_store(directory, "entity", {f"entity-{i}": phrase for i, phrase in enumerate(phrases)}, encoder)
    write_store(directory, "fact", {f"fact-{i}": str(fact) for i, fact in enumerate(sorted(facts))}, encoder)
    (directory / "graph.pickle").write_bytes(b"never read")
    docs = [
        {
            "idx": f"chunk-{p.id}",
            "passage": passage_text(p),
            "extracted_entities": [],
            "extracted_triples": TRIPLES[p.id],
        }
        for p in PASSAGES
    ]
    (save / f"openie_results_ner_{LLM}.json").write_text(json.dumps({"docs": docs, "avg_ent_chars": 1}))
    (save / "openie_results_ner_gpt-4o-mini.json").write_text("another model's")
    return directory


def config_of(directory: pathlib.Path) -> GraphConfig:
    return GraphConfig(corpus=str(directory), extractor="hipporag")


def test_passages_triples_and_vectors_are_taken(tmp_path: pathlib.Path) -> None:
    """The graph is that of the same triples; facts have HippoRAG's vectors; only a few passages are embedded, as a check."""
    directory, encoder = left_by_hipporag(tmp_path / "outputs"), HashEncoder()
    report = build_graph(config_of(directory), tmp_path / "kb", progress=False, encoder=encoder)
    assert report.count == 5
    assert set(encoder.seen) == {"width", *map(passage_text, PASSAGES)}
    kb = load_kb(tmp_path / "kb", encoder=HashEncoder())
    assert isinstance(kb, GraphKB)
    assert [p.id for p in kb.store.passages.read(0, 5)] == [f"chunk-{p.id}" for p in PASSAGES]
    assert kb.store.passages.read(0, 1)[0].title == "Ada Byron"
    facts = kb.triples(range(len(kb.graph.fact_ends)))
    stored = StoredArray(tmp_path / "kb" / FACTS / EMBEDDINGS, 0, "").read(0, len(facts))
    np.testing.assert_array_equal(stored, HashEncoder().embed([str(fact) for fact in facts]))

    plain = GraphConfig(extractor="given", triples=write_triples(tmp_path / "triples.jsonl"))
    build_graph_from_passages(PASSAGES, plain, tmp_path / "plain", progress=False, encoder=HashEncoder())
    other = load_kb(tmp_path / "plain", encoder=HashEncoder())
    assert isinstance(other, GraphKB)
    np.testing.assert_array_equal(kb.graph.adjacency.toarray(), other.graph.adjacency.toarray())
    np.testing.assert_array_equal(kb.graph.fact_ends, other.graph.fact_ends)
    phrases = [tmp_path / name / ENTITIES / EMBEDDINGS for name in ("kb", "plain")]
    vectors = [StoredArray(path, 0, "").read(0, kb.graph.entities) for path in phrases]
    np.testing.assert_array_equal(vectors[0], vectors[1])
    assert all(len(found) == 3 for found in kb.search(QUERIES, 3))

    seen = len(encoder.seen)
    assert build_graph(config_of(directory), tmp_path / "kb", progress=False, encoder=encoder).count == 5
    assert len(encoder.seen) == seen  # it is there already


def test_what_it_lacks_is_embedded(tmp_path: pathlib.Path) -> None:
    """A phrase without a vector, as after a change of the triples; and one whose spaces differ."""
    directory, encoder = left_by_hipporag(tmp_path / "outputs"), HashEncoder()
    file = directory / "entity_embeddings" / "vdb_entity.parquet"
    table = pq.read_table(file)
    contents = ["jed  water" if one == "jed water" else one for one in table["content"].to_pylist()]
    table = table.set_column(1, "content", [contents])
    pq.write_table(table.filter(pa.array([one != "thames" for one in contents])), file)
    build_graph(config_of(directory), tmp_path / "kb", progress=False, encoder=encoder)
    assert set(encoder.seen) == {"width", "thames", *map(passage_text, PASSAGES)}


def test_it_can_be_updated(tmp_path: pathlib.Path) -> None:
    directory = left_by_hipporag(tmp_path / "outputs")
    build_graph(config_of(directory), tmp_path / "kb", progress=False, encoder=HashEncoder())
    add(tmp_path / "kb", [Passage(id="new", title="", text="It snows.")], encoder=HashEncoder())
    kb = load_kb(tmp_path / "kb", encoder=HashEncoder())
    assert len(kb) == 6
    assert kb.search(["It snows."], 6)[0]


def test_what_is_wrong_is_named(tmp_path: pathlib.Path) -> None:
    directory = left_by_hipporag(tmp_path / "outputs")

    def refused(expected: str, config: GraphConfig, encoder: HashEncoder | None = None) -> None:
        with pytest.raises(ValueError, match=expected):
            build_graph(config, tmp_path / "kb", progress=False, encoder=encoder or HashEncoder())

    refused("vdb_chunk.parquet is missing: .* is no working directory of HippoRAG 2", config_of(tmp_path))
    refused("are not those of the corpus", config_of(directory), _Other())
    refused("width 8, but the encoder gives 4", config_of(directory), HashEncoder(4))
    openie = tmp_path / "outputs" / f"openie_results_ner_{LLM}.json"
    moved = openie.rename(tmp_path / "elsewhere.json")
    refused("must have one openie_results_ner_LLM.json .* there is none. Name it", config_of(directory))
    named = GraphConfig(corpus=str(directory), extractor="hipporag", triples=str(moved))
    assert build_graph(named, tmp_path / "named", progress=False, encoder=HashEncoder()).count == 5
    (directory / "fact_embeddings" / "vdb_fact.parquet").write_text("damaged")
    refused("vdb_fact.parquet: no Parquet file with the columns", named)


class _Other(HashEncoder):
    """Another encoder of the same width."""

    def embed(self, texts, *, prefix=None, batch_size=32):  # type: ignore[no-untyped-def]
        return super().embed([f"other {text}" for text in texts], prefix=prefix)
