"""What a finished run's policy does under other conditions, by the program that shows it."""

import dataclasses
import json
import pathlib
import re

import pytest

from configs import routerag_qwen25_3b
from routerl_jax.core.config import from_config_dict
from routerl_jax.core.types import Passage
from routerl_jax.data.atlas.world import KNOWLEDGE_BASES
from routerl_jax.extras.analysis.trials import with_retriever
from routerl_jax.knowledge.build import BuildConfig, build_from_passages
from routerl_jax.knowledge.graph.build import GraphConfig, build_graph, build_graph_from_passages
from routerl_jax.knowledge.graph.kb import GraphKB, WalkSettings
from routerl_jax.knowledge.hybrid import HybridConfig, build_hybrid
from routerl_jax.knowledge.update import update
from routerl_jax.training.config import KnowledgeConfig, ModelConfig, TrainConfig
from routerl_jax.training.setup import open_knowledge
from tests.knowledge.graph.helpers import PASSAGES as PASSAGES_OF_GRAPH
from tests.knowledge.graph.helpers import TRIPLES, Scripted, knowing
from tests.knowledge.helpers import HashEncoder, write_jsonl
from tests.programs import launch_here, refusal
from tests.training.small_run import make_encoder

PASSAGES = KnowledgeConfig(source="corpus.jsonl", directory="kb/passages", settings={"batch": 8})
GRAPH = KnowledgeConfig(source="corpus.jsonl", kind="graph", settings={"walk": {"link_facts": 1}})
BOTH = KnowledgeConfig(kind="hybrid", members=("passage", "graph"))


def run_with(**knowledge: KnowledgeConfig) -> TrainConfig:
    return TrainConfig(model=ModelConfig(path="unused"), knowledge=knowledge)


def test_another_retriever_is_built_anew() -> None:
    run = run_with(passage=PASSAGES, graph=GRAPH, graph_passage=BOTH)
    by_words = with_retriever(run, "bm25").knowledge
    assert by_words["passage"] == KnowledgeConfig(source="corpus.jsonl", kind="bm25")  # nothing that only vectors know
    assert (by_words["graph"], by_words["graph_passage"]) == (GRAPH, BOTH)
    other = with_retriever(run, "contriever").knowledge
    assert other["passage"] == dataclasses.replace(PASSAGES, encoder="contriever", directory="")
    assert other["graph"] == dataclasses.replace(GRAPH, encoder="contriever")
    words = run_with(text=KnowledgeConfig(source="corpus.jsonl", kind="bm25", settings={"k1": 1.0}))
    assert with_retriever(words, "e5").knowledge["text"] == KnowledgeConfig(source="corpus.jsonl", encoder="e5")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (KnowledgeConfig(source="http://127.0.0.1:8000"), r"config.knowledge.text is served .*Give its directory"),
        (KnowledgeConfig(directory="nowhere"), r"config.knowledge.text.directory: nowhere/kb.json is missing"),
        (
            KnowledgeConfig(directory="joined", kind="hybrid"),
            r"config.knowledge.text \(hybrid, in joined\).*no other retriever",
        ),
    ],
)
def test_what_cannot_be_built_anew_has_no_other_retriever(
    spec: KnowledgeConfig, message: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server would answer as before, and the trial would show that nothing matters."""
    monkeypatch.chdir(tmp_path)
    build_graph_from_passages(PASSAGES_OF_GRAPH, GraphConfig(), "graph", progress=False, encoder=HashEncoder())
    build_hybrid(HybridConfig(members=("graph",)), "joined")
    with pytest.raises(ValueError, match=message):
        with_retriever(run_with(text=spec), "contriever")


@pytest.fixture
def shipped(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> TrainConfig:
    """RouteRAG's full configuration, with a graph that a language model's triples were built into beforehand."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROUTERL_CACHE", str(tmp_path / "cache"))
    rows = [{"id": p.id, "title": p.title, "text": p.text} for p in PASSAGES_OF_GRAPH]
    config = GraphConfig(
        corpus=str(write_jsonl(tmp_path / "corpus.jsonl", rows)),
        encoder="facebook/contriever",
        extractor="llm",
        query_prefix="contriever's own: ",
        walk=WalkSettings(link_facts=3),
    )
    build_graph(config, "kb/graph", progress=False, encoder=HashEncoder(), llm=Scripted(knowing))
    make_encoder(tmp_path / "other")
    return from_config_dict(TrainConfig, routerag_qwen25_3b.get_config())


def test_the_full_configuration_is_tried_with_another_encoder(shipped: TrainConfig, tmp_path: pathlib.Path) -> None:
    """Table 7 of RouteRAG: passages, graph and both, by the other encoder; the graph keeps its facts and settings."""
    other = with_retriever(shipped, str(tmp_path / "other"))
    assert other.knowledge["graph"].settings == {
        "extractor": "given",
        "triples": "kb/graph/triples.jsonl.gz",
        "walk": {"link_facts": 3},
    }
    (tmp_path / "corpus.jsonl").rename(tmp_path / "moved.jsonl")  # the graph needs it no more
    passage = dataclasses.replace(other.knowledge["passage"], source="moved.jsonl")
    kbs = open_knowledge(dataclasses.replace(other, knowledge={**other.knowledge, "passage": passage}), progress=False)
    graph = kbs["graph"]
    assert isinstance(graph, GraphKB)
    embedding = graph.store.manifest.embedding
    assert embedding is not None
    assert (embedding.encoder, embedding.query_prefix) == (str(tmp_path / "other"), "")
    assert graph.settings.link_facts == 3
    facts = {fact for facts in TRIPLES.values() for fact in map(tuple, facts)}
    assert len(graph.triples(range(len(graph.graph.fact_ends)))) == len(facts)
    assert [len(kb.search(["Who taught Ada Byron?"], 3)[0]) for kb in kbs.values()] == [3, 3, 3]


def test_what_lies_in_directories_alone_is_tried_by_words_and_by_vectors(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passages that were added and deleted since the build count."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROUTERL_CACHE", str(tmp_path / "cache"))
    build = BuildConfig(index="exact")
    build_from_passages(PASSAGES_OF_GRAPH, build, "kb", progress=False, encoder=HashEncoder())
    update("kb", delete=["p0"], add=[Passage(id="new", title="", text="Fire burns.")], encoder=HashEncoder())
    run = run_with(text=KnowledgeConfig(directory="kb", index="exact"))
    by_words = with_retriever(run, "bm25")
    words = open_knowledge(by_words, progress=False)["text"]
    assert (type(words).__name__, len(words)) == ("Bm25KB", 5)  # pyright: ignore[reportArgumentType]
    assert [words.search([query], 1)[0][0].id for query in ("Fire", "Somerville")] == ["new", "p1"]
    other = with_retriever(run, "contriever").knowledge["text"]
    assert other == KnowledgeConfig(source="kb", index="exact", encoder="contriever")


def test_triples_of_a_model_are_not_asked_for_again(shipped: TrainConfig) -> None:
    graph = KnowledgeConfig(
        source="corpus.jsonl", kind="graph", directory="kb/graph", settings={"extractor": "llm", "llm": {"model": "m"}}
    )
    found = with_retriever(run_with(graph=graph), "contriever").knowledge["graph"]
    assert found.settings == {"extractor": "given", "triples": "kb/graph/triples.jsonl.gz"}
    elsewhere = dataclasses.replace(graph, directory="kb/none")  # nothing is built there
    assert with_retriever(run_with(graph=elsewhere), "contriever").knowledge["graph"].settings == graph.settings


def test_another_retriever_is_of_the_same_passages() -> None:
    cut = {"passage_words": 50, "least_words": 3}
    dense = KnowledgeConfig(source="corpus.jsonl", settings={"batch": 8, **cut})
    words = KnowledgeConfig(source="corpus.jsonl", kind="bm25", settings={"k1": 1.0, **cut})
    assert with_retriever(run_with(text=dense), "bm25").knowledge["text"].settings == cut
    assert with_retriever(run_with(text=words), "e5").knowledge["text"].settings == cut


def test_a_retriever_that_changes_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="'bm25': the run has no knowledge base in which it would stand"):
        with_retriever(run_with(graph=GRAPH), "bm25")


def test_the_program(small_run: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    workdir = small_run / "whole"
    arguments = ("analyze", f"--workdir={workdir}", "--limit=2", f"--output={tmp_path}")
    assert not launch_here(*arguments, "--top_k=2,1", "--retrievers=bm25")
    assert re.search(r"top_k +1 .* 2 .*\n +2 .* 2 ", capsys.readouterr().out)  # k, and the number of questions
    analysis = json.loads((tmp_path / "analysis.json").read_text())
    assert {name: list(rows) for name, rows in analysis.items()} == {
        "policies": ["first", "trained"],
        "workflows": [],  # it was scored as no baseline
        "calibration": [],
        "training": ["trained"],
        "retrievers": ["trained", "bm25"],
        "top_k": ["1", "2"],
        "single_mode": ["trained", *(f"only_{kb}" for kb in KNOWLEDGE_BASES)],
    }
    asked = {row["n"] for name in ("retrievers", "top_k", "single_mode") for row in analysis[name].values()}
    assert asked == {2}
    assert analysis["policies"]["trained"]["n"] == 4
    assert analysis["top_k"]["1"] == analysis["retrievers"]["trained"] == analysis["single_mode"]["trained"]
    for name, row in analysis["single_mode"].items():
        if name != "trained" and row["searches"]:
            assert row["mode_usage"] == {name.removeprefix("only_"): 1.0}
    assert (tmp_path / "analysis.png").stat().st_size > 20_000
    for mistake in ("--top_k=two", "--top_k=0"):
        assert "is no number of passages" in refusal(*arguments, mistake)
    assert "holds no run" in refusal("analyze", f"--workdir={tmp_path}")
