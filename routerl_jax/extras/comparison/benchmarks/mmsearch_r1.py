"""MMSearch-R1's five benchmarks (Wu et al., arXiv 2506.20670), with an image search and a text search."""

from __future__ import annotations

from routerl_jax.extras.comparison.benchmarks.benchmark import BENCHMARKS, GET_WIKIPEDIA, WIKIPEDIA, Benchmark
from routerl_jax.training.config import KnowledgeConfig


def _knowledge(directory: str) -> dict[str, KnowledgeConfig]:
    """The image search and the text search, with the tool names of recipes.mmsearch_r1."""
    return {
        "image": KnowledgeConfig(
            source=f"{directory}/image_search*|image_search*",
            kind="reverse_image",
            encoder="openai/clip-vit-large-patch14",
        ),
        "text": KnowledgeConfig(source=f"{directory}/text_search*|text_search*|{WIKIPEDIA.source}"),
    }


def _get(directory: str) -> str:
    return (
        f"{directory}/image_search (or image_search for all of them) is the picture search: rows {{id, title, image}} in "
        "image_search.jsonl, or, as in the paper, a knowledge base of the web (docs/web.md: mode 'image', with a snapshot to "
        "measure on), which is opened as it is; text_search likewise, else Wikipedia. "
        f"{GET_WIKIPEDIA}"
    )


for _name, _files, _about, _paper, _licence, _had in (
    (
        "fvqa",
        ("fvqa/fvqa_test.parquet", "fvqa/questions_dev.*"),
        "FVQA's test questions, some of which take no search",
        "2506.20670",
        "see its page on the hub",
        "fvqa/fvqa_test.parquet is had at https://huggingface.co/datasets/lmms-lab/FVQA.",
    ),
    (
        "mmsearch",
        ("mmsearch/end2end.parquet",),
        "recent news and rare knowledge: the 171 of its 300 questions that show a picture",
        "2409.12959",
        "see its page on the hub",
        "mmsearch/end2end.parquet is had at https://huggingface.co/datasets/CaraJ7/MMSearch.",
    ),
    (
        "simplevqa",
        ("simplevqa/*.parquet", "simplevqa/*.jsonl*"),
        "facts about pictures, in English and Chinese",
        "2502.13059",
        "see its page on the hub",
        "Its one file in simplevqa/ is had at https://huggingface.co/datasets/m-a-p/SimpleVQA; MMSearch-R1 asks the English.",
    ),
    (
        "livevqa",
        ("livevqa/qa.json*", "livevqa/News/benchmark.json*", "livevqa/questions_dev.*"),
        "recent news: what a picture shows, and what is to be searched for about it",
        "2504.05288",
        "MIT (its repository); the pictures' owners keep their rights",
        "livevqa/qa.json is had at https://huggingface.co/datasets/ONE-Lab/LiveVQA-Research-Preview, livevqa/News/ of the "
        "later version in liveVQA_benchmarks/ of https://github.com/fumingyang2004/LIVEVQA.",
    ),
    (
        "infoseek_image_search",
        ("infoseek/infoseek_val.jsonl*", "infoseek/questions_dev.*"),
        "InfoSeek as MMSearch-R1 asks it: with a picture search in the place of M-BEIR",
        "2506.20670",
        "Apache-2.0 (its repository); the pictures are OVEN's",
        "The questions are infoseek's. MMSearch-R1 draws 2,000 of them, which are not published.",
    ),
):
    _directory = "infoseek" if _name.startswith("infoseek") else _name
    BENCHMARKS.register(_name)(
        Benchmark(
            questions=_files,
            knowledge=_knowledge(_directory),
            pictures=True,
            about=_about,
            paper=_paper,
            licence=_licence,
            get=f"{_had} {_get(_directory)}",
        )
    )
