"""MMSearch-R1's tables and figures (Wu et al., arXiv 2506.20670v1)."""

from __future__ import annotations

from routerl_jax.extras.comparison.papers.figure import A_RUN, COMPARED, PAPER_FIGURES, Drawing, PaperFigure
from routerl_jax.extras.comparison.papers.mmsearch_r1_figures import TRAINING, WORKFLOW, training, workflow
from routerl_jax.extras.comparison.papers.table import PAPER_TABLES, PaperTable, Row, Setting, columns

_PAPER = "2506.20670"
_BENCHMARKS = {
    "FVQA-test": "fvqa",
    "InfoSeek": "infoseek",
    "MMSearch": "mmsearch",
    "SimpleVQA": "simplevqa",
    "LiveVQA": "livevqa",
}
_DIRECT, _WORKFLOW = "mmsearch_r1:direct", "mmsearch_r1:rag_workflow"


_COLUMNS = columns(_BENCHMARKS, {"Acc": "judge", "SR": "search_ratio"}, mean="Average")


def _fixed_searches(model: str, method: str, agent: str, ratio: float, accuracies: tuple[float, ...]) -> Row:
    """A row with the same search ratio on all benchmarks, because the model does not decide about searches."""
    return Row(model, method, agent, tuple(number for accuracy in accuracies for number in (accuracy, ratio)))


PAPER_TABLES.register("mmsearch_r1.table1")(
    PaperTable(
        title="MMSearch-R1, Table 1",
        paper=_PAPER,
        columns=(*_COLUMNS[-2:], *_COLUMNS[:-2]),  # the averages come first
        rows=(
            _fixed_searches("GPT4o", "Direct Answer", _DIRECT, 0, (36.0, 41.7, 42.7, 22.2, 46.6, 26.9)),
            _fixed_searches("Gemini 2.5 Pro", "Direct Answer", _DIRECT, 0, (36.4, 37.2, 37.0, 26.9, 53.4, 27.7)),
            _fixed_searches("Qwen2.5-VL-72B", "Direct Answer", _DIRECT, 0, (26.6, 27.1, 28.0, 15.7, 42.2, 20.1)),
            _fixed_searches("Qwen2.5-VL-32B", "Direct Answer", _DIRECT, 0, (25.0, 24.7, 25.8, 15.7, 40.1, 18.7)),
            _fixed_searches("Qwen2.5-VL-7B", "Direct Answer", _DIRECT, 0, (21.9, 20.3, 20.1, 12.8, 38.4, 17.8)),
            _fixed_searches("GPT4o", "RAG Workflow", _WORKFLOW, 100, (62.1, 66.0, 59.1, 62.5, 63.4, 59.6)),
            _fixed_searches("Gemini 2.5 Pro", "RAG Workflow", _WORKFLOW, 100, (61.8, 66.1, 56.7, 62.5, 65.9, 57.8)),
            _fixed_searches("Qwen2.5-VL-72B", "RAG Workflow", _WORKFLOW, 100, (59.6, 62.2, 59.4, 59.6, 61.0, 56.0)),
            _fixed_searches("Qwen2.5-VL-32B", "RAG Workflow", _WORKFLOW, 100, (55.1, 57.0, 56.8, 57.9, 54.5, 49.6)),
            _fixed_searches("Qwen2.5-VL-7B", "RAG Workflow", _WORKFLOW, 100, (51.6, 52.9, 53.7, 52.2, 51.6, 48.0)),
            Row(
                "MMSearch-R1-7B",
                "On-demand Search",
                "recipe:mmsearch_r1",
                (54.6, 67.1, 58.4, 66.8, 55.1, 61.6, 53.8, 88.5, 57.4, 42.5, 48.4, 76.2),
            ),
        ),
        policies=(
            Setting("GPT4o", r"gpt-4o(?!-mini)"),
            Setting("Gemini 2.5 Pro", r"gemini-2\.5-pro"),
            *(Setting(f"Qwen2.5-VL-{size}", rf"qwen2\.5-vl-{size.lower()}") for size in ("72B", "32B", "7B")),
        ),
        corpus=Setting("the web of 2025: SerpApi's image search, and its text search with pages read by Jina Reader"),
        retriever=Setting("search engines, pages summarised by a language model"),
        questions="FVQA-test 1,800, InfoSeek 2,000 at random, MMSearch those with pictures, SimpleVQA 1,013, LiveVQA 3,602",
        k=5,  # section 4.1, with at most two searches
        searches=2,
        judge=Setting("GPT-4o-20241120", r"gpt-4o-2024-?11-?20"),
        note="Acc is the judge's verdict. SR is the searches made of those allowed, as the caption has it.",
    )
)

PAPER_FIGURES.register("mmsearch_r1.figure4")(
    PaperFigure(
        title="MMSearch-R1, Figure 4",
        paper=_PAPER,
        shows="start and trained policy under the RAG workflow; right and wrong, with and without a search",
        needs=f"{A_RUN} with config.evaluation.before_baselines, or {COMPARED} with mmsearch_r1, "
        "mmsearch_r1:rag_workflow, RUN and RUN:rag_workflow",
        drawing=Drawing(recipe="mmsearch_r1", methods=WORKFLOW, draw=workflow, records=True),
    )
)
PAPER_FIGURES.register("mmsearch_r1.figure5")(
    PaperFigure(
        title="MMSearch-R1, Figure 5",
        paper=_PAPER,
        shows="accuracy and search ratio after SFT and RL; reward and searches over training, also without balance or penalty",
        needs=f"{A_RUN} with controls sft, unbalanced and no_penalty, or {COMPARED} with mmsearch_r1 and such runs",
        drawing=Drawing(recipe="mmsearch_r1", methods=TRAINING, draw=training),
    )
)
