"""A knowledge base that is there already against what a configuration says of it."""

import dataclasses
import pathlib
import shutil

import pytest

from routerl_jax.data.atlas.world import passages_of
from routerl_jax.knowledge.build import BuildConfig, build_from_passages, build_kb
from routerl_jax.knowledge.builds import check_kb
from routerl_jax.training.config import KnowledgeConfig
from routerl_jax.training.knowledge import _open_kb
from tests.knowledge.helpers import HashEncoder, make_passages, write_jsonl


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """`file` and `memory`: knowledge bases of corpus.jsonl, and of the same passages in memory."""
    home = tmp_path_factory.mktemp("home")
    rows = [{"id": p.id, "title": p.title, "text": p.text} for p in make_passages(5)]
    corpus = str(write_jsonl(home / "corpus.jsonl", rows))
    build_kb(BuildConfig(corpus=corpus, index="exact"), home / "file", progress=False, encoder=HashEncoder())
    build_from_passages(
        make_passages(5), BuildConfig(index="exact"), home / "memory", progress=False, encoder=HashEncoder()
    )
    return home


def test_what_agrees(home: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"kind": "dense_text", "encoder": "all-MiniLM-L6-v2", "index": "exact"}
    moved = shutil.copy(home / "corpus.jsonl", tmp_path)
    monkeypatch.chdir(home)
    for source in ("corpus.jsonl", str(home / "corpus.jsonl"), moved, "gone.jsonl"):
        check_kb(home / "file", {**said, "source": source}, "kb")
    check_kb(home / "memory", {**said, "source": "mine"}, "kb", make_passages(5))
    check_kb(home / "memory", {}, "kb")


@pytest.mark.parametrize(
    ("key", "value"),
    [("kind", "dense_table"), ("encoder", "atlas-warm-start"), ("index", "scann"), ("source", "other.jsonl")],
)
def test_a_key_that_differs(home: pathlib.Path, monkeypatch: pytest.MonkeyPatch, key: str, value: str) -> None:
    monkeypatch.chdir(home)
    write_jsonl(home / "other.jsonl", [{"id": "a", "text": "b"}])
    message = (
        rf"knowledge\.text\.{key}='{value}', but the knowledge base in .*file was built with another: '.*text\.{key}"
    )
    with pytest.raises(ValueError, match=message):
        check_kb(home / "file", {key: value}, "knowledge.text")


def test_other_passages(home: pathlib.Path) -> None:
    with pytest.raises(ValueError, match=r"source='mine', but .* was built with another: 'passages in memory'"):
        check_kb(home / "memory", {"source": "mine"}, "knowledge.text", make_passages(4))
    spec = KnowledgeConfig(source="atlas/text", index="exact", directory=str(home / "memory"))
    with pytest.raises(ValueError, match=r"config\.knowledge\.text\.source='atlas/text', but "):
        _open_kb("text", spec, progress=False)


def test_defaults_say_nothing_without_a_source(home: pathlib.Path) -> None:
    assert _open_kb("text", KnowledgeConfig(directory=str(home / "file")), progress=False).name == "file"
    with pytest.raises(ValueError, match=r"text\.kind='dense_table', but"):
        _open_kb("text", KnowledgeConfig(kind="dense_table", directory=str(home / "file")), progress=False)
    with_scann = KnowledgeConfig(source="gone.jsonl", index="scann", directory=str(home / "file"))
    with pytest.raises(ValueError, match=r"text\.index='scann', but"):
        _open_kb("text", with_scann, progress=False)
    _open_kb("text", dataclasses.replace(with_scann, index="auto"), progress=False)


def test_atlas_passes_its_own_check(tmp_path: pathlib.Path) -> None:
    config = BuildConfig(index="exact", check_queries=0)
    build_from_passages(passages_of("text"), config, tmp_path / "kb", progress=False, encoder=HashEncoder())
    spec = KnowledgeConfig(source="atlas/text", index="exact", directory=str(tmp_path / "kb"))
    assert len(_open_kb("text", spec, progress=False)) == len(passages_of("text"))
