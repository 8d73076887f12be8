"""VRAG-RL's figures: drawn by name from made-up results, read off their artists."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

import pytest

from routerl_jax.comparison.papers.figure import drawing
from routerl_jax.comparison.papers.known import PAPER_FIGURES
from routerl_jax.comparison.papers.measured import TEST, Measured, of_comparison, read_measured
from routerl_jax.comparison.papers.vrag_rl_figures import METHODS, by_kind, context_length, latency, retrieval
from routerl_jax.core.types import Episode
from routerl_jax.evaluation.metrics import summarize
from routerl_jax.recipes.vrag_rl.agents import VanillaRAG, VRAGAgent
from routerl_jax.training import config as schema
from routerl_jax.training import trials
from tests.evaluation.episodes import looked
from tests.programs import launch_here, refusal

NAMES = [f"vrag_rl.figure{number}" for number in (3, 4, 5, 6)]
CONFIG = schema.TrainConfig(
    recipe="vrag_rl",
    model=schema.ModelConfig(path="unused"),
    knowledge={"pages": schema.KnowledgeConfig(source="atlas/register", kind="ocr")},
    controls={
        "plain": schema.ControlConfig(agent={"settings": {"looks": False}}),
        "outcome": schema.ControlConfig(stages={"main": schema.StageConfig()}),
    },
    evaluation=schema.EvaluationConfig(names={"trained": "vrag_rl"}),
)


def row(em: float, **extra: Any) -> dict[str, Any]:
    """A row of results with three kinds of questions."""
    kinds = {kind: {"em": em / divisor, "n": 4} for divisor, kind in enumerate(("text", "chart", "layout"), 1)}
    measures = {"recall": em, "ndcg": em / 2, "recall_at_first": em / 4, "searches_per_question": 2.0}
    by = {"by": {"source_type": kinds}}
    return {"em": em, "em_interval": [em - 0.1, em + 0.1], "n": 12, "crops_per_question": 0.5} | measures | by | extra


def write_run(directory: pathlib.Path, agents: Mapping[str, Any], config: schema.TrainConfig = CONFIG) -> pathlib.Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(dataclasses.asdict(config)))
    (directory / "results.json").write_text(json.dumps({"agents": agents}))
    return directory


def compared(rows: Mapping[str, tuple[str, Mapping[str, Any], dict[str, Any]]], **extra: Any) -> dict[str, Any]:
    """results.json of a comparison. Rows are given as routing, fields of the agent, and numbers."""
    made = {
        name: numbers
        | {
            "policy": "run-x" if "/" in name else "policy",
            "agent": {
                "recipe": "vrag_rl",
                "routing": routing,
                "fields": {"k": 10, "pages": 1, "max_turns": 4, "looks": True, **fields},
            },
        }
        for name, (routing, fields, numbers) in rows.items()
    }
    card = {"rows": {}, "policies": {"policy": {"name": "x"}, "run-x": {"name": "x"}}}
    return {"card": card, "benchmarks": {"mine": {"n": 12, "rows": made}}, **extra}


def heights(axis: Any) -> list[float]:
    return [round(bar.get_height(), 4) for bar in axis.patches]


def said(axis: Any) -> str:
    return " ".join(text.get_text() for text in axis.texts).replace("\n", " ")


def test_of_a_run(tmp_path: pathlib.Path) -> None:
    """Methods, not other controls, each in its place; what runs do not measure is said in a blank panel."""
    agents = {"vrag_rl": row(0.8), "vanilla_rag": row(0.2), "react": row(0.1), "plain": row(0.4), "outcome": row(0.7)}
    run = write_run(tmp_path / "run", agents)
    measured = read_measured(run, "vrag_rl", METHODS)
    assert {name: found["em"] for name, found in measured.benchmarks[TEST].items()} == {
        "Vanilla RAG": 0.2,
        "ReAct": 0.1,
        "Search-R1-VL": 0.4,
        "VRAG-RL": 0.8,
    }
    (axis,) = retrieval(measured).axes
    assert heights(axis) == [0.05, 0.2, 0.1, 0.025, 0.1, 0.05, 0.1, 0.4, 0.2, 0.2, 0.8, 0.4]  # by method
    seconds, actions = latency(measured).axes
    assert "not measured: a run does not time its questions" in said(seconds)
    assert heights(actions) == [2.0] * 4 + [0.5] * 4
    (axis,) = context_length(measured).axes
    assert "not measured" in said(axis)


def test_relative_to_the_best_and_beside_the_paper(tmp_path: pathlib.Path) -> None:
    run = write_run(tmp_path / "run", {"vrag_rl": row(0.8), "vanilla_rag": row(0.2)})
    ours, _, paper = by_kind(read_measured(run, "vrag_rl", METHODS)).axes
    assert [line.get_ydata().tolist() for line in ours.lines] == [[0.25] * 4, [1.0] * 4]
    lines = {line.get_label(): line.get_ydata().tolist() for line in paper.lines}
    assert list(lines) == ["Vanilla RAG", "ReAct", "Search-R1-VL", "VRAG-RL"]
    assert lines["Search-R1-VL"][:2] == pytest.approx([19.9 / 26.1, 13.4 / 26.3])  # text, table: table 1, 7B
    assert [label.get_text() for label in paper.get_xticklabels()][2] == "chart\n(25)"
    few = Measured(benchmarks={"mine": {"VRAG-RL": row(0.8, by={})}})
    assert "not measured: there are not three kinds of questions" in said(by_kind(few).axes[0])


def test_of_a_comparison() -> None:
    """Runs without closer looks are Search-R1-VL; numbers of pages are of other comparisons."""
    cost = {"cost": {"seconds": 0.5, "read": 90.0}}
    one = compared({"vrag_rl:vanilla_rag": ("vanilla_rag", {"max_turns": 1}, row(0.3, **cost))})
    rows = {
        "runs/a": ("", {}, row(0.8, **cost)),
        "runs/plain": ("", {"looks": False}, row(0.4, **cost)),
        "runs/a:vanilla_rag": ("vanilla_rag", {}, row(0.2, **cost)),
        "runs/a:random_box": ("random_box", {}, row(0.1, **cost)),
    }
    measured = of_comparison(compared(rows, beside={"one": one}), "vrag_rl", METHODS)
    assert {name: found["em"] for name, found in measured.benchmarks["mine"].items()} == {
        "Vanilla RAG": 0.2,
        "Search-R1-VL": 0.4,
        "VRAG-RL": 0.8,
    }
    assert measured.about
    (axis,) = context_length(measured).axes
    assert [label.get_text() for label in axis.get_xticklabels()] == ["1\n90", "4\n90"]
    assert axis.lines[0].get_ydata().tolist() == [0.3, 0.2]
    seconds, _ = latency(measured).axes
    assert heights(seconds) == [0.5] * 3
    two = of_comparison(compared(rows | {"runs/b": ("", {}, row(0.7))}), "vrag_rl", METHODS)
    assert list(two.benchmarks["mine"])[-2:] == ["VRAG-RL, a", "VRAG-RL, b"]


def test_the_judges_verdict_where_all_have_it() -> None:
    judged = {"judge": 0.5}
    assert Measured(benchmarks={"mine": {"VRAG-RL": judged}}).metric == "judge"
    assert Measured(benchmarks={"mine": {"VRAG-RL": judged, "ReAct": {"em": 0.5}}}).metric == "em"


def test_the_program_draws_them(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", {"vrag_rl": row(0.8), "vanilla_rag": row(0.2)})
    assert not launch_here("analyze", f"--workdir={run}", "--figures=vrag_rl.figure4,vrag_rl.figure6")
    printed = capsys.readouterr().out
    for name in ("vrag_rl.figure4", "vrag_rl.figure6"):
        assert (run / "analysis" / f"{name}.png").stat().st_size > 10_000
        assert f"{name}: {run / 'analysis' / name}.png" in printed
    assert not (run / "analysis" / "analysis.json").exists()


def test_what_is_refused(tmp_path: pathlib.Path) -> None:
    run = write_run(tmp_path / "run", {"em": row(0.8)})
    other = write_run(tmp_path / "other", {}, dataclasses.replace(CONFIG, recipe="search_r1", controls={}))
    cases = {
        (run, "vrag_rl.figure9"): "vrag_rl.figure9",
        (run, "routerag.figure2"): "RouteRAG, Figure 2 is not drawn alone: python -m launch.analyze",
        (run, "vrag_rl.figure4"): "has no agent of this figure: vrag_rl:vanilla_rag",
        (other, "vrag_rl.figure4"): "is a run of search_r1, and the figure is about vrag_rl",
        (tmp_path, "vrag_rl.figure4"): "results.json is not there",
    }
    for (directory, name), message in cases.items():
        assert message in refusal("analyze", f"--workdir={directory}", f"--figures={name}")
    assert [name for name in PAPER_FIGURES if PAPER_FIGURES.get(name).drawing] == NAMES
    assert [drawing(name).tries for name in NAMES] == [True, False, False, False]


def test_pages_at_once() -> None:
    """The questions whose gold page is first are the same with every number of pages."""

    def answered(agent: Any, asked: Sequence[Any], *_: Any, **__: Any) -> tuple[dict[str, Any], list[Episode]]:
        assert isinstance(agent, VanillaRAG)
        assert (agent.max_turns, agent.k) == (1, 10)
        first = looked(*["gold", "x", "y"][: agent.pages], gold=("gold",), answer="lion" if agent.pages == 1 else "cat")
        second = looked(*["x", "gold", "y"][: agent.pages], gold=("gold",))
        found = [
            dataclasses.replace(one, example=dataclasses.replace(one.example, id=i))
            for i, one in enumerate([first, second])
        ]
        return summarize(found), found

    tried = object.__new__(trials.Trials)
    tried._config, tried._questions, tried._agent = CONFIG, [], VRAGAgent(tool="pages")
    with (
        mock.patch.object(trials, "score", answered),
        mock.patch.object(trials.Trials, "_engine", None),
        mock.patch.object(trials.Trials, "_tools", {}),
    ):
        rows = tried.pages_at_once([3, 1])
    assert list(rows) == [1, 3]
    assert [found["em"] for found in rows.values()] == [1.0, 0.5]
    assert [found["recall"] for found in rows.values()] == [0.5, 1.0]
    assert [(found["sufficient"]["em"], found["sufficient"]["n"]) for found in rows.values()] == [(1.0, 1), (0.0, 1)]
    (axis,) = context_length(Measured(benchmarks={TEST: {}}, at_once={TEST: rows})).axes
    assert "questions of which the first page is all that is needed (1)" in axis.get_legend_handles_labels()[1]
