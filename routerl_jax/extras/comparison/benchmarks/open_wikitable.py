"""Open-WikiTable (Kweon et al., Findings of ACL 2023): questions over all tables of WikiSQL and WikiTableQuestions."""

from __future__ import annotations

from routerl_jax.extras.comparison.benchmarks.benchmark import BENCHMARKS, GET_SPLIT_TABLES, SPLIT_TABLES, Benchmark

BENCHMARKS.register("open_wikitable")(
    Benchmark(
        questions=(
            "open_wikitable/test.json*",
            "open_wikitable/openwikitqa_val.jsonl*",
            "open_wikitable/questions_dev.*",
        ),
        knowledge={"table": SPLIT_TABLES},
        about="look-ups, comparisons and sums over tables, the right one not given",
        paper="2305.07288",
        licence="not stated; its tables are Wikipedia's (CC BY-SA)",
        get=f"open_wikitable/test.json and its tables come together: {GET_SPLIT_TABLES}",
    )
)
