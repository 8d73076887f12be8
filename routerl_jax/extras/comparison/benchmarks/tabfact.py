"""TabFact (Chen et al., ICLR 2020) as questions: is the statement right by the tables? yes or no."""

from __future__ import annotations

from routerl_jax.extras.comparison.benchmarks.benchmark import BENCHMARKS, GET_TABLES, Benchmark
from routerl_jax.training.config import KnowledgeConfig

BENCHMARKS.register("tabfact")(
    Benchmark(
        questions=(
            "tabfact/questions_dev.*",
            "tabfact/test.*",
        ),
        knowledge={"table": KnowledgeConfig(source="tabfact/tables.*", kind="dense_table")},
        about="statements that tables of Wikipedia entail (yes) or refute (no)",
        paper="1909.02164",
        licence="MIT (its repository)",
        get=(
            "Statements and tables are had at https://github.com/wenhuchen/Table-Fact-Checking; write statements as FlashRAG's "
            "rows with the answers yes and no (tabfact/test.jsonl), and tables (tabfact/tables.jsonl.gz) as "
            f"{GET_TABLES}"
        ),
    )
)
