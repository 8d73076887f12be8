"""What a finished run's policy does under other conditions, by the program that shows it."""

import dataclasses
import json
import pathlib

import pytest

from routerl_jax.data.atlas.world import KNOWLEDGE_BASES
from routerl_jax.training.config import KnowledgeConfig, ModelConfig, TrainConfig
from routerl_jax.training.trials import with_retriever
from tests.programs import launch_here, refusal

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


@pytest.mark.parametrize("spec", [KnowledgeConfig(directory="kb"), KnowledgeConfig(source="http://127.0.0.1:8000")])
def test_what_the_run_does_not_build_has_no_other_retriever(spec: KnowledgeConfig) -> None:
    """A server would answer as before, and the trial would show that nothing matters."""
    with pytest.raises(ValueError, match=r"config.knowledge.text is not built by the run"):
        with_retriever(run_with(text=spec), "contriever")


def test_a_retriever_that_changes_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="'bm25': the run has no knowledge base in which it would stand"):
        with_retriever(run_with(graph=GRAPH), "bm25")


def test_the_program(small_run: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    workdir = small_run / "whole"
    arguments = ("analyze", f"--workdir={workdir}", "--limit=2", f"--output={tmp_path}")
    assert not launch_here(*arguments, "--top_k=2,1", "--retrievers=bm25")
    assert "top_k        2" in capsys.readouterr().out
    analysis = json.loads((tmp_path / "analysis.json").read_text())
    assert {name: list(rows) for name, rows in analysis.items()} == {
        "policies": ["first", "trained"],
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
