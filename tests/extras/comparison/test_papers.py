"""Tables and figures of papers: their numbers add up, ours stand in them, and what lacks is told."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import pytest

from routerl_jax.evaluation.metrics import ANSWER, JUDGE
from routerl_jax.extras.baselines.known import BASELINES
from routerl_jax.extras.comparison.benchmarks import Benchmark, with_knowledge
from routerl_jax.extras.comparison.compare import prepared
from routerl_jax.extras.comparison.config import ComparisonConfig
from routerl_jax.extras.comparison.document import Table
from routerl_jax.extras.comparison.papers import drawings
from routerl_jax.extras.comparison.papers.figure import PAPER_FIGURES
from routerl_jax.extras.comparison.papers.table import (
    NAMED,
    PAPER_TABLES,
    RECIPE,
    Column,
    PaperTable,
    assigned_agent,
    paper_blocks,
)
from routerl_jax.recipes.recipe import RECIPES
from routerl_jax.training.config import KnowledgeConfig, ModelConfig
from tests.extras.comparison.world import config, reply, write_world
from tests.programs import launch_here, refusal, write_config
from tests.web_servers import Chats, refused_by_openai, serving

OTHERS = ("search_ratio", "searches_per_question", "invalid_action_rate", "finish_rate")  # that a row of results has


@pytest.mark.parametrize("name", list(PAPER_TABLES))
def test_a_table_is_whole(name: str) -> None:
    """As many numbers as columns; metrics, agents and recipes that there are; each row is another."""
    table = PAPER_TABLES.get(name)
    assert table.title.endswith(name.rpartition("table")[2])
    for row in table.rows:
        assert len(row.published) == len(table.columns)
        whole = row.agent.removeprefix(RECIPE).partition(":")[0]
        baseline = max((one for one in BASELINES if row.agent.startswith(one)), key=len, default="")
        assert not row.agent or row.agent.startswith(NAMED) or whole in RECIPES or baseline
        kb = row.agent.removeprefix(baseline).removeprefix("_")
        assert not baseline or whole in RECIPES or kb in ("", "all", *table.knowledge)
        largest = max(number for number in row.published if number is not None) if any(row.published) else 0
        assert 0 <= largest <= table.columns[0].unit.scale * (100 if table.title == "RouteRAG, Table 4" else 1)
    assert len({(row.group, row.method) for row in table.rows}) == len(table.rows)
    assert set(table.metrics) <= {*ANSWER, JUDGE, *OTHERS}
    assert (table.judge is not None) == (JUDGE in table.metrics)


def test_all_that_were_asked_for_are_there() -> None:
    tables = {
        "r1_searcher": (2, 3, 4, 5, 6, 7),
        "routerag": (1, 2, 3, 4, 7),
        "r1_router": (1, 2),
        "vrag_rl": (1, 2, 3),
        "mmsearch_r1": (1,),
    }
    figures = {
        "r1_searcher": (2, 3, 4, 5, 6),
        "routerag": (2, 3, 4, 5),
        "r1_router": (2, 3),
        "vrag_rl": (3, 4, 5, 6),
        "mmsearch_r1": (4, 5),
    }
    assert set(PAPER_TABLES) == {f"{paper}.table{i}" for paper, numbers in tables.items() for i in numbers}
    assert set(PAPER_FIGURES) == {f"{paper}.figure{i}" for paper, numbers in figures.items() for i in numbers}
    for name in PAPER_FIGURES:
        assert callable(getattr(drawings, PAPER_FIGURES.get(name).draw))


# Averages that are not those of their rows, in the papers themselves.
NOT_THEIR_MEAN = {("r1_router.table1", "OmniSearch, All", "Avg."): -0.5017}


@pytest.mark.parametrize("name", list(PAPER_TABLES))
def test_published_means_are_those_of_their_row(name: str) -> None:
    """A digit that was copied wrongly shows: within the rounding of the numbers and of the mean."""
    table = PAPER_TABLES.get(name)
    where = {(column.benchmarks, column.metric): i for i, column in enumerate(table.columns) if not column.pooled}
    for column in table.columns:
        parts = [where.get(((benchmark,), column.metric)) for benchmark in column.benchmarks]
        if column.pooled or len(parts) < 2 or None in parts:
            continue
        at = table.columns.index(column)
        for row in table.rows:
            numbers = [row.published[part] for part in parts if part is not None]
            mean = sum(number for number in numbers if number is not None) / len(numbers)
            off = round((row.published[at] or 0) - mean, 4)
            assert (
                abs(off) <= 1.01 * 10**-column.unit.digits or NOT_THEIR_MEAN[(name, row.method, column.heading)] == off
            )


def number(name: str, group: str, method: str, heading: str) -> float | None:
    table = PAPER_TABLES.get(name)
    (row,) = [row for row in table.rows if (row.group, row.method) == (group, method)]
    return row.published[[column.heading for column in table.columns].index(heading)]


def test_numbers_as_the_papers_have_them() -> None:
    assert number("r1_searcher.table2", "GPT", "IRCoT", "Bamboogle ACC_L") == 0.184
    assert number("r1_searcher.table3", "Llama", "Reinforce++", "Bamboogle F1") == 57.1
    assert number("r1_searcher.table4", "Qwen", "Qwen-Base-SFT", "2Wiki CEM") == 54.5
    assert number("r1_searcher.table5", "Qwen", "EM", "2Wiki EM") == 29.0
    assert number("r1_searcher.table6", "Qwen", "w. Difficult", "Avg CEM") == 60.8
    assert number("r1_searcher.table7", "Qwen", "2Wiki", "Bamboogle CEM") == 32.8
    assert number("routerag.table1", "GPT-4o-mini", "LightRAG", "HotpotQA F1") == 20.2
    assert number("routerag.table1", "Qwen2.5-7B", "Search-R1", "NQ EM") == 56.8
    assert number("routerag.table2", "Qwen2.5-3B", "w/o training", "MuSiQue F1") == 24.4
    assert number("routerag.table3", "Qwen2.5-7B", "RouteRAG-7B w/o efficiency reward", "2Wiki EM") == 49.5
    assert number("routerag.table4", "Qwen2.5-7B", "RouteRAG-7B w/o efficiency reward", "Avg. Turns") == 2.70
    assert number("routerag.table7", "Qwen2.5-3B, NV-Embed-v2", "RouteRAG", "PopQA EM") == 53.0
    assert number("r1_router.table1", "Qwen2.5-VL-7B", "IterRetGen, Table", "WebQA") == 83.58
    assert number("r1_router.table2", "Qwen2.5-VL-7B", "Self-Routing, SFT", "TabFact") == 47.71
    assert number("vrag_rl.table1", "Qwen2.5-VL-3B-Instruct", "OCR: ReAct", "MMLongBench Text") == 6.5
    assert number("vrag_rl.table1", "Qwen2.5-VL-7B-Instruct", "Visual: Search-R1-VL", "Overall") == 37.4
    assert number("vrag_rl.table2", "Qwen2.5-VL-7B-Instruct", "Search, RAG-specific reward", "Accuracy") is None
    assert number("vrag_rl.table3", "VRAG-RL", "+ RL", "Finish Rate") == 97.1
    assert number("mmsearch_r1.table1", "MMSearch-R1-7B", "On-demand Search", "SimpleVQA SR") == 42.5
    assert number("mmsearch_r1.table1", "Gemini 2.5 Pro", "RAG Workflow", "Average Acc") == 61.8


def row(n: int, **values: Any) -> dict[str, Any]:
    return {"n": n, "policy": "policy", "agent": {}, **values}


def results(found: dict[str, dict[str, Any]], **card: Any) -> dict[str, Any]:
    """What results.json has, of rows by benchmark and name."""
    about = {"n": 10, "knowledge": {"text": {"kind": "dense_text", "source": "c", "encoder": "e", "passages": 5}}}
    usual = {"policies": {"policy": {"name": "m"}}, "k": 3, "searches": 3, "benchmarks": dict.fromkeys(found, about)}
    return {"benchmarks": {name: {"rows": rows} for name, rows in found.items()}, "card": {**usual, **card}}


def drawn(table: PaperTable, found: dict[str, Any]) -> tuple[list[list[str]], list[list[str]]]:
    """Our rows and the paper's, and the lines of what differs."""
    numbers, differs = [block for block in paper_blocks(table, found) if isinstance(block, Table)]
    return [list(one) for one in numbers.rows], [list(one) for one in differs.rows]


def test_groups_and_questions_of_several_benchmarks() -> None:
    """VRAG-RL's table 1: a column a type of question, and all questions together."""
    slides = {"by": {"type": {"single_hop": {"judge": 0.25, "n": 4}}}}
    rows = {
        "slidevqa": {"vrag_rl:react": row(4, judge=0.5, **slides)},
        "vidoseek": {"vrag_rl:react": row(2, judge=1.0)},
        "mmlongbench_doc": {"vrag_rl:react": row(4, judge=0.0)},
    }
    ours, differs = drawn(PAPER_TABLES.get("vrag_rl.table1"), results(rows, judge={"model": "Qwen2.5-7B-Instruct"}))
    assert ours[4] == ["here: m", "Visual: ReAct", "25.0", *[""] * 8, "40.0"]  # 4 of 10 questions
    assert ours[0] == ["here: m", "OCR: Vanilla RAG", *[""] * 10]
    judge = next(line for line in differs if line[0] == "judge")
    assert judge[2:] == ["Qwen2.5-7B-Instruct", ""]


def test_the_mark_of_what_differs() -> None:
    table = PAPER_TABLES.get("r1_router.table1")
    found = results(
        {"tabfact": {"direct": row(10, f1_recall=0.1234)}},
        policies={"policy": {"name": "Qwen/Qwen2.5-VL-7B-Instruct"}},
        k=5,
    )
    ours, differs = drawn(table, found)
    assert ours[0] == ["here: Qwen/Qwen2.5-VL-7B-Instruct", "Vanilla model", "", "", "", "", "12.34", "", ""]
    marks = {name: mark for name, _, _, mark in differs}
    assert (marks["policy"], marks["documents of a search"]) == ("", "")
    assert (marks["retriever"], marks["corpus"]) == ("differs", "differs")
    assert "2wikimultihopqa" in marks["questions"]
    other = results({"tabfact": {"direct": row(10, f1_recall=0.5)}})
    assert {name: mark for name, _, _, mark in drawn(table, other)[1]}["policy"] == "differs"
    assert {name: mark for name, _, _, mark in drawn(table, other)[1]}["documents of a search"] == "differs"


def test_a_row_is_where_it_is_named_and_nowhere_else() -> None:
    about = {"recipe": "r1_router", "routing": ""}
    rows = {
        "r1_router": row(2, f1_recall=0.1, agent=about),
        "runs/a": row(2, f1_recall=0.2, agent=about),
        "runs/a:random_kb": row(2, f1_recall=0.3, agent={**about, "routing": "random_kb"}),
        "runs/b": row(2, f1_recall=0.4, agent=about),
    }
    found = results({"tabfact": rows}, rows={"step_grpo": "runs/a"})
    first, _ = drawn(PAPER_TABLES.get("r1_router.table1"), found)
    ours = {one[1]: one[6] for one in first if one[0].startswith("here") and one[6]}
    assert ours == {"R1-Router, All, r1_router": "10.00", "R1-Router, All, runs/b": "40.00"}
    second, _ = drawn(PAPER_TABLES.get("r1_router.table2"), found)
    assert [(one[1], one[6]) for one in second if one[0].startswith("here")] == [
        ("Random Routing, Prompt", ""),
        ("Random Routing, SFT", ""),
        ("Random Routing, Step-GRPO, runs/a:random_kb", "30.00"),
        ("Self-Routing, Prompt", "10.00"),
        ("Self-Routing, SFT", ""),
        ("Self-Routing, Step-GRPO, runs/a", "20.00"),
    ]
    assert assigned_agent("row:a:only_x", {"a": "runs/1"}) == "runs/1:only_x"


def test_own_knowledge_bases_of_a_benchmark() -> None:
    benchmark = Benchmark(questions=("q",), knowledge={"text": KnowledgeConfig(source="corpus.*")})
    wanted = PAPER_TABLES.get("routerag.table1").knowledge
    found = with_knowledge("b", benchmark, wanted).knowledge
    assert {name: (spec.kind, spec.source) for name, spec in found.items()} == {
        "passage": ("dense_text", "corpus.*"),
        "graph": ("graph", "corpus.*"),
        "graph_passage": ("hybrid", ""),
    }
    assert with_knowledge("b", benchmark, {}) is benchmark
    other = dataclasses.replace(benchmark, knowledge={"pages": KnowledgeConfig(source="x")})
    with pytest.raises(ValueError, match=r"config.knowledge.passage.source='own:text': benchmark 'b' has .* pages"):
        with_knowledge("b", other, wanted)


def test_a_table_whose_benchmarks_are_not_there() -> None:
    """The other benchmarks are run; without one it is said that there is none."""
    columns = (Column("A", ("hotpotqa",), "em"), Column("B", ("b_that_is_not",), "em"))
    table = dataclasses.replace(PAPER_TABLES.get("r1_searcher.table2"), columns=columns, rows=())
    PAPER_TABLES.register("test.table1")(
        dataclasses.replace(table, rows=(PAPER_TABLES.get("r1_searcher.table2").rows[0],))
    )
    PAPER_TABLES.register("test.table2")(dataclasses.replace(table, columns=columns[1:]))
    try:
        assert ComparisonConfig().of_paper("test.table1").benchmarks == ("hotpotqa",)
        with pytest.raises(ValueError, match="on b_that_is_not, and no benchmark is called so yet"):
            ComparisonConfig(rows={"x": "y"}).of_paper("test.table2")
    finally:
        for name in ("test.table1", "test.table2"):
            del PAPER_TABLES._entries[name]


@pytest.fixture
def chats(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("ROUTERL_CACHE", str(tmp_path / "cache"))
    handler: Any = Chats(reply)
    handler.refuse = refused_by_openai
    with serving(handler) as server:
        handler.url = f"{server.url}/v1"
        yield handler


def told(chats: Any, tmp_path: pathlib.Path, name: str, *arguments: str, **changes: Any) -> str:
    """The report of a paper's table, on BM25."""
    tmp_path.mkdir(exist_ok=True)
    given = config(tmp_path / "data", chats.url, retriever="bm25", **changes)
    output = tmp_path / "out"
    wanted = (f"--config={write_config(given, tmp_path / 'config.py')}", f"--output={output}", f"--report={name}")
    assert not launch_here("evaluate", *wanted, *arguments)
    return (output / "report.md").read_text()


def write_benchmarks(data: pathlib.Path) -> None:
    """HotpotQA, 2WikiMultihopQA and Bamboogle are all the world of six things."""
    for name in ("hotpotqa", "2wikimultihopqa", "bamboogle", "wikipedia"):
        write_world(data / name)
        (data / name / "questions.jsonl").rename(data / name / "questions_dev.jsonl")


def test_a_table_of_runs(chats: Any, tmp_path: pathlib.Path) -> None:
    """Agents of any kind stand in the rows that config.rows names; the mean is over all three benchmarks."""
    write_benchmarks(tmp_path / "data")
    report = told(chats, tmp_path, "r1_searcher.table5", "--config.rows={'em': 'direct', 'f1': 'vanilla_rag'}")
    direct, rag = " | 33.3" * 9, " | 83.3" * 9
    assert f"| here: m | EM, direct{direct} | 33.3 |" in report
    assert f"| here: m | F1, vanilla_rag{rag} | 83.3 |" in report
    assert f"| here: m | CEM |{'  |' * 10}" in report
    assert "| Qwen | CEM | 53.4 | 65.0 | 68.8 | 51.8 | 59.2 | 61.7 | 46.4 | 54.4 | 59.0 | 59.5 |" in report
    assert "| policy | Qwen-2.5-7B-Base | m | differs |" in report
    beside = told(
        chats,
        tmp_path / "second",
        "r1_searcher.table5",
        "--config.rows={'cover_em': 'cot'}",
        f"--config.compare_with=('{tmp_path / 'out'}',)",
        "--config.chat_model.model=n",
        data=str(tmp_path / "data"),
    )
    assert f"| here: n | CEM, cot{' | 16.7' * 10} |" in beside
    assert f"| here: m, {tmp_path / 'out'} | EM, direct{direct} | 33.3 |" in beside
    assert f"| {tmp_path / 'out'}: policy | Qwen-2.5-7B-Base | m | differs |" in beside


def test_agents_that_can_not_be_asked_are_left_out(chats: Any, tmp_path: pathlib.Path) -> None:
    """RouteRAG's, of whose modes passages alone are given, made of what the benchmark's own are."""
    write_benchmarks(tmp_path / "data")
    report = told(
        chats,
        tmp_path,
        "routerag.table1",
        "--benchmarks=hotpotqa",
        "--config.rows={'routerag': 'replug'}",
        "--config.knowledge={'passage': {'source': 'own:text'}}",
    )
    assert "| here: m | Direct Inference |  |  |  |  | 33.3 | 33.3 |" in report
    assert "| here: m | Vanilla RAG |  |  |  |  | 83.3 | 83.3 |" in report
    assert re.search(r"\| here: m \| Search-o1 \|  \|  \|  \|  \| \d", report)
    assert f"| here: m | HippoRAG 2 |{'  |' * 12}" in report
    assert f"| here: m | RouteRAG |{'  |' * 12}" in report
    assert "| not run on hotpotqa |  | replug | agent 'replug' asks for log-probabilities" in report
    assert (
        "| hipporag_reader_graph | agent 'hipporag_reader_graph' asks 'graph', and benchmark 'hotpotqa' has pass"
        in report
    )
    assert "| searches of a question | 4 | 3 | differs |" in report
    assert "not run: popqa, nq, 2wikimultihopqa, musique" in report


def test_what_is_refused(chats: Any, tmp_path: pathlib.Path) -> None:
    write_benchmarks(tmp_path / "data")
    wanted = f"--config={write_config(config(tmp_path / 'data', chats.url), tmp_path / 'config.py')}"
    output = f"--output={tmp_path / 'out'}"
    cases = {
        (
            "--report=r1_searcher.table3",
        ): "R1-Searcher, Table 3 is of trained runs: name yours, --config.rows=\"{'grpo': DIRE",
        (
            "--report=r1_searcher.table3",
            "--config.rows={'grpoo': 'x'}",
        ): "has a row 'grpoo' that is to be named; there are grpo",
        ("--config.rows={'grpo': 'x'}",): "that is to be named; there are none (config.papers, --report)",
        ("--report=routerag.figure5",): "out/results.json is not there: give the directory of a finished run",
        (
            "--report=r1_searcher.table2",
            "--config.compare_with=('x',)",
        ): "config.compare_with: x/results.json is not there",
        (
            "--report=r1_searcher.table2",
            "--agents=replug",
        ): "'replug' asks for log-probabilities, which no endpoint tells",
        (
            "--report=r1_searcher.table2",
            "--config.knowledge={'table': {'source': 'own:table'}}",
        ): "benchmark 'hotpotqa' has the knowledge bases text",
    }
    for arguments, said in cases.items():
        assert said in refusal("evaluate", wanted, output, *arguments)
    assert not chats.bodies


def test_help_has_tables_and_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert not launch_here("evaluate", "--report=help")
    printed = capsys.readouterr().out
    for said in ("mmsearch_r1.table1", "reinforce_pp", "routerag.figure5", "--top_k", "no_difficult, difficult"):
        assert said in printed
    assert not launch_here("analyze", "--figures=help")
    listed = capsys.readouterr().out
    assert "vrag_rl.figure3" in listed
    assert listed in printed


def test_prompted_recipes_of_the_tables_can_be_asked(tmp_path: pathlib.Path) -> None:
    """R1-Router's and RouteRAG's agents over the knowledge bases that their tables bring."""
    write_benchmarks(tmp_path / "data")
    given = config(tmp_path / "data", model=ModelConfig(path="x"), chat_model=ComparisonConfig().chat_model)
    (field,) = prepared(
        dataclasses.replace(given.of_paper("routerag.table2"), benchmarks=("hotpotqa",), rows={"routerag": "search"})
    )
    assert [one.name for one in field.rows] == ["routerag", "search", *(f"search:only_{kb}" for kb in field.knowledge)]
    assert not field.left_out
    one = KnowledgeConfig(source="hotpotqa/corpus.*", kind="bm25")
    bases = {"text": one, "table": one}
    wanted = dataclasses.replace(given, knowledge=bases).of_paper("r1_router.table1")
    (field,) = prepared(dataclasses.replace(wanted, benchmarks=("hotpotqa",)))
    assert sorted(field.left_out) == ["ircot_text_image", "iter_retgen_text_image", "vanilla_rag_text_image"]
    assert json.loads(json.dumps([one.name for one in field.rows]))[-3:] == [
        "cogplanner",
        "universal_rag",
        "omnisearch",
    ]
