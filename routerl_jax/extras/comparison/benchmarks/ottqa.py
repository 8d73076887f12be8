"""OTT-QA (Chen et al., ICLR 2021): HybridQA without the table given, over all tables and passages."""

from __future__ import annotations

from routerl_jax.extras.comparison.benchmarks.benchmark import BENCHMARKS, Benchmark
from routerl_jax.training.config import KnowledgeConfig

BENCHMARKS.register("ottqa")(
    Benchmark(
        questions=(
            "ottqa/dev.traced.json*",
            "ottqa/dev.json*",
            "ottqa/questions_dev.*",
        ),
        knowledge={
            "table": KnowledgeConfig(
                source="ottqa/all_plain_tables.json*|ottqa/traindev_tables_tok|ottqa/tables*", kind="dense_table"
            ),
            "text": KnowledgeConfig(source="ottqa/all_passages.json*|ottqa/traindev_request_tok|ottqa/corpus*"),
        },
        about="two hops over tables and passages, neither given",
        paper="2010.10439",
        licence="MIT",
        get=(
            "ottqa/dev.traced.json is released_data/ of https://github.com/wenhuchen/OTT-QA, whose README says where "
            "all_plain_tables.json (400,000 tables) and all_passages.json (five million) are had; its data/traindev_tables_tok "
            "and data/traindev_request_tok are those of the training and validation questions alone."
        ),
    )
)
