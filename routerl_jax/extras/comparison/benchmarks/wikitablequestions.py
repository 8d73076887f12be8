"""WikiTableQuestions (Pasupat and Liang, ACL 2015), with all its tables as one knowledge base."""

from __future__ import annotations

from routerl_jax.extras.comparison.benchmarks.benchmark import BENCHMARKS, GET_TABLES, Benchmark
from routerl_jax.training.config import KnowledgeConfig

BENCHMARKS.register("wikitablequestions")(
    Benchmark(
        questions=(
            "wikitablequestions/questions_dev.*",
            "wikitablequestions/test.*",
        ),
        knowledge={"table": KnowledgeConfig(source="wikitablequestions/tables.*", kind="dense_table")},
        about="questions to tables of Wikipedia, the right one not given",
        paper="1508.00305",
        licence="CC BY-SA 4.0",
        get=(
            "Questions and tables are had at https://github.com/ppasupat/WikiTableQuestions; write questions as FlashRAG's "
            "rows (wikitablequestions/test.jsonl), and tables (wikitablequestions/tables.jsonl.gz) as "
            f"{GET_TABLES}"
        ),
    )
)
