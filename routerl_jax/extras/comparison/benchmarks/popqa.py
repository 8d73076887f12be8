"""PopQA (Mallen et al., ACL 2023): one fact each, about things of all degrees of fame."""

from __future__ import annotations

from routerl_jax.extras.comparison.benchmarks.benchmark import BENCHMARKS, Benchmark, get_pool
from routerl_jax.training.config import KnowledgeConfig

BENCHMARKS.register("popqa")(
    Benchmark(
        questions=(
            "popqa/popQA.tsv",
            "popqa/popqa.json*",
            "popqa/questions_dev.*",
            "popqa/test.*",
        ),
        knowledge={"text": KnowledgeConfig(source="popqa/corpus.*")},
        about="one fact each, about things of all degrees of fame",
        paper="2212.10511",
        licence="MIT",
        get=(
            "popqa/popQA.tsv is had at https://github.com/AlexTMallen/adaptive-retrieval, HippoRAG 2's thousand of them with "
            "passages (popqa.json) at https://huggingface.co/datasets/osunlp/HippoRAG_2. "
            f"{get_pool('popqa/popqa.json')}"
        ),
    )
)
