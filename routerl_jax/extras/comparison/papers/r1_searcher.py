"""R1-Searcher's tables and figures (Song et al., arXiv 2503.05592; the text at hand does not say of which version)."""

from __future__ import annotations

import dataclasses
import functools

from routerl_jax.extras.comparison.papers.figure import COMPARED, PAPER_FIGURES, Drawing, PaperFigure
from routerl_jax.extras.comparison.papers.measured import Method
from routerl_jax.extras.comparison.papers.r1_searcher_figures import OVER_TRAINING, online, over_training
from routerl_jax.extras.comparison.papers.table import PAPER_TABLES, SHARE, PaperTable, Row, Setting, columns

_PAPER = "2503.05592"
_TRAINED_ON = {"HotpotQA": "hotpotqa", "2Wiki": "2wikimultihopqa", "Bamboogle": "bamboogle"}
_LLAMA = Setting("Llama-3.1-8B-Instruct", r"llama-3\.1-8b-instruct")
_QWEN = Setting("Qwen-2.5-7B-Base", r"qwen-?2\.5-7b(-base)?$")
_TABLE_2 = PaperTable(
    title="R1-Searcher, Table 2",
    paper=_PAPER,
    # ACC_R is cover exact match (section 3.1), ACC_L a judge's verdict
    columns=columns({**_TRAINED_ON, "Musique": "musique"}, {"ACC_R": "cover_em", "ACC_L": "judge"}, SHARE),
    rows=(
        Row("GPT", "Naive Generation", "direct", (0.324, 0.404, 0.348, 0.346, 0.240, 0.280, 0.134, 0.170)),
        Row("GPT", "Standard RAG", "vanilla_rag", (0.342, 0.450, 0.344, 0.292, 0.272, 0.328, 0.172, 0.188)),
        Row("GPT", "SuRe", "sure", (0.270, 0.380, 0.244, 0.264, 0.168, 0.208, 0.128, 0.146)),
        Row("GPT", "REPLUG", "replug", (0.350, 0.428, 0.296, 0.254, 0.224, 0.256, 0.132, 0.138)),
        Row("GPT", "LongLLMLingua", "longllmlingua", (0.358, 0.450, 0.324, 0.316, 0.248, 0.288, 0.150, 0.172)),
        Row("GPT", "RECOMP", "recomp", (0.332, 0.398, 0.298, 0.306, 0.136, 0.176, 0.118, 0.134)),
        Row("GPT", "Selective-Context", "selective_context", (0.366, 0.442, 0.350, 0.290, 0.240, 0.288, 0.152, 0.172)),
        Row("GPT", "SKR", "skr", (0.360, 0.454, 0.364, 0.314, 0.248, 0.288, 0.162, 0.174)),
        Row("GPT", "Self-Ask", "self_ask", (0.392, 0.462, 0.336, 0.478, 0.336, 0.416, 0.260, 0.270)),
        Row("GPT", "Iter-RetGen", "iter_retgen", (0.374, 0.456, 0.326, 0.270, 0.232, 0.256, 0.178, 0.188)),
        Row("GPT", "IRCoT", "ircot", (0.434, 0.308, 0.492, 0.114, 0.272, 0.184, 0.192, 0.214)),
        Row("GPT", "CR-Planner", "cr_planner", (0.404, 0.416, 0.520, 0.478, 0.488, 0.524, 0.272, 0.262)),
        Row("GPT", "ReARTeR", "", (0.468, 0.506, 0.554, 0.534, 0.496, 0.544, 0.296, 0.302)),
        Row("Llama", "Naive Generation", "direct", (0.208, 0.268, 0.326, 0.254, 0.144, 0.168, 0.068, 0.096)),
        Row("Llama", "Standard RAG", "vanilla_rag", (0.334, 0.398, 0.336, 0.212, 0.168, 0.216, 0.104, 0.098)),
        Row("Llama", "SuRe", "sure", (0.266, 0.346, 0.122, 0.262, 0.160, 0.192, 0.106, 0.144)),
        Row("Llama", "REPLUG", "replug", (0.290, 0.348, 0.334, 0.204, 0.168, 0.232, 0.078, 0.090)),
        Row("Llama", "LongLLMLingua", "longllmlingua", (0.314, 0.382, 0.304, 0.294, 0.168, 0.216, 0.088, 0.100)),
        Row("Llama", "RECOMP", "recomp", (0.318, 0.380, 0.324, 0.322, 0.104, 0.160, 0.112, 0.126)),
        Row(
            "Llama", "Selective-Context", "selective_context", (0.296, 0.358, 0.266, 0.204, 0.144, 0.200, 0.092, 0.104)
        ),
        Row("Llama", "SKR", "skr", (0.300, 0.372, 0.336, 0.212, 0.176, 0.208, 0.100, 0.112)),
        Row("Llama", "Self-Ask", "self_ask", (0.316, 0.408, 0.306, 0.322, 0.360, 0.432, 0.222, 0.226)),
        Row("Llama", "Iter-RetGen", "iter_retgen", (0.302, 0.362, 0.310, 0.224, 0.144, 0.176, 0.084, 0.084)),
        Row("Llama", "IRCoT", "ircot", (0.210, 0.146, 0.338, 0.312, 0.120, 0.104, 0.060, 0.042)),
        Row("Llama", "CR-Planner", "cr_planner", (0.332, 0.350, 0.420, 0.350, 0.304, 0.336, 0.144, 0.098)),
        Row("Llama", "ReARTeR", "", (0.424, 0.434, 0.470, 0.364, 0.438, 0.484, 0.244, 0.252)),
        Row("Llama", "Marco-o1", "", (0.352, 0.348, 0.442, 0.184, 0.224, 0.200, 0.134, 0.104)),
        Row("Llama", "Skywork-o1", "", (0.306, 0.256, 0.344, 0.190, 0.176, 0.160, 0.092, 0.060)),
        Row("Llama", "R1-Searcher", "recipe:r1_searcher", (0.648, 0.746, 0.594, 0.628, 0.504, 0.544, 0.254, 0.282)),
        Row("Qwen", "R1-Searcher", "recipe:r1_searcher", (0.654, 0.750, 0.636, 0.650, 0.528, 0.544, 0.282, 0.314)),
    ),
    policies=(Setting("GPT-4o-mini", "gpt-4o-mini"), _LLAMA, _QWEN),
    corpus=Setting("English Wikipedia of 2019 as KILT has it, 29 million passages of 100 words", "kilt"),
    retriever=Setting("BGE-large-en-v1.5", "bge-large-en-v1.5"),
    judge=Setting("GPT-4o-mini", "gpt-4o-mini"),
    questions="its released files have 500 of each, 125 of Bamboogle",
)
PAPER_TABLES.register("r1_searcher.table2")(_TABLE_2)


def _ablation(number: int, policies: tuple[Setting, ...], rows: tuple[Row, ...]) -> None:
    """Tables 3 to 7: trained runs, by EM, CEM and F1 in percent, and the mean of CEM."""
    metrics = {"EM": "em", "CEM": "cover_em", "F1": "f1"}
    table = dataclasses.replace(
        _TABLE_2,
        title=f"R1-Searcher, Table {number}",
        columns=columns(_TRAINED_ON, metrics, mean="Avg", mean_of="cover_em"),
        rows=rows,
        policies=policies,
        judge=None,
    )
    PAPER_TABLES.register(f"r1_searcher.table{number}")(table)


_ablation(
    3,
    (_LLAMA,),
    (
        Row("Llama", "GRPO", "row:grpo", (53.0, 60.5, 68.6, 58.0, 60.5, 63.0, 48.0, 56.0, 60.5, 59.0)),
        Row("Llama", "Reinforce++", "row:reinforce_pp", (58.4, 64.8, 70.6, 57.5, 61.5, 62.9, 44.0, 50.4, 57.1, 58.9)),
    ),
)
_ablation(
    4,
    (_QWEN, _LLAMA),
    (
        Row("Qwen", "Qwen-Base-RL", "row:qwen_rl", (58.0, 65.4, 71.9, 55.4, 63.6, 63.7, 45.6, 52.8, 57.7, 60.6)),
        Row("Qwen", "Qwen-Base-SFT", "row:qwen_sft", (37.0, 49.5, 51.3, 42.5, 54.5, 51.3, 40.8, 46.4, 51.0, 50.1)),
        Row("Llama", "Llama-Instruct-RL", "row:llama_rl", (58.4, 64.8, 70.6, 55.0, 59.4, 61.2, 44.0, 50.4, 57.1, 58.2)),
        Row(
            "Llama", "Llama-Instruct-SFT", "row:llama_sft", (36.0, 47.0, 50.4, 38.0, 51.0, 48.3, 39.4, 46.6, 48.2, 48.2)
        ),
    ),
)
# by the reward of the answer
_ablation(
    5,
    (_QWEN,),
    (
        Row("Qwen", "EM", "row:em", (55.0, 62.0, 69.3, 29.0, 29.0, 30.0, 24.8, 28.0, 33.2, 39.7)),
        Row("Qwen", "CEM", "row:cover_em", (53.4, 65.0, 68.8, 51.8, 59.2, 61.7, 46.4, 54.4, 59.0, 59.5)),
        Row("Qwen", "F1", "row:f1", (58.0, 65.4, 71.9, 55.4, 63.6, 63.7, 45.6, 52.8, 57.7, 60.6)),
    ),
)
# by the training questions
_ablation(
    6,
    (_QWEN,),
    (
        Row("Qwen", "w/o Difficult", "row:no_difficult", (54.8, 61.8, 69.3, 55.4, 63.6, 63.7, 44.8, 51.2, 56.9, 58.8)),
        Row("Qwen", "w. Difficult", "row:difficult", (58.0, 65.4, 71.9, 54.8, 64.2, 63.8, 45.6, 52.8, 57.7, 60.8)),
    ),
)
_ablation(
    7,
    (_QWEN,),
    (
        Row("Qwen", "HotpotQA", "row:hotpotqa", (53.8, 59.2, 67.2, 46.7, 54.3, 54.7, 44.0, 50.4, 55.1, 54.6)),
        Row("Qwen", "2Wiki", "row:2wiki", (46.0, 50.5, 58.7, 45.0, 47.5, 48.2, 31.2, 32.8, 39.4, 43.6)),
        Row("Qwen", "Mixture", "row:mixture", (58.0, 65.4, 71.9, 55.4, 63.6, 63.7, 45.6, 52.8, 57.7, 60.6)),
    ),
)

_COMPARED = {
    2: "GRPO and Reinforce++",
    3: "answers rewarded by EM, CEM and F1",
    4: "training without and with difficult questions",
    5: "training on HotpotQA, 2Wiki and both",
}
for _number, _methods in OVER_TRAINING.items():
    PAPER_FIGURES.register(f"r1_searcher.figure{_number}")(
        PaperFigure(
            title=f"R1-Searcher, Figure {_number}",
            paper=_PAPER,
            shows=f"reward, response length and searches over the steps: {_COMPARED[_number]}",
            needs="a run for each key (--rows), or RUN (--workdir) and its controls; none need have ended",
            drawing=Drawing(
                recipe="r1_searcher",
                methods=_methods,
                draw=functools.partial(over_training, methods=_methods),
                over_training=True,
            ),
        )
    )
PAPER_FIGURES.register("r1_searcher.figure6")(
    PaperFigure(
        title="R1-Searcher, Figure 6",
        paper=_PAPER,
        shows="CEM on Bamboogle, searched locally and on the web, beside table 2's",
        needs=f"{COMPARED} on bamboogle with the local corpus, and one with config.knowledge=\"{{'text': {{'kind': 'web', "
        "'directory': 'kb/web'}}\" (docs/web.md), joined by config.compare_with",
        drawing=Drawing(
            recipe="r1_searcher",
            methods=(
                *(Method(row.method, row.agent) for row in _TABLE_2.rows if row.group == "GPT" and row.agent),
                Method("Search-o1", "search_o1"),
                Method("R1-Searcher", "recipe:r1_searcher"),
            ),
            draw=functools.partial(online, table=_TABLE_2),
        ),
    )
)
