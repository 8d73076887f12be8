"""Figures of papers: drawn by name from made-up results, read off their artists."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

import pytest

from routerl_jax.core.types import Episode
from routerl_jax.evaluation.metrics import summarize
from routerl_jax.extras.analysis import trials
from routerl_jax.extras.comparison.papers.drawings import by_kind, context_length, gold_pages, latency
from routerl_jax.extras.comparison.papers.drawn import draw_figures, of_comparison, read_measured
from routerl_jax.extras.comparison.papers.figure import PAPER_FIGURES, TEST, Measured
from routerl_jax.recipes.vrag_rl.agents import VanillaRAG, VRAGAgent
from routerl_jax.training import config as schema
from tests.evaluation.episodes import looked
from tests.programs import launch_here, refusal

FIGURE = PAPER_FIGURES.get("vrag_rl.figure4")  # of the same methods as the others
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
    measured = read_measured(run, FIGURE)
    assert {name: found["em"] for name, found in measured.benchmarks[TEST].items()} == {
        "Vanilla RAG": 0.2,
        "ReAct": 0.1,
        "Search-R1-VL": 0.4,
        "VRAG-RL": 0.8,
    }
    (axis,) = gold_pages(measured).axes
    assert heights(axis) == [0.05, 0.2, 0.1, 0.025, 0.1, 0.05, 0.1, 0.4, 0.2, 0.2, 0.8, 0.4]  # by method
    seconds, actions = latency(measured).axes
    assert "not measured: a run does not time its questions" in said(seconds)
    assert heights(actions) == [2.0] * 4 + [0.5] * 4
    (axis,) = context_length(measured).axes
    assert "not measured" in said(axis)


def test_relative_to_the_best_and_beside_the_paper(tmp_path: pathlib.Path) -> None:
    run = write_run(tmp_path / "run", {"vrag_rl": row(0.8), "vanilla_rag": row(0.2)})
    ours, _, paper = by_kind(read_measured(run, FIGURE)).axes
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
    measured = of_comparison(compared(rows, beside={"one": one}), FIGURE)
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
    two = of_comparison(compared(rows | {"runs/b": ("", {}, row(0.7))}), FIGURE)
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
        (run, "vrag_rl.figure4"): "has no agent of this figure: vrag_rl:vanilla_rag",
        (other, "vrag_rl.figure4"): "is a run of search_r1, and the figure is about vrag_rl",
        (tmp_path, "vrag_rl.figure4"): "results.json is not there",
    }
    for (directory, name), message in cases.items():
        assert message in refusal("analyze", f"--workdir={directory}", f"--figures={name}")
    assert "--rows: 'a' is no KEY=DIRECTORY" in refusal(
        "analyze", f"--workdir={run}", "--figures=r1_searcher.figure2", "--rows=a"
    )
    assert "no method of this figure is called 'f1'; those to be named are: grpo, reinforce_pp" in refusal(
        "analyze", f"--workdir={run}", "--figures=r1_searcher.figure2", "--rows=f1=x"
    )
    assert "needs the directory of a run" in refusal("analyze", f"--output={tmp_path}", "--figures=r1_searcher.figure2")


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


# --- figures of the other papers ---


def config_of(recipe: str, **changes: Any) -> schema.TrainConfig:
    return dataclasses.replace(CONFIG, recipe=recipe, evaluation=schema.EvaluationConfig(), controls={}, **changes)


def trained(directory: pathlib.Path, recipe: str, reward: float) -> pathlib.Path:
    """A run that has not ended: its metrics alone."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(dataclasses.asdict(config_of(recipe))))
    keys = {"reward/total": reward, "rollout/tokens_per_question": 50.0, "rollout/searches_per_question": 1.5}
    keys["rollout/searched_rate"] = 0.5
    rows = [{"step": step, **{key: value + step for key, value in keys.items()}} for step in range(4)]
    (directory / "metrics.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in rows))
    return directory


def record(tools: Sequence[str], answer: str = "lion", kind: str = "visual", turns: int = 2) -> dict[str, Any]:
    """An episode record with a search of each tool in its first turn."""
    calls = [{"tool": tool, "cost": 1.0, "seconds": 0.0, "passages": [], "error": None} for tool in tools]
    told = [{"tokens": 10, "calls": calls if turn == 0 else []} for turn in range(turns)]
    return {
        "id": f"{kind}{len(tools)}{answer}",
        "question": "which?",
        "golden_answers": ["lion"],
        "prediction": answer,
        "metadata": {"kind": kind},
        "turns": told,
    }


def write_episodes(path: pathlib.Path, records: Sequence[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(one)}\n" for one in records))


def drawn_of(name: str, directory: pathlib.Path | None, rows: Mapping[str, pathlib.Path] | None = None) -> Any:
    """The figure before it is saved."""
    kept: list[Any] = []
    with mock.patch("routerl_jax.extras.comparison.papers.drawn.save_figure", lambda figure, path: kept.append(figure)):
        draw_figures([name], directory, (directory or pathlib.Path("/tmp")) / "unused", rows=rows)
    return kept[0]


def test_r1_searchers_training_of_runs_by_name(tmp_path: pathlib.Path) -> None:
    """Two of three runs, which need not have ended; the third is said not to have been run."""
    rows = {"em": trained(tmp_path / "a", "r1_searcher", 1.0), "f1": trained(tmp_path / "b", "r1_searcher", 5.0)}
    figure = drawn_of("r1_searcher.figure3", None, rows)
    reward, length, searches = figure.axes
    lines = {line.get_label(): line.get_ydata() for line in reward.lines if line.get_label()[0] != "_"}
    assert {name: line[0] for name, line in lines.items()} == {"EM": 1.0, "F1": 5.0}
    assert list(length.lines[0].get_ydata()) == [50.0, 51.0, 52.0, 53.0]
    assert searches.get_title() == "Searches of an attempt"
    assert "Not run: CEM (row cover_em)." in figure.get_suptitle()
    alone = drawn_of("r1_searcher.figure2", rows["em"]).axes[0]  # a run that is none of the methods has its own name
    assert [line.get_label() for line in alone.lines][-1] == "a"
    with pytest.raises(ValueError, match=r"results\.json is not there"):  # other figures need a run that has ended
        drawn_of("routerag.figure2", rows["em"])


def bamboogle(way: str, cem: float) -> dict[str, Any]:
    rows = {
        name: {"cover_em": cem * share, "cover_em_interval": [0.0, 1.0], "searched_rate": searched, "n": 4}
        | {"policy": "policy", "agent": {"recipe": "", "fields": {}}}
        for name, share, searched in (("direct", 0.5, 0.0), ("search_o1", 1.0, 1.0))
    }
    card = {"rows": {}, "k": 3, "benchmarks": {"bamboogle": {"knowledge": {"text": {"kind": way}}}}}
    return {"card": card, "benchmarks": {"bamboogle": {"n": 4, "rows": rows}}}


def test_r1_searchers_figure_of_online_search(tmp_path: pathlib.Path) -> None:
    local, web = bamboogle("bm25", 0.4), bamboogle("web", 0.6)
    (tmp_path / "results.json").write_text(json.dumps(local))
    figure = drawn_of("r1_searcher.figure6", tmp_path)
    ours, paper = figure.axes
    assert sorted(bar.get_width() for bar in ours.patches) == [0.2, 0.4]
    assert "Not run: online search" in " ".join(figure.get_suptitle().split())
    assert 0.528 in [bar.get_width() for bar in paper.patches]  # R1-Searcher with Qwen, table 2
    (tmp_path / "results.json").write_text(json.dumps({**local, "beside": {"web": web}}))
    ours, _ = drawn_of("r1_searcher.figure6", tmp_path).axes
    assert sorted(bar.get_width() for bar in ours.patches) == [0.2, 0.3, 0.4, 0.6]


def test_routerag_of_a_run(tmp_path: pathlib.Path) -> None:
    """Its other size; the paper's sizes are blank, with what would fill them."""
    agents = {"trained": row(0.8, searches_per_question=1.0), "stage1_only": row(0.8, searches_per_question=3.0)}
    made = dataclasses.replace(
        config_of("routerag"),
        stages={"stage1": schema.StageConfig(), "stage2": schema.StageConfig(start=1)},
        controls={"stage1_only": schema.ControlConfig(without="stage2")},
    )
    run = write_run(tmp_path / "run", agents | {"warm_start": row(0.1)}, made)
    three, seven, here = drawn_of("routerag.figure2", run).axes
    assert "no run is named routerag_3b or no_efficiency_3b (--rows, config.rows); the paper's averages are" in said(
        three
    )
    assert "2.25 with, 2.70 without" in said(seven)
    assert heights(here) == [1.0, 3.0]  # the groups of these rows have no searches
    write_episodes(run / "evaluation" / "trained.jsonl", [record(["graph"], turns=3)])
    write_episodes(run / "evaluation" / "warm_start.jsonl", [record([], turns=1)])
    *_, here = drawn_of("routerag.figure3", run).axes
    assert heights(here) == [1.0, 3.0]
    *_, tokens, turns = drawn_of("routerag.figure4", run).axes
    assert (heights(tokens), heights(turns)) == ([30.0], [3.0])
    assert "Not run: Search-R1 (recipe search_r1); R1-Searcher" in drawn_of("routerag.figure4", run).get_suptitle()


def test_routerag_by_number_of_documents(tmp_path: pathlib.Path) -> None:
    def of(k: int, em: float) -> dict[str, Any]:
        made = {"policy": "run-x", "agent": {"recipe": "routerag", "routing": "", "fields": {"k": k}}}
        one = {"n": 4, "rows": {"runs/x": row(em, f1=em, **made)}}
        return {"card": {"rows": {}, "k": k}, "benchmarks": {"nq": one}}

    (tmp_path / "results.json").write_text(json.dumps({**of(3, 0.6), "beside": {"one": of(1, 0.2)}}))
    em, _, turns = drawn_of("routerag.figure5", tmp_path).axes
    assert [(line.get_label(), list(line.get_xdata()), list(line.get_ydata())) for line in em.lines] == [
        ("nq", [1, 3], [0.2, 0.6])
    ]
    assert list(turns.lines[0].get_ydata()) == [2.0, 2.0]
    (tmp_path / "results.json").write_text(json.dumps(of(3, 0.6)))
    assert "not measured: several numbers of documents" in said(drawn_of("routerag.figure5", tmp_path).axes[0])


def test_r1_routers_searches_by_kind_of_question(tmp_path: pathlib.Path) -> None:
    """Of a run with a control SFT: its start is prompted."""
    made = dataclasses.replace(
        config_of("r1_router"),
        controls={"sft": schema.ControlConfig(supervised=schema.WarmStartConfig(steps=1))},
        evaluation=schema.EvaluationConfig(names={"warm_start": "prompt", "trained": "step_grpo"}),
    )
    run = write_run(tmp_path / "run", {"prompt": row(0.1), "step_grpo": row(0.8)}, made)
    asked = [record(["image", "text"]), record(["text"], kind="single"), record(["text"], "cat", kind="single")]
    write_episodes(run / "evaluation" / "trained.jsonl", asked)
    write_episodes(run / "evaluation" / "warm_start.jsonl", [{**one, "prediction": "cat"} for one in asked])
    reward, _, steps = drawn_of("r1_router.figure2", run).axes
    assert "no run with metrics" in said(reward)
    assert heights(steps) == [1.5, 1.0, 2.0]  # all, single, visual; a wrong answer counts nowhere
    assert [text.get_text() for text in steps.texts].count(" none") == 3  # the start has no right answer
    figure = drawn_of("r1_router.figure3", run)
    prompt, sft, ours = figure.axes
    assert prompt.get_title() == "(a) Prompt, visual"
    assert "not run (row sft)" in said(sft)
    assert heights(ours) == [100.0, 0.0, 0.0, 100.0]  # picture first, then text


def test_r1_router_of_a_comparison_pools_the_papers_benchmarks(tmp_path: pathlib.Path) -> None:
    made = {"policy": "policy", "agent": {"recipe": "r1_router", "routing": "", "fields": {}}}
    benchmarks = {name: {"n": 1, "rows": {"r1_router": row(0.5, **made)}} for name in ("infoseek", "webqa", "tabfact")}
    (tmp_path / "results.json").write_text(json.dumps({"card": {"rows": {}}, "benchmarks": benchmarks}))
    for name in benchmarks:
        tools = ["text"] if name == "webqa" else ["image", "text"]
        write_episodes(tmp_path / "episodes" / name / "r1_router.jsonl", [record(tools)])
    *_, steps = drawn_of("r1_router.figure2", tmp_path).axes
    assert [label.get_text() for label in steps.get_xticklabels()] == ["Visual QA", "Table QA"]
    assert heights(steps) == [1.5, 2.0]
    prompt, *_ = drawn_of("r1_router.figure3", tmp_path).axes
    assert prompt.get_title() == "(a) Prompt, Visual QA"
    assert heights(prompt) == [50.0, 0.0, 50.0, 100.0]


def test_mmsearch_r1_of_a_run(tmp_path: pathlib.Path) -> None:
    made = dataclasses.replace(
        config_of("mmsearch_r1"),
        controls={"no_penalty": schema.ControlConfig(stages={"free": schema.StageConfig()})},
    )
    agents = {"warm_start": 0.2, "trained": 0.6, "warm_start_rag_workflow": 0.3, "rag_workflow": 0.7}
    run = write_run(tmp_path / "run", {name: row(em, search_ratio=em, by={}) for name, em in agents.items()}, made)
    write_episodes(run / "evaluation" / "trained.jsonl", [record([]), record(["text"], "cat")])
    write_episodes(run / "evaluation" / "warm_start.jsonl", [record(["text"]), record([], "cat")])
    accuracy, rings = drawn_of("mmsearch_r1.figure4", run).axes
    assert heights(accuracy) == [30.0, 70.0]
    angles = [round(wedge.theta2 - wedge.theta1) for wedge in rings.patches]
    assert angles == [180, 0, 0, 180, 0, 180, 180, 0]  # the start, then the trained policy
    figure = drawn_of("mmsearch_r1.figure5", run)
    accuracy, reward, _ = figure.axes
    assert heights(accuracy) == [20.0, 60.0]
    assert [line.get_ydata()[0] for line in accuracy.lines] == [20.0, 60.0]  # search ratios
    assert "not run: SFT (row sft)" in accuracy.get_title()
    assert "no run with metrics" in said(reward)


def test_mmsearch_r1_of_a_comparison_tells_prompted_and_trained_apart(tmp_path: pathlib.Path) -> None:
    def of(routing: str, run: bool, em: float) -> dict[str, Any]:
        about = {"recipe": "mmsearch_r1", "routing": routing, "fields": {}}
        return row(em, search_ratio=1.0, policy="run-x" if run else "policy", agent=about)

    rows = {
        "mmsearch_r1": of("", False, 0.1),
        "runs/x": of("", True, 0.5),
        "mmsearch_r1:rag_workflow": of("rag_workflow", False, 0.2),
        "runs/x:rag_workflow": of("rag_workflow", True, 0.4),
        "runs/x:vanilla_rag": of("vanilla_rag", True, 0.3),  # of no figure
    }
    benchmarks = {name: {"n": 12, "rows": rows} for name in ("fvqa", "infoseek", "livevqa")}
    (tmp_path / "results.json").write_text(json.dumps({"card": {"rows": {}}, "benchmarks": benchmarks}))
    accuracy, *rings = drawn_of("mmsearch_r1.figure4", tmp_path).axes
    assert [label.get_text().replace("\n", " ") for label in accuracy.get_xticklabels()] == [
        "ID tasks: fvqa, infoseek",
        "OOD tasks: livevqa",
    ]
    assert heights(accuracy) == [20.0, 20.0, 40.0, 40.0]
    assert "trained policy's weights" not in drawn_of("mmsearch_r1.figure4", tmp_path).get_suptitle()
    assert all("neither start nor trained" in said(axis) for axis in rings)  # no episodes are there
    accuracy, *_ = drawn_of("mmsearch_r1.figure5", tmp_path).axes
    assert heights(accuracy) == [10.0] * 3 + [50.0] * 3


def test_the_report_of_a_figure(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`launch.evaluate --report` draws it, too, where the results are."""
    (tmp_path / "results.json").write_text(json.dumps(bamboogle("bm25", 0.4)))
    assert not launch_here("evaluate", f"--output={tmp_path}", "--report=r1_searcher.figure6")
    picture = tmp_path / "figures" / "r1_searcher.figure6.png"
    assert f"r1_searcher.figure6: {picture}" in capsys.readouterr().out
    assert picture.stat().st_size > 10_000
    assert "give --output, the directory of a comparison, or --workdir" in refusal(
        "evaluate", "--report=r1_searcher.figure6"
    )
