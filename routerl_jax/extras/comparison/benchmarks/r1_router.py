"""R1-Router's six benchmarks (Peng et al., arXiv 2505.22095), each over its three knowledge bases at once."""

from __future__ import annotations

from collections.abc import Mapping

from routerl_jax.extras.comparison.benchmarks.benchmark import (
    BENCHMARKS,
    GET_M_BEIR,
    GET_SPLIT_TABLES,
    GET_WIKIPEDIA,
    M_BEIR,
    SPLIT_TABLES,
    WIKIPEDIA,
    Benchmark,
)

# The names that recipes.r1_router uses, so that its policies find them.
KNOWLEDGE = {"text": WIKIPEDIA, "text_image": M_BEIR, "table": SPLIT_TABLES}
_FILES = "datasets/ of https://github.com/OpenBMB/R1-Router"
# per benchmark: its file there, files of the benchmark's own directory, description, licence
_SETS: Mapping[str, tuple[str, tuple[str, ...], str, str]] = {
    "2wiki": ("2wikimultihopqa_val.jsonl", (), "2WikiMultihopQA, the first 3,000 of its validation", "Apache-2.0"),
    "open_wikitable": ("openwikitqa_val.jsonl", (), "Open-WikiTable", "not stated"),
    "tabfact": ("tabfact_val.jsonl", (), "TabFact's statements as questions, answered yes or no", "MIT"),
    "infoseek": ("infoseek_val.jsonl", ("infoseek/infoseek_val.jsonl*",), "InfoSeek", "Apache-2.0"),
    "dyn_vqa": ("DynVQA_en.202412.jsonl", ("dyn_vqa/DynVQA_en.202412.jsonl*",), "Dyn-VQA in English", "not stated"),
    "webqa": ("webqa_val.jsonl", ("webqa/webqa_val.jsonl*",), "WebQA's questions that pictures answer", "CC0"),
}
_SEEN = ("infoseek", "dyn_vqa", "webqa")

for _name, (_file, _others, _about, _licence) in _SETS.items():
    _pictures = f" Pictures lie beside it in images/ (--benchmarks=help, {_name})." if _name in _SEEN else ""
    BENCHMARKS.register(f"r1_router_{_name}")(
        Benchmark(
            questions=(f"r1_router/{_file}*", *_others),
            knowledge=KNOWLEDGE,
            pictures=_name in _SEEN,
            about=f"{_about}, as R1-Router asks it: over text, pictures with captions, and tables",
            paper="2505.22095",
            licence=f"{_licence}; the selection's is not stated",
            get=f"r1_router/{_file} is {_FILES}.{_pictures} {GET_WIKIPEDIA} {GET_M_BEIR} {GET_SPLIT_TABLES}",
        )
    )
