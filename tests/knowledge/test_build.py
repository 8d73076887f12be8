"""Whole builds: from files, tables and memory, with their reports; and real questions on real passages."""

import copy
import dataclasses
import gzip
import itertools
import json
import pathlib
import shutil
import types
from collections.abc import Sequence
from unittest import mock

import numpy as np
import pytest

from routerl_jax.core.config import from_config_dict, to_config_dict
from routerl_jax.core.types import Passage
from routerl_jax.knowledge.bm25 import Bm25Config, build_bm25
from routerl_jax.knowledge.build import BuildConfig, build_from_passages, build_kb, recall
from routerl_jax.knowledge.builds import changes
from routerl_jax.knowledge.corpus import READING, corpus_sha256, read_corpus
from routerl_jax.knowledge.dense import DenseKB
from routerl_jax.knowledge.index import VectorIndex
from routerl_jax.knowledge.load import load_kb
from routerl_jax.knowledge.scann_index import ScannIndex, ScannSettings
from routerl_jax.models.families.bert import Encoder
from tests.knowledge.helpers import HashEncoder, InMemory, clustered, make_passages, write_jsonl


def test_report(tmp_path: pathlib.Path) -> None:
    rows = [{"id": p.id, "title": p.title, "text": p.text} for p in make_passages(60)]
    config = BuildConfig(corpus=str(write_jsonl(tmp_path / "c.jsonl", rows)))
    report = build_kb(config, tmp_path / "kb", progress=False, encoder=HashEncoder())
    assert (report.name, report.kind, report.count, report.dim) == ("kb", "dense_text", 60, 8)
    assert report.numbers == {"embedded": 60, "cut": 0}
    assert (report.index, report.recall) == ("scann (brute_force)", 1.0)
    assert set(report.seconds) == {"read", "embed", "index", "check", "total"}
    assert report.seconds["total"] == pytest.approx(sum(v for k, v in report.seconds.items() if k != "total"))
    assert set(report.bytes) == {"passages", "embeddings", "index"}
    assert report.bytes["embeddings"] >= 60 * 8 * 4
    assert report.peak_rss_bytes > 10**7
    json.dumps(dataclasses.asdict(report))
    assert "60; 60 embedded, 0 cut" in str(report)
    manifest = load_kb(tmp_path / "kb", encoder=HashEncoder()).store.manifest
    assert manifest.corpus == config.corpus
    kb = load_kb(tmp_path / "kb", encoder=HashEncoder())
    assert kb.search([f"{rows[7]['title']}\n{rows[7]['text']}"], 1)[0][0].id == "p7"


@pytest.mark.parametrize("kind", ["dense", "bm25"])
def test_what_other_rules_read_is_taken_as_built_only_if_it_is_the_same(tmp_path: pathlib.Path, kind: str) -> None:
    """A knowledge base of an earlier version says nothing of its rules, by which this row's title was "Accra lies"."""
    corpus, place = tmp_path / "c.jsonl", tmp_path / "kb"
    row = {"id": "1", "title": "Ghana", "contents": "Accra lies\non the coast."}

    def build() -> int:
        if kind == "bm25":
            return build_bm25(Bm25Config(corpus=str(corpus)), place, progress=False).count
        return build_kb(BuildConfig(corpus=str(corpus)), place, progress=False, encoder=HashEncoder()).numbers[
            "embedded"
        ]

    for old_row, same in ((row, True), (row | {"title": "Accra lies"}, False)):
        write_jsonl(corpus, [old_row])
        build()
        write_jsonl(corpus, [row])
        manifest = json.loads((place / "kb.json").read_text()) | {"corpus_sha256": corpus_sha256(corpus)}
        del manifest["reading"]
        (place / "kb.json").write_text(json.dumps(manifest))
        if same:
            assert build() == (kind == "bm25")
            assert json.loads((place / "kb.json").read_text())["reading"] == READING
        else:
            with pytest.raises(ValueError, match=r"kb already holds .* rules of an earlier version.*overwrite=True"):
                build()
        shutil.rmtree(place)


def test_tables(tmp_path: pathlib.Path, minilm: Encoder) -> None:
    """Real MiniLM: the row that answers is found, and the budget is counted in its tokens."""
    planets = {
        "id": "planets",
        "title": "Planets",
        "header": ["Name", "Moons", "Description"],
        "rows": [
            ["Mars", "2", "the red one"],
            ["Jupiter", "95", "the largest " + "and stormy " * 100],
            ["Earth", "1", "our home"],
        ],
    }
    tall = {"id": "t/2", "title": "Mountains", "header": ["Peak", "Height"], "rows": [["Everest", "8849 m"]]}
    config = BuildConfig(
        corpus=str(write_jsonl(tmp_path / "t.jsonl", [planets, tall])), kind="dense_table", table_budget=60
    )
    report = build_kb(config, tmp_path / "kb", progress=False, encoder=minilm)
    kb = load_kb(tmp_path / "kb", encoder=minilm)
    assert isinstance(kb, DenseKB)
    passages = kb.store.passages.read(0, len(kb))
    assert report.count == len(passages) > 4
    assert [p.id for p in passages if "#1." not in p.id] == ["planets#0", "planets#2", "t/2#0"]
    assert minilm.tokenizer is not None
    lengths = [len(minilm.tokenizer.encode_for_model(p.text, 512)) for p in passages]
    assert 50 < max(lengths) <= 60
    results = kb.search(["How many moons does Mars have?", "How high is Mount Everest?"], 1)
    assert [found[0].id for found in results] == ["planets#0", "t/2#0"]
    assert results[0][0].text == "Planets | Name: Mars | Moons: 2 | Description: the red one"


def test_passages_longer_than_the_encoder_reads_are_counted(tmp_path: pathlib.Path, minilm: Encoder) -> None:
    encoder = copy.copy(minilm)
    encoder.config = dataclasses.replace(minilm.config, max_length=32)
    texts = ["short", "a " * 29 + "b", "a " * 30 + "b", "antidisestablishmentarianism " * 8]  # 30 tokens and 2 special
    passages = [Passage(id=str(i), title="", text=text) for i, text in enumerate(texts)]
    report = build_from_passages(passages, BuildConfig(), tmp_path / "kb", progress=False, encoder=encoder)
    assert report.numbers["cut"] == 2
    assert load_kb(tmp_path / "kb", encoder=encoder).search(["x"], 9)[0][0].text in texts  # cut in the vector only


def test_texts_are_tokenised_once(tmp_path: pathlib.Path, minilm: Encoder) -> None:
    passages = [
        Passage(id=str(i), title="", text=f"{i} word" * 60) for i in range(3)
    ]  # more letters than 256, not tokens
    tokenizer = minilm.tokenizer
    assert tokenizer is not None
    spies = mock.Mock(wraps=tokenizer.encode_for_model), mock.Mock(wraps=tokenizer.encode)
    with mock.patch.multiple(tokenizer, encode_for_model=spies[0], encode=spies[1]):
        report = build_from_passages(passages, BuildConfig(), tmp_path / "kb", progress=False, encoder=minilm)
    texts = [call.args[0] for spy in spies for call in spy.call_args_list]
    assert sorted(filter(None, texts)) == [p.text for p in passages]
    assert report.numbers["cut"] == 0
    store = load_kb(tmp_path / "kb", encoder=minilm).store
    np.testing.assert_array_equal(store.embeddings.read(0, 3), minilm.embed([p.text for p in passages]))


@pytest.mark.parametrize(("platform", "embed_batch", "rows"), [("cpu", 0, 32), ("gpu", 0, 512), ("gpu", 5, 5)])
def test_rows_of_an_encoder_call(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, platform: str, embed_batch: int, rows: int
) -> None:
    sizes: list[int] = []

    class Asked(HashEncoder):
        def embed(self, texts: Sequence[str], *, prefix: str | None = None, batch_size: int = 32) -> np.ndarray:
            if texts != ["width"]:
                sizes.append(batch_size)
            return super().embed(texts)

    devices = [types.SimpleNamespace(platform=platform, device_kind="") for _ in range(2)]
    monkeypatch.setattr("jax.local_devices", lambda: devices)
    build_from_passages(
        make_passages(9),
        BuildConfig(embed_batch=embed_batch, check_queries=0),
        tmp_path / "kb",
        progress=False,
        encoder=Asked(),
    )
    assert sizes == [rows]


def test_recall_is_measured() -> None:
    vectors = clustered(3000, 64, noise=0.6)

    class Half(VectorIndex):
        """Knows only the even half of the vectors."""

        build = load = save = None

        def candidates(self, queries: np.ndarray, count: int) -> np.ndarray:
            scores = queries @ vectors[::2].T
            return 2 * np.argsort(-scores, axis=1)[:, :count]

    Half.__abstractmethods__ = frozenset()
    assert recall(Half(InMemory(vectors)), InMemory(vectors), vectors[:200]) == pytest.approx(0.5, abs=0.05)
    poor = ScannIndex.build(InMemory(vectors), {"brute_force_below": 1, "tree_from": 2, "leaves_to_search": 1})
    good = ScannIndex.build(InMemory(vectors), {"brute_force_below": 1, "tree_from": 2})
    queries = vectors[::10] + 0.01
    ids, _ = good.search(queries, 10)
    best = np.argsort(-(queries @ vectors.T), axis=1)[:, :10]
    share = np.mean([len(set(a) & set(b)) / 10 for a, b in zip(ids, best)])
    assert recall(good, InMemory(vectors), queries) == pytest.approx(share, abs=1e-3)
    assert recall(poor, InMemory(vectors), queries) < recall(good, InMemory(vectors), queries)


def test_low_recall_is_reported(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    poor = ScannSettings(brute_force_below=1, tree_from=2, leaves=100, leaves_to_search=1)
    config = BuildConfig(scann=poor)
    report = build_from_passages(make_passages(2000), config, tmp_path / "kb", progress=False, encoder=HashEncoder(32))
    assert report.index == "scann (tree)"
    assert report.recall is not None
    assert report.recall < 0.95
    assert f"finds only {report.recall:.3f} of the nearest neighbours" in caplog.text


def test_config_goes_through_config_dict() -> None:
    config = to_config_dict(BuildConfig())
    config.scann.leaves = 7
    assert from_config_dict(BuildConfig, config).scann.leaves == 7
    with pytest.raises(ValueError, match=r"config\.corpsu; did you mean config\.corpus"):
        from_config_dict(BuildConfig, {"corpsu": "x"})
    for wrong in ({"kind": "dense"}, {"shard_size": 0}, {"rows_per_passage": 0}, {"embed_batch": -1}):
        with pytest.raises(ValueError, match=f"config(: |\\.){next(iter(wrong))}="):
            from_config_dict(BuildConfig, wrong)
    for unused in ({"table_budget": 99}, {"index": "exact", "scann": {"leaves": 9}}, {"recall_target": 0.9}):
        with pytest.raises(ValueError, match=r"is set, but (kind|index)='\w+' does not use it"):
            from_config_dict(BuildConfig, unused)


def test_changes_are_what_the_command_line_would_say() -> None:
    assert changes(BuildConfig(corpus="x", overwrite=True, check_queries=1, embed_batch=9)) == {}
    config = BuildConfig(query_prefix="q: ", scann=ScannSettings(leaves=5))
    assert changes(config) == {"query_prefix": "q: ", "scann.leaves": 5}


def test_bad_configurations(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match="gs://bucket/kb: knowledge bases are built on a file system"):
        build_from_passages(make_passages(1), BuildConfig(), "gs://bucket/kb", encoder=HashEncoder())
    with pytest.raises(ValueError, match="corpus must be set"):
        build_kb(BuildConfig(), tmp_path / "kb")
    with pytest.raises(ValueError, match="corpus='x' must be empty"):
        build_from_passages(make_passages(1), BuildConfig(corpus="x"), tmp_path / "kb")
    with pytest.raises(ValueError, match=r"x\.jsonl does not exist"):
        build_kb(BuildConfig(corpus=str(tmp_path / "x.jsonl")), tmp_path / "kb")
    with pytest.raises(ValueError, match="unknown index 'faiss'"):
        build_from_passages(make_passages(1), BuildConfig(index="faiss"), tmp_path / "kb", encoder=HashEncoder())
    write_jsonl(tmp_path / "c.jsonl", [{"id": "a", "text": "x"}, {"id": "b", "text": ""}])
    with pytest.raises(ValueError, match=r"c\.jsonl, line 2: empty passage"):
        build_kb(BuildConfig(corpus=str(tmp_path / "c.jsonl")), tmp_path / "kb", encoder=HashEncoder(), progress=False)


@pytest.mark.slow
def test_hotpotqa(shared_data, tmp_path: pathlib.Path, minilm: Encoder) -> None:
    """Questions find their gold passages among others of HotpotQA."""
    with gzip.open(shared_data("hotpotqa/questions_dev.jsonl.gz"), "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in itertools.islice(file, 10)]
    gold = {id for row in rows for id in row["supporting"]}
    corpus = enumerate(read_corpus(shared_data("hotpotqa/corpus.jsonl.gz")))
    passages = [p for i, p in corpus if p.id in gold or i % 400 == 0]
    build_from_passages(passages, BuildConfig(), tmp_path / "kb", progress=False, encoder=minilm)
    results = load_kb(tmp_path / "kb", encoder=minilm).search([row["question"] for row in rows], k=5)
    found = [len({p.id for p in r} & set(row["supporting"])) / len(row["supporting"]) for r, row in zip(results, rows)]
    assert np.mean(found) > 0.8
