"""index="auto": ScaNN where it is installed, exact search elsewhere; knowledge bases move from one place to the other."""

import dataclasses
import json
import pathlib
import sys

import pytest

from configs.common import ATLAS_KNOWLEDGE
from routerl_jax.knowledge import index as indexes
from routerl_jax.knowledge.build import BuildConfig, build_from_passages
from routerl_jax.knowledge.builds import BuildReport, changes, check_kb
from routerl_jax.knowledge.exact_index import ExactIndex
from routerl_jax.knowledge.load import load_kb
from routerl_jax.knowledge.pictures import PicturesConfig
from routerl_jax.knowledge.scann_index import ScannIndex, ScannSettings
from routerl_jax.knowledge.update import update
from routerl_jax.training.config import KnowledgeConfig
from routerl_jax.training.knowledge import kb_cache_directory, open_knowledge_bases
from tests.knowledge.helpers import HashEncoder, make_passages

QUERIES = ["Tïtle 7", "end", "word"]


@pytest.fixture
def without_scann(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS, or a Python without wheels of it."""
    monkeypatch.setitem(sys.modules, "scann", None)
    indexes._warn_once.cache_clear()


def built(place: pathlib.Path, index: str = "auto") -> BuildReport:
    config = BuildConfig(index=index)
    return build_from_passages(make_passages(40), config, place, progress=False, encoder=HashEncoder())


def manifest(place: pathlib.Path) -> dict:
    return json.loads((place / "kb.json").read_text())


def found(place: pathlib.Path, index: str | None = None) -> list[list[str]]:
    kb = load_kb(place, encoder=HashEncoder(), index=index)
    return [[passage.id for passage in row] for row in kb.search(QUERIES, 5)]


def test_with_scann_it_is_what_it_was_before(tmp_path: pathlib.Path) -> None:
    """`scann` was the default: knowledge bases of then and of now are equal, and neither is built anew for the other name."""
    assert BuildConfig().index == KnowledgeConfig().index == PicturesConfig().index == "auto"
    assert changes(BuildConfig()) == changes(BuildConfig(index="scann")) == {}
    assert changes(PicturesConfig()) == changes(PicturesConfig(index="scann"))
    assert changes(BuildConfig(scann=ScannSettings(leaves=5))) == {"scann.leaves": 5}
    assert built(tmp_path / "kb").index == "scann (brute_force)"
    assert (manifest(tmp_path / "kb")["config"], manifest(tmp_path / "kb")["index"]["backend"]) == ({}, "scann")
    assert built(tmp_path / "kb", "scann").numbers["embedded"] == built(tmp_path / "kb").numbers["embedded"] == 0
    assert isinstance(load_kb(tmp_path / "kb", index="auto", encoder=HashEncoder()).index, ScannIndex)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="already holds a knowledge base, of another"):
        built(tmp_path / "kb", "exact")
    spec = KnowledgeConfig(source="atlas/text")
    assert kb_cache_directory("text", spec) == kb_cache_directory("text", dataclasses.replace(spec, index="scann"))


@pytest.mark.usefixtures("without_scann")
def test_without_scann_it_is_exact_and_says_so(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    assert built(tmp_path / "kb").index == "exact"
    assert manifest(tmp_path / "kb")["index"]["backend"] == "exact"
    (said,) = [message for message in caplog.messages if "ScaNN" in message]
    assert "ScaNN is not installed, so all vectors are compared, exactly" in said
    assert '[scann]"' in said
    assert built(tmp_path / "kb").numbers["embedded"] == 0
    check_kb(tmp_path / "kb", {"index": "auto"}, "knowledge.text")
    with pytest.raises(ValueError, match=r"needs the package scann.*index='auto' or 'exact'"):
        built(tmp_path / "other", "scann")


def test_what_scann_made_is_searched_without_it(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    built(tmp_path / "kb", "scann")
    before = found(tmp_path / "kb")
    monkeypatch.setitem(sys.modules, "scann", None)
    indexes._warn_once.cache_clear()
    assert found(tmp_path / "kb") == found(tmp_path / "kb", "auto") == before
    assert sum("ScaNN is not installed" in message for message in caplog.messages) == 1
    assert built(tmp_path / "kb").numbers["embedded"] == 0
    with pytest.raises(ValueError, match="needs the package scann"):
        found(tmp_path / "kb", "scann")
    assert update(
        tmp_path / "kb", delete=["p1"], compact_above=0.0
    ).compacted  # the new main part has an index that works
    assert manifest(tmp_path / "kb")["index"]["backend"] == "exact"
    monkeypatch.undo()
    assert isinstance(load_kb(tmp_path / "kb", encoder=HashEncoder()).index, ExactIndex)  # type: ignore[attr-defined]
    assert all("p1" not in row for row in found(tmp_path / "kb"))


@pytest.mark.slow
@pytest.mark.usefixtures("without_scann")
def test_the_quickstart_needs_no_scann(tmp_path: pathlib.Path) -> None:
    spec = dataclasses.replace(ATLAS_KNOWLEDGE["elements"], directory=str(tmp_path / "kb"))
    tools = open_knowledge_bases({"elements": spec}, progress=False)
    (passages,) = tools["elements"].search(["Which country produces the most Ruthenium?"], 1)  # type: ignore[attr-defined]
    assert "Ruthenium" in passages[0].text
