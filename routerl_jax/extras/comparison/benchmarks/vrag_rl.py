"""VRAG-RL's three benchmarks (Wang et al., arXiv 2505.22019): questions over pages, as pictures or as text."""

from __future__ import annotations

from routerl_jax.extras.comparison.benchmarks.benchmark import BENCHMARKS, Benchmark
from routerl_jax.training.config import KnowledgeConfig

_COLQWEN = "vidore/colqwen2-v1.0-hf"
_POOL = (
    "VRAG-RL searches the pages of all three at once: link their documents into one directory, and name it as the pages of "
    "each. NAME_ocr has the same pages by their text, for policies that see none."
)

for _name, _files, _pages, _about, _paper, _licence, _had in (
    (
        "slidevqa",
        ("vidoseek:slidevqa/slidevqa_refined.json*", "slidevqa/annotations/qa/test.jsonl*", "slidevqa/test*.parquet"),
        "slidevqa/slidevqa_pdf_document|slidevqa/pages*",
        "one or two pages of slide decks",
        "2301.04883",
        "NTT's, for research (its repository)",
        "slidevqa/slidevqa_refined.json and slidevqa_pdf_document.zip, to be unpacked, are had at "
        "https://huggingface.co/datasets/autumncc/ViDoSeek; the original annotations/ at https://github.com/nttmdlab-nlp/SlideVQA.",
    ),
    (
        "vidoseek",
        ("vidoseek/vidoseek.json*", "vidoseek/questions_dev.*"),
        "vidoseek/vidoseek_pdf_document|vidoseek/pages.*",
        "questions that one page of all documents answers",
        "2502.18017",
        "Apache-2.0",
        "vidoseek/vidoseek.json and vidoseek_pdf_document.zip, to be unpacked, are had at "
        "https://huggingface.co/datasets/autumncc/ViDoSeek.",
    ),
    (
        "mmlongbench_doc",
        ("mmlongbench_doc/samples.json*", "mmlongbench_doc/questions_dev.*"),
        "mmlongbench_doc/documents|mmlongbench_doc/pages.*",
        "long documents: text, tables, charts, figures, and questions without an answer",
        "2407.01523",
        "CC BY-NC 4.0 (the data)",
        "mmlongbench_doc/samples.json and documents/ are data/ of https://github.com/mayubo2333/MMLongBench-Doc.",
    ),
):
    _pictures = KnowledgeConfig(source=_pages, kind="pages", encoder=_COLQWEN)
    _texts = KnowledgeConfig(source=_pages, kind="ocr", settings={"pages": {"text": "either"}})
    for _suffix, _knowledge, _by in (
        ("", {"pages": _pictures}, "over page images"),
        ("_ocr", {"text": _texts}, "over the pages' texts"),
    ):
        BENCHMARKS.register(f"{_name}{_suffix}")(
            Benchmark(
                questions=_files,
                knowledge=_knowledge,
                about=f"{_about}, {_by}",
                paper=_paper,
                licence=_licence,
                get=f"{_had} {_POOL}",
            )
        )
