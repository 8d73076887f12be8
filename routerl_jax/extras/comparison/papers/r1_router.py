"""R1-Router's tables and figures (Peng et al., arXiv 2505.22095; the text at hand does not say of which version)."""

from __future__ import annotations

from routerl_jax.extras.comparison.papers.figure import A_RUN, COMPARED, PAPER_FIGURES, Drawing, PaperFigure
from routerl_jax.extras.comparison.papers.r1_router_figures import METHODS, routing, training
from routerl_jax.extras.comparison.papers.table import HUNDREDTHS, PAPER_TABLES, PaperTable, Row, Setting, columns
from routerl_jax.training.config import KnowledgeConfig

_PAPER = "2505.22095"
_BENCHMARKS = {
    "Open-WikiTable": "open_wikitable",
    "2WikiMQA": "2wikimultihopqa",
    "InfoSeek": "infoseek",
    "Dyn-VQA": "dyn_vqa",
    "TabFact": "tabfact",
    "WebQA": "webqa",
}
_QWEN = Setting("Qwen2.5-VL-7B", r"qwen2\.5-vl-7b")
# The same three for all questions (section 4): Wikipedia's passages, M-BEIR's pictures with captions, Open-WikiTable's tables
_KNOWLEDGE = {
    "text": KnowledgeConfig(source="wikipedia/corpus.*", encoder="BAAI/bge-m3"),
    "text_image": KnowledgeConfig(source="m_beir/captions.*", kind="text_image"),
    "table": KnowledgeConfig(source="open_wikitable/tables.*", kind="dense_table", encoder="BAAI/bge-m3"),
}


def _table(number: int, rows: tuple[Row, ...], policies: tuple[Setting, ...], note: str = "") -> None:
    table = PaperTable(
        title=f"R1-Router, Table {number}",
        paper=_PAPER,
        columns=columns(_BENCHMARKS, {"": "f1_recall"}, HUNDREDTHS, mean="Avg."),
        rows=rows,
        policies=policies,
        corpus=Setting(
            "a Wikipedia dump, the M-BEIR corpus with descriptions of its pictures, Open-WikiTable's tables"
        ),
        retriever=Setting("BGE-M3; UniIR; Open-WikiTable's dense retriever", r"bge-m3|uniir"),
        questions="1,000 of each at random, all 715 of Dyn-VQA",  # appendix A.2, table 3
        k=5,  # per knowledge base: 15 in all (section 5.1); 3 iterations (section 4)
        searches=3,
        knowledge=_KNOWLEDGE,
        note=f"All numbers are F1-Recall. {note}".strip(),
    )
    PAPER_TABLES.register(f"r1_router.table{number}")(table)


_table(
    1,
    (
        Row("Qwen2.5-VL-7B", "Vanilla model", "direct", (21.28, 48.35, 43.06, 36.31, 18.10, 76.07, 40.53)),
        Row("R1-Distill-Qwen-32B", "Vanilla model", "direct", (22.75, 51.78, 37.20, 39.98, 19.10, 79.41, 41.70)),
        Row(
            "Qwen2.5-VL-7B", "Vanilla RAG, Text", "vanilla_rag_text", (15.38, 48.20, 31.88, 13.26, 29.20, 79.04, 36.16)
        ),
        Row(
            "Qwen2.5-VL-7B",
            "Vanilla RAG, Image",
            "vanilla_rag_text_image",
            (13.77, 43.95, 43.03, 14.03, 27.50, 79.76, 37.01),
        ),
        Row(
            "Qwen2.5-VL-7B",
            "Vanilla RAG, Table",
            "vanilla_rag_table",
            (53.35, 41.89, 33.37, 12.29, 27.90, 75.73, 40.76),
        ),
        Row("Qwen2.5-VL-7B", "Vanilla RAG, All", "vanilla_rag_all", (49.99, 48.31, 39.06, 14.12, 34.90, 76.63, 43.84)),
        Row("Qwen2.5-VL-7B", "IRCoT, Text", "ircot_text", (5.78, 24.70, 16.80, 16.61, 5.20, 46.16, 19.21)),
        Row("Qwen2.5-VL-7B", "IRCoT, Image", "ircot_text_image", (5.32, 18.94, 27.47, 18.04, 2.10, 47.06, 19.82)),
        Row("Qwen2.5-VL-7B", "IRCoT, Table", "ircot_table", (35.52, 11.13, 17.22, 14.95, 8.30, 44.46, 21.93)),
        Row("Qwen2.5-VL-7B", "IRCoT, All", "ircot_all", (39.44, 25.77, 23.41, 22.23, 9.60, 49.48, 28.32)),
        Row("Qwen2.5-VL-7B", "IterRetGen, Text", "iter_retgen_text", (14.59, 50.07, 39.59, 36.18, 30.60, 83.88, 42.49)),
        Row(
            "Qwen2.5-VL-7B",
            "IterRetGen, Image",
            "iter_retgen_text_image",
            (12.38, 43.93, 41.35, 32.66, 30.80, 84.50, 40.94),
        ),
        Row(
            "Qwen2.5-VL-7B", "IterRetGen, Table", "iter_retgen_table", (36.74, 42.91, 40.53, 32.44, 36.90, 83.58, 45.52)
        ),
        Row("Qwen2.5-VL-7B", "IterRetGen, All", "iter_retgen_all", (38.95, 50.99, 40.94, 36.08, 38.60, 84.19, 48.29)),
        Row(
            "R1-Distill-Qwen-7B", "Search-O1, Text", "search_o1_text", (9.72, 28.12, 18.52, 16.40, 29.60, 16.78, 19.86)
        ),
        Row("Qwen2.5-VL-7B", "CogPlanner, All", "cogplanner", (16.50, 49.28, 42.23, 36.60, 33.10, 84.82, 43.76)),
        Row("Qwen2.5-VL-7B", "UniversalRAG, All", "universal_rag", (31.12, 47.30, 37.25, 11.91, 26.00, 79.48, 38.84)),
        Row("Qwen2.5-VL-7B", "OmniSearch, All", "omnisearch", (7.72, 31.02, 24.45, 18.94, 2.30, 58.02, 23.24)),
        Row("Qwen2.5-VL-7B", "R1-Router, All", "recipe:r1_router", (53.95, 55.47, 43.60, 39.24, 52.40, 90.92, 55.93)),
    ),
    (
        _QWEN,
        Setting("R1-Distill-Qwen-32B", "r1-distill-qwen-32b"),
        Setting("R1-Distill-Qwen-7B", "r1-distill-qwen-7b"),
    ),
    note="OmniSearch's average is the paper's; that of its row is 23.74.",
)
_table(
    2,
    (
        Row(
            "Qwen2.5-VL-7B",
            "Random Routing, Prompt",
            "r1_router:random_kb",
            (18.88, 41.44, 25.70, 25.16, 25.90, 77.79, 35.81),
        ),
        Row(
            "Qwen2.5-VL-7B",
            "Random Routing, SFT",
            "row:sft:random_kb",
            (24.60, 41.91, 27.35, 27.09, 43.10, 79.81, 40.64),
        ),
        Row(
            "Qwen2.5-VL-7B",
            "Random Routing, Step-GRPO",
            "row:step_grpo:random_kb",
            (44.03, 51.08, 40.56, 38.18, 50.50, 90.66, 52.50),
        ),
        Row("Qwen2.5-VL-7B", "Self-Routing, Prompt", "r1_router", (23.97, 41.56, 24.43, 26.19, 25.20, 77.94, 36.55)),
        Row("Qwen2.5-VL-7B", "Self-Routing, SFT", "row:sft", (28.12, 42.65, 31.35, 29.62, 47.71, 76.75, 42.70)),
        Row(
            "Qwen2.5-VL-7B",
            "Self-Routing, Step-GRPO",
            "row:step_grpo",
            (53.95, 55.47, 43.60, 39.24, 52.40, 90.92, 55.93),
        ),
    ),
    (_QWEN,),
)

_NEEDS = f"{A_RUN} with a control sft, or {COMPARED} with r1_router and the runs of table 2"
PAPER_FIGURES.register("r1_router.figure2")(
    PaperFigure(
        title="R1-Router, Figure 2",
        paper=_PAPER,
        shows="reward and response length over training, searches of right answers by kind of question",
        needs=_NEEDS,
        drawing=Drawing(recipe="r1_router", methods=METHODS, draw=training, records=True),
    )
)
PAPER_FIGURES.register("r1_router.figure3")(
    PaperFigure(
        title="R1-Router, Figure 3",
        paper=_PAPER,
        shows="share of each knowledge base in first, second and third searches on visual questions",
        needs=_NEEDS,
        drawing=Drawing(recipe="r1_router", methods=METHODS, draw=routing, records=True),
    )
)
