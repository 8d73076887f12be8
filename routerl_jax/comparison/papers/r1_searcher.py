"""R1-Searcher's tables (Song et al., arXiv 2503.05592)."""

from __future__ import annotations

from routerl_jax.comparison.papers.table import PAPER_TABLES, Column, PaperTable, Row, Setting

_BENCHMARKS = (
    ("HotpotQA", "hotpotqa"),
    ("2Wiki", "2wikimultihopqa"),
    ("Bamboogle", "bamboogle"),
    ("Musique", "musique"),
)
# ACC_R is cover exact match (section 3.1), ACC_L a judge's verdict
_COLUMNS = tuple(
    Column(f"{said} {heading}", benchmark, metric)
    for said, benchmark in _BENCHMARKS
    for heading, metric in (("ACC_R", "cover_em"), ("ACC_L", "judge"))
)
_ROWS = (
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
    Row("GPT", "CR-Planner", "", (0.404, 0.416, 0.520, 0.478, 0.488, 0.524, 0.272, 0.262)),
    Row("GPT", "ReARTeR", "", (0.468, 0.506, 0.554, 0.534, 0.496, 0.544, 0.296, 0.302)),
    Row("Llama", "Naive Generation", "direct", (0.208, 0.268, 0.326, 0.254, 0.144, 0.168, 0.068, 0.096)),
    Row("Llama", "Standard RAG", "vanilla_rag", (0.334, 0.398, 0.336, 0.212, 0.168, 0.216, 0.104, 0.098)),
    Row("Llama", "SuRe", "sure", (0.266, 0.346, 0.122, 0.262, 0.160, 0.192, 0.106, 0.144)),
    Row("Llama", "REPLUG", "replug", (0.290, 0.348, 0.334, 0.204, 0.168, 0.232, 0.078, 0.090)),
    Row("Llama", "LongLLMLingua", "longllmlingua", (0.314, 0.382, 0.304, 0.294, 0.168, 0.216, 0.088, 0.100)),
    Row("Llama", "RECOMP", "recomp", (0.318, 0.380, 0.324, 0.322, 0.104, 0.160, 0.112, 0.126)),
    Row("Llama", "Selective-Context", "selective_context", (0.296, 0.358, 0.266, 0.204, 0.144, 0.200, 0.092, 0.104)),
    Row("Llama", "SKR", "skr", (0.300, 0.372, 0.336, 0.212, 0.176, 0.208, 0.100, 0.112)),
    Row("Llama", "Self-Ask", "self_ask", (0.316, 0.408, 0.306, 0.322, 0.360, 0.432, 0.222, 0.226)),
    Row("Llama", "Iter-RetGen", "iter_retgen", (0.302, 0.362, 0.310, 0.224, 0.144, 0.176, 0.084, 0.084)),
    Row("Llama", "IRCoT", "ircot", (0.210, 0.146, 0.338, 0.312, 0.120, 0.104, 0.060, 0.042)),
    Row("Llama", "CR-Planner", "", (0.332, 0.350, 0.420, 0.350, 0.304, 0.336, 0.144, 0.098)),
    Row("Llama", "ReARTeR", "", (0.424, 0.434, 0.470, 0.364, 0.438, 0.484, 0.244, 0.252)),
    Row("Llama", "Marco-o1", "", (0.352, 0.348, 0.442, 0.184, 0.224, 0.200, 0.134, 0.104)),
    Row("Llama", "Skywork-o1", "", (0.306, 0.256, 0.344, 0.190, 0.176, 0.160, 0.092, 0.060)),
    Row("Llama", "R1-Searcher", "recipe:r1_searcher", (0.648, 0.746, 0.594, 0.628, 0.504, 0.544, 0.254, 0.282)),
    Row("Qwen", "R1-Searcher", "recipe:r1_searcher", (0.654, 0.750, 0.636, 0.650, 0.528, 0.544, 0.282, 0.314)),
)

PAPER_TABLES.register("r1_searcher.table2")(
    PaperTable(
        title="R1-Searcher, Table 2",
        paper="2503.05592",
        columns=_COLUMNS,
        rows=_ROWS,
        policies={"GPT": "GPT-4o-mini", "Llama": "Llama-3.1-8B-Instruct", "Qwen": "Qwen-2.5-7B-Base"},
        corpus=Setting("corpus", "English Wikipedia of 2019 as KILT has it, 29 million passages of 100 words", "kilt"),
        retriever=Setting("retriever", "BGE-large-en-v1.5", "bge-large-en-v1.5"),
        questions="its released files have 500 of each, 125 of Bamboogle",
    )
)
