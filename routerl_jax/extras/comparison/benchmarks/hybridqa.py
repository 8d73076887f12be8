"""HybridQA (Chen et al., Findings of EMNLP 2020): a table and the pages that its cells link to."""

from __future__ import annotations

from routerl_jax.extras.comparison.benchmarks.benchmark import BENCHMARKS, Benchmark
from routerl_jax.training.config import KnowledgeConfig

BENCHMARKS.register("hybridqa")(
    Benchmark(
        questions=(
            "hybridqa/dev.traced.json*",
            "hybridqa/dev.json*",
            "hybridqa/questions_dev.*",
        ),
        knowledge={
            "table": KnowledgeConfig(
                source="hybridqa/WikiTables-WithLinks/tables_tok|hybridqa/tables*|ottqa/tables*", kind="dense_table"
            ),
            "text": KnowledgeConfig(source="hybridqa/WikiTables-WithLinks/request_tok|hybridqa/corpus*"),
        },
        about="answers in tables and in the pages that they link to; here neither is given",
        paper="2004.07347",
        licence="MIT",
        get=(
            "hybridqa/dev.traced.json is released_data/ of https://github.com/wenhuchen/HybridQA; clone "
            "https://github.com/wenhuchen/WikiTables-WithLinks into hybridqa/. Its questions were written beside their table: "
            "ottqa's stand alone."
        ),
    )
)
