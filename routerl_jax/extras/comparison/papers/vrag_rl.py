"""VRAG-RL's tables and figures (Wang et al., arXiv 2505.22019; the text at hand does not say of which version)."""

from __future__ import annotations

from routerl_jax.extras.comparison.papers.figure import A_RUN, COMPARED, PAPER_FIGURES, Drawing, PaperFigure
from routerl_jax.extras.comparison.papers.table import PAPER_TABLES, Column, PaperTable, Row, Setting
from routerl_jax.extras.comparison.papers.vrag_rl_figures import FIGURES, METHODS

_PAPER = "2505.22019"
_BENCHMARKS = ("slidevqa", "vidoseek", "mmlongbench_doc")
_QWEN_3B = Setting("Qwen2.5-VL-3B-Instruct", r"qwen2\.5-vl-3b-instruct")
_QWEN_7B = Setting("Qwen2.5-VL-7B-Instruct", r"qwen2\.5-vl-7b-instruct")
_OVERALL = "The paper does not say what it takes the mean over: here it is all questions of the three benchmarks."


def _types(prefix: str, benchmark: str, key: str, values: tuple[str, ...]) -> tuple[Column, ...]:
    return tuple(
        Column(f"{prefix} {value.replace('_', '-').capitalize()}", (benchmark,), "judge", group=(key, value))
        for value in values
    )


def _table(
    number: int, table_columns: tuple[Column, ...], rows: tuple[Row, ...], policies: tuple[Setting, ...], note: str
) -> None:
    judged = any(column.metric == "judge" for column in table_columns)
    table = PaperTable(
        title=f"VRAG-RL, Table {number}",
        paper=_PAPER,
        columns=table_columns,
        rows=rows,
        policies=policies,
        corpus=Setting("about 70,000 pages of visual documents"),
        retriever=Setting("a search engine for text, one for pages; the paper does not name them"),
        questions="not said",
        judge=Setting("a model; the one that rewards is Qwen2.5-7B-Instruct", r"qwen2\.5-7b-instruct")
        if judged
        else None,
        note=note,
    )
    PAPER_TABLES.register(f"vrag_rl.table{number}")(table)


def _model_rows(group: str, numbers: tuple[tuple[float, ...], ...]) -> tuple[Row, ...]:
    """The seven rows of a model: three read the OCR text of pages, four see the pages."""
    methods = {
        "OCR: Vanilla RAG": "row:ocr_vanilla_rag",
        "OCR: ReAct": "row:ocr_react",
        "OCR: Search-R1": "row:ocr_search_r1",
        "Visual: Vanilla RAG": "vrag_rl:vanilla_rag",
        "Visual: ReAct": "vrag_rl:react",
        "Visual: Search-R1-VL": "row:search_r1_vl",
        "Visual: VRAG-RL": "recipe:vrag_rl",
    }
    return tuple(Row(group, method, agent, row) for (method, agent), row in zip(methods.items(), numbers, strict=True))


_table(
    1,
    (
        *_types("SlideVQA", "slidevqa", "type", ("single_hop", "multi_hop")),
        *_types("ViDoSeek", "vidoseek", "type", ("extraction", "logic")),
        *_types("MMLongBench", "mmlongbench_doc", "source_type", ("text", "table", "chart", "figure", "layout")),
        Column("Overall", _BENCHMARKS, "judge", pooled=True),
    ),
    (
        *_model_rows(
            "Qwen2.5-VL-3B-Instruct",
            (
                (15.1, 12.1, 8.8, 14.3, 3.9, 5.1, 1.7, 3.1, 2.5, 11.2),
                (11.8, 9.9, 5.3, 7.4, 6.5, 3.7, 3.9, 5.2, 2.5, 8.4),
                (17.5, 13.8, 13.3, 20.7, 3.4, 3.2, 4.5, 4.1, 6.8, 14.1),
                (19.4, 12.2, 10.1, 17.3, 2.2, 4.1, 5.2, 4.7, 4.3, 13.2),
                (15.7, 10.9, 6.7, 14.2, 2.7, 3.6, 3.4, 3.1, 5.1, 10.9),
                (26.3, 20.1, 20.1, 29.8, 8.5, 7.8, 7.9, 9.3, 7.6, 21.3),
                (65.3, 38.6, 63.1, 73.8, 22.7, 16.1, 21.9, 21.4, 19.5, 53.5),
            ),
        ),
        *_model_rows(
            "Qwen2.5-VL-7B-Instruct",
            (
                (26.1, 10.6, 24.7, 30.9, 8.5, 5.4, 11.7, 4.4, 3.3, 20.9),
                (21.2, 13.3, 14.3, 21.3, 5.9, 5.1, 7.3, 5.5, 1.7, 15.8),
                (28.4, 19.7, 20.8, 30.6, 9.9, 6.0, 7.9, 10.1, 5.9, 22.2),
                (29.1, 17.4, 26.4, 41.3, 13.1, 14.7, 15.9, 4.3, 7.6, 24.2),
                (34.8, 20.4, 27.5, 42.1, 10.1, 12.4, 10.2, 6.2, 7.1, 26.9),
                (48.3, 42.3, 40.5, 50.3, 19.9, 13.4, 12.9, 11.4, 10.2, 37.4),
                (69.3, 43.1, 60.6, 74.8, 26.1, 26.3, 24.8, 25.9, 21.2, 57.1),
            ),
        ),
    ),
    (_QWEN_3B, _QWEN_7B),
    f"Overall: {_OVERALL[0].lower()}{_OVERALL[1:]} What reads OCR's text is a comparison of its own (docs/pages.md): its "
    "rows are named in config.rows, and config.compare_with puts them here.",
)
# In the text at hand, table 2 has lost its check marks. So it is unknown which of 47.2, 49.3 and 54.9 belongs to which row.
# 57.1 is VRAG-RL in table 1.
_table(
    2,
    (Column("Accuracy", _BENCHMARKS, "judge", pooled=True),),
    (
        Row("Qwen2.5-VL-7B-Instruct", "Search, vanilla reward", "row:search_outcome", (None,)),
        Row("Qwen2.5-VL-7B-Instruct", "Search, RAG-specific reward", "row:search_rag", (None,)),
        Row("Qwen2.5-VL-7B-Instruct", "Visual perception, vanilla reward", "row:perception_outcome", (None,)),
        Row("Qwen2.5-VL-7B-Instruct", "Visual perception, RAG-specific reward", "recipe:vrag_rl", (57.1,)),
    ),
    (_QWEN_7B,),
    "The paper has 47.2, 49.3 and 54.9 for the first three rows; the text at hand has lost the marks that say which is whose. "
    f"{_OVERALL}",
)
_table(
    3,
    (
        Column("Invalid Action Rate", _BENCHMARKS, "invalid_action_rate"),
        Column("Finish Rate", _BENCHMARKS, "finish_rate"),
    ),
    (Row("VRAG-RL", "SFT", "row:sft", (9.4, 84.2)), Row("VRAG-RL", "+ RL", "row:rl", (5.1, 97.1))),
    (_QWEN_3B, _QWEN_7B),
    "The paper names neither model nor benchmarks of its averages: here they are means over the three benchmarks.",
)

_RUN_OR = f"{A_RUN}, or {COMPARED} with RUN, vrag_rl:vanilla_rag, vrag_rl:react"
_FIGURES = {
    3: (
        "accuracy by the length of the context",
        f"{A_RUN}, whose policy as vanilla RAG answers --limit questions with each of --top_k pages at once; or a {COMPARED} "
        "for each number of pages (config.settings, vrag_rl, max_searches), joined by config.compare_with",
    ),
    4: ("recall of gold pages", _RUN_OR),
    5: ("accuracy on MMLongBench by source, relative to the best method, beside table 1's", _RUN_OR),
    6: ("latency of generation", f"{_RUN_OR}; seconds: of a comparison alone"),
}
for _number, (_shows, _needs) in _FIGURES.items():
    PAPER_FIGURES.register(f"vrag_rl.figure{_number}")(
        PaperFigure(
            title=f"VRAG-RL, Figure {_number}",
            paper=_PAPER,
            shows=_shows,
            needs=_needs,
            drawing=Drawing(
                recipe="vrag_rl", methods=METHODS, draw=FIGURES[_number], tries="pages" if _number == 3 else ""
            ),
        )
    )
