"""MuSiQue-Answerable (Trivedi et al., TACL 2022): two to four hops that can't be skipped."""

from __future__ import annotations

from routerl_jax.extras.comparison.benchmarks.benchmark import BENCHMARKS, Benchmark, get_pool
from routerl_jax.training.config import KnowledgeConfig

BENCHMARKS.register("musique")(
    Benchmark(
        questions=(
            "musique/musique_ans_v1.0_dev.jsonl*",
            "musique/questions_dev.*",
            "musique/dev.*",
        ),
        knowledge={"text": KnowledgeConfig(source="musique/corpus.*")},
        about="two to four hops that can't be skipped, over the paragraphs that come with the questions",
        paper="2108.00573",
        licence="CC BY 4.0",
        get=(
            "musique/musique_ans_v1.0_dev.jsonl is had at https://github.com/StonyBrookNLP/musique. "
            f"{get_pool('musique/musique_ans_v1.0_dev.jsonl')}"
        ),
    )
)
