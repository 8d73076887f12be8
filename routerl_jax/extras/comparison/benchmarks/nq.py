"""Natural Questions, short answers (Kwiatkowski et al., TACL 2019), in FlashRAG's rows."""

from __future__ import annotations

from routerl_jax.extras.comparison.benchmarks.benchmark import BENCHMARKS, GET_WIKIPEDIA, WIKIPEDIA, Benchmark

BENCHMARKS.register("nq")(
    Benchmark(
        questions=(
            "nq/questions_dev.*",
            "nq/test.*",
        ),
        knowledge={"text": WIKIPEDIA},
        about="questions to a search engine with short answers, over Wikipedia",
        paper="",
        licence="CC BY-SA 3.0",
        get=f"nq/test.jsonl is had at https://huggingface.co/datasets/RUC-NLPIR/FlashRAG_datasets. {GET_WIKIPEDIA}",
    )
)
