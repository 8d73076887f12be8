"""RouteRAG's tables and figures (Guo et al., arXiv 2512.09487; the text at hand does not say of which version)."""

from __future__ import annotations

from routerl_jax.extras.comparison.benchmarks.benchmark import OWN
from routerl_jax.extras.comparison.papers.figure import A_RUN, COMPARED, PAPER_FIGURES, Drawing, PaperFigure
from routerl_jax.extras.comparison.papers.routerag_figures import (
    DEPTH,
    DOCUMENTS,
    EFFICIENCY,
    SYSTEMS,
    depth,
    documents,
    retrieval_turns,
    systems,
)
from routerl_jax.extras.comparison.papers.table import COUNT, PAPER_TABLES, Column, PaperTable, Row, Setting, columns
from routerl_jax.training.config import KnowledgeConfig

_PAPER = "2512.09487"
_BENCHMARKS = {
    "PopQA": "popqa",
    "NQ": "nq",
    "HotpotQA": "hotpotqa",
    "2Wiki": "2wikimultihopqa",
    "MuSiQue": "musique",
}
_COLUMNS = columns(_BENCHMARKS, {"EM": "em", "F1": "f1"}, mean="Average")
_GPT = Setting("GPT-4o-mini", "gpt-4o-mini")
_QWEN_3B = Setting("Qwen2.5-3B-Instruct", r"qwen2\.5-3b-instruct")
_QWEN_7B = Setting("Qwen2.5-7B-Instruct", r"qwen2\.5-7b-instruct")
# The modes of RouteRAG's agent, over the passages of a benchmark (recipes.routerag.TOOLS)
_KNOWLEDGE = {
    "passage": KnowledgeConfig(source=f"{OWN}text"),
    "graph": KnowledgeConfig(source=f"{OWN}text", kind="graph"),
    "graph_passage": KnowledgeConfig(kind="hybrid", members=("passage", "graph")),
}


def _table(
    number: int,
    rows: tuple[Row, ...],
    policies: tuple[Setting, ...],
    retriever: Setting,
    table_columns: tuple[Column, ...] = _COLUMNS,
    note: str = "",
) -> None:
    table = PaperTable(
        title=f"RouteRAG, Table {number}",
        paper=_PAPER,
        columns=table_columns,
        rows=rows,
        policies=policies,
        corpus=Setting(
            "passages that come with the questions: PopQA 8,678, NQ 9,633, HotpotQA 9,811, 2Wiki 6,119, MuSiQue 11,656",
            r"\((8678|9633|9811|6119|11656) passages",  # table 5
        ),
        retriever=retriever,
        questions="1,000 of each",  # table 5
        k=3,  # appendix B.3, and a budget of 4
        searches=4,
        knowledge=_KNOWLEDGE,
        note=note,
    )
    PAPER_TABLES.register(f"routerag.table{number}")(table)


_CONTRIEVER = Setting("Contriever; the graph HippoRAG 2's", "contriever")
_BOTH = Setting("Contriever (3B), NV-Embed-v2 (7B); the graph HippoRAG 2's", "contriever|nv-embed-v2")
_ROUTERAG_3B = (49.4, 56.8, 44.1, 53.4, 53.2, 65.1, 57.5, 64.1, 30.7, 39.3, 47.0, 55.7)
_ROUTERAG_7B = (50.6, 56.4, 51.5, 60.4, 60.8, 72.5, 57.1, 64.6, 39.6, 49.3, 51.9, 60.6)
_SEARCH_R1_3B = (45.8, 53.3, 46.2, 54.8, 45.2, 56.9, 42.4, 50.8, 22.2, 30.9, 40.4, 49.3)
_SEARCH_R1_7B = (51.3, 57.1, 56.8, 65.3, 51.0, 62.0, 51.8, 58.9, 32.0, 40.8, 48.6, 56.8)

_table(
    1,
    (
        Row(
            "GPT-4o-mini",
            "Direct Inference",
            "direct",
            (16.1, 22.7, 35.2, 52.7, 28.6, 41.0, 30.2, 36.3, 11.2, 22.0, 24.3, 34.9),
        ),
        Row("GPT-4o-mini", "GraphRAG", "", (30.7, 51.3, 38.0, 55.5, 51.4, 67.6, 45.7, 61.0, 27.0, 42.0, 38.6, 55.5)),
        Row("GPT-4o-mini", "LightRAG", "", (1.9, 14.8, 2.8, 15.4, 9.9, 20.2, 2.5, 12.1, 2.0, 9.3, 3.8, 14.4)),
        Row("GPT-4o-mini", "RAPTOR", "", (41.9, 55.1, 37.8, 54.5, 50.6, 64.7, 39.7, 48.4, 27.7, 39.2, 39.5, 52.4)),
        Row("GPT-4o-mini", "HippoRAG", "", (42.5, 56.2, 37.2, 52.5, 46.3, 60.0, 59.4, 67.3, 24.0, 35.9, 41.9, 54.4)),
        Row(
            "GPT-4o-mini",
            "HippoRAG 2",
            "hipporag_reader_graph",
            (41.7, 55.7, 43.4, 60.0, 56.3, 71.1, 60.5, 69.7, 35.0, 49.3, 47.4, 61.2),
        ),
        Row(
            "Qwen2.5-3B",
            "Vanilla RAG",
            "vanilla_rag_passage",
            (30.3, 41.6, 18.1, 31.8, 29.5, 41.8, 19.7, 27.4, 10.3, 17.5, 21.6, 32.0),
        ),
        Row(
            "Qwen2.5-3B",
            "HippoRAG 2",
            "hipporag_reader_graph",
            (29.1, 40.1, 20.3, 33.5, 31.2, 45.0, 21.5, 33.8, 12.2, 20.2, 22.9, 34.5),
        ),
        Row(
            "Qwen2.5-3B",
            "Search-o1",
            "search_o1_passage",
            (17.1, 23.8, 19.9, 29.1, 18.7, 26.3, 16.9, 20.9, 3.9, 10.5, 15.3, 22.1),
        ),
        Row("Qwen2.5-3B", "Search-R1", "recipe:search_r1", _SEARCH_R1_3B),
        Row("Qwen2.5-3B", "RouteRAG", "recipe:routerag", _ROUTERAG_3B),
        Row(
            "Qwen2.5-7B",
            "Vanilla RAG",
            "vanilla_rag_passage",
            (26.3, 37.8, 11.0, 30.6, 29.1, 47.5, 17.2, 33.3, 11.4, 23.0, 19.0, 34.4),
        ),
        Row(
            "Qwen2.5-7B",
            "HippoRAG 2",
            "hipporag_reader_graph",
            (27.0, 37.9, 8.1, 27.2, 27.4, 46.1, 16.8, 34.7, 12.3, 24.0, 18.3, 34.0),
        ),
        Row(
            "Qwen2.5-7B",
            "Search-o1",
            "search_o1_passage",
            (4.7, 7.2, 18.1, 27.5, 13.5, 19.1, 6.4, 7.9, 2.9, 7.7, 9.1, 13.9),
        ),
        Row(
            "Qwen2.5-7B",
            "R1-Searcher",
            "recipe:r1_searcher",
            (28.4, 41.0, 41.6, 52.2, 46.6, 56.7, 41.7, 49.0, 29.3, 37.6, 37.5, 47.3),
        ),
        Row("Qwen2.5-7B", "Search-R1", "recipe:search_r1", _SEARCH_R1_7B),
        Row("Qwen2.5-7B", "RouteRAG", "recipe:routerag", _ROUTERAG_7B),
    ),
    (_GPT, _QWEN_3B, _QWEN_7B),
    _BOTH,
)
_table(
    2,
    (
        Row("Qwen2.5-3B", "RouteRAG-3B", "row:routerag", _ROUTERAG_3B),
        Row(
            "Qwen2.5-3B",
            "w/o Stage 2 training",
            "row:stage1",
            (47.0, 54.6, 39.1, 49.4, 46.4, 58.6, 48.5, 55.6, 24.3, 33.0, 41.1, 50.2),
        ),
        Row(
            "Qwen2.5-3B",
            "w/o training",
            "routerag",
            (26.2, 41.3, 18.6, 30.5, 35.4, 46.9, 24.4, 37.9, 15.4, 24.4, 24.0, 36.2),
        ),
        Row(
            "Qwen2.5-3B",
            "w/ only passage retrieval",
            "row:routerag:only_passage",
            (48.7, 55.2, 43.9, 53.3, 53.1, 64.5, 53.0, 58.9, 28.0, 36.2, 45.3, 53.6),
        ),
        Row(
            "Qwen2.5-3B",
            "w/ only graph-based retrieval",
            "row:routerag:only_graph",
            (49.3, 56.8, 43.8, 53.0, 53.4, 65.5, 57.4, 64.2, 29.7, 38.3, 46.7, 55.6),
        ),
        Row(
            "Qwen2.5-3B",
            "w/ only hybrid retrieval",
            "row:routerag:only_graph_passage",
            (48.7, 55.9, 43.1, 52.5, 53.3, 65.1, 53.7, 59.8, 28.8, 37.0, 45.5, 54.0),
        ),
    ),
    (_QWEN_3B,),
    _CONTRIEVER,
)
_table(
    3,
    (
        Row("Qwen2.5-3B", "RouteRAG-3B", "row:routerag_3b", _ROUTERAG_3B),
        Row(
            "Qwen2.5-3B",
            "RouteRAG-3B w/o efficiency reward",
            "row:no_efficiency_3b",
            (41.5, 54.1, 41.1, 51.7, 53.7, 66.2, 56.9, 65.0, 30.2, 38.9, 44.7, 55.2),
        ),
        Row("Qwen2.5-7B", "RouteRAG-7B", "row:routerag_7b", _ROUTERAG_7B),
        Row(
            "Qwen2.5-7B",
            "RouteRAG-7B w/o efficiency reward",
            "row:no_efficiency_7b",
            (46.0, 54.1, 52.5, 62.1, 59.9, 72.6, 49.5, 56.8, 42.4, 52.0, 50.1, 59.5),
        ),
    ),
    (_QWEN_3B, _QWEN_7B),
    _BOTH,
)
_table(
    4,
    (
        Row("Qwen2.5-3B", "RouteRAG-3B", "row:routerag_3b", (2.43, 55.7)),
        Row("Qwen2.5-3B", "RouteRAG-3B w/o efficiency reward", "row:no_efficiency_3b", (2.51, 55.2)),
        Row("Qwen2.5-7B", "RouteRAG-7B", "row:routerag_7b", (2.25, 60.6)),
        Row("Qwen2.5-7B", "RouteRAG-7B w/o efficiency reward", "row:no_efficiency_7b", (2.70, 59.5)),
    ),
    (_QWEN_3B, _QWEN_7B),
    _BOTH,
    (
        Column("Avg. Turns", tuple(_BENCHMARKS.values()), "searches_per_question", COUNT),
        Column("Avg. F1", tuple(_BENCHMARKS.values()), "f1"),
    ),
    note="Turns are searches, of whatever mode.",
)
_table(
    7,
    (
        Row("Qwen2.5-3B, Contriever", "Search-R1", "recipe:search_r1", _SEARCH_R1_3B),
        Row("Qwen2.5-3B, Contriever", "RouteRAG", "recipe:routerag", _ROUTERAG_3B),
        Row(
            "Qwen2.5-3B, NV-Embed-v2",
            "Search-R1",
            "recipe:search_r1",
            (53.5, 60.1, 54.8, 63.1, 51.0, 62.5, 45.7, 54.5, 32.1, 41.0, 47.4, 56.2),
        ),
        Row(
            "Qwen2.5-3B, NV-Embed-v2",
            "RouteRAG",
            "recipe:routerag",
            (53.0, 59.6, 47.0, 57.3, 56.1, 68.2, 58.2, 65.4, 36.6, 45.4, 50.2, 59.2),
        ),
        Row(
            "Qwen2.5-7B, Contriever",
            "Search-R1",
            "recipe:search_r1",
            (47.1, 52.7, 49.5, 58.1, 45.2, 55.7, 45.9, 52.7, 24.4, 31.8, 42.4, 50.2),
        ),
        Row(
            "Qwen2.5-7B, Contriever",
            "RouteRAG",
            "recipe:routerag",
            (50.5, 56.7, 46.9, 55.4, 53.8, 65.3, 55.3, 62.7, 34.3, 43.7, 48.2, 56.8),
        ),
        Row("Qwen2.5-7B, NV-Embed-v2", "Search-R1", "recipe:search_r1", _SEARCH_R1_7B),
        Row("Qwen2.5-7B, NV-Embed-v2", "RouteRAG", "recipe:routerag", _ROUTERAG_7B),
    ),
    (_QWEN_3B, _QWEN_7B),
    Setting("Contriever, NV-Embed-v2; the graph HippoRAG 2's", "contriever|nv-embed-v2"),
    note="Each retriever is a comparison of its own (config.encoder, --output); config.compare_with adds the rows of others.",
)

_FIGURES = {
    2: (
        "retrieval turns with and without the efficiency reward, by benchmark",
        f"{COMPARED} with the runs of table 3, or {A_RUN} with a control stage1_only",
        Drawing(recipe="routerag", methods=EFFICIENCY, draw=retrieval_turns),
    ),
    3: (
        "reasoning steps before and after training, by benchmark",
        f"{COMPARED} with prompted (routerag) and trained policies, or {A_RUN}",
        Drawing(recipe="routerag", methods=DEPTH, draw=depth, records=True),
    ),
    4: (
        "F1, response tokens and turns of RouteRAG, Search-R1 and R1-Searcher, by benchmark",
        f"{COMPARED} with these agents, as table 1's",
        Drawing(recipe="routerag", methods=SYSTEMS, draw=systems, records=True),
    ),
    5: (
        "EM, F1 and retrieval turns by the number of documents of a search",
        f"{A_RUN}, whose policy answers --limit questions with each of --top_k documents; or a {COMPARED} for each config.k, "
        "joined by config.compare_with",
        Drawing(recipe="routerag", methods=DOCUMENTS, draw=documents, tries="documents"),
    ),
}
for _number, (_shows, _needs, _drawing) in _FIGURES.items():
    PAPER_FIGURES.register(f"routerag.figure{_number}")(
        PaperFigure(title=f"RouteRAG, Figure {_number}", paper=_PAPER, shows=_shows, needs=_needs, drawing=_drawing)
    )
