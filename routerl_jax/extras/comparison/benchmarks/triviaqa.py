"""TriviaQA (Joshi et al., ACL 2017), in FlashRAG's rows."""

from __future__ import annotations

from routerl_jax.extras.comparison.benchmarks.benchmark import BENCHMARKS, GET_WIKIPEDIA, WIKIPEDIA, Benchmark

BENCHMARKS.register("triviaqa")(
    Benchmark(
        questions=(
            "triviaqa/questions_dev.*",
            "triviaqa/test.*",
        ),
        knowledge={"text": WIKIPEDIA},
        about="trivia with many aliases, over Wikipedia",
        paper="1705.03551",
        licence="not stated for the questions",
        get=f"triviaqa/test.jsonl is had at https://huggingface.co/datasets/RUC-NLPIR/FlashRAG_datasets. {GET_WIKIPEDIA}",
    )
)
