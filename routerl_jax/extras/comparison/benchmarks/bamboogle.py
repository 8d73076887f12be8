"""Bamboogle (Press et al., arXiv 2210.03350): 125 questions of two hops that a search engine does not answer."""

from __future__ import annotations

from routerl_jax.extras.comparison.benchmarks.benchmark import BENCHMARKS, GET_WIKIPEDIA, WIKIPEDIA, Benchmark

BENCHMARKS.register("bamboogle")(
    Benchmark(
        questions=(
            "bamboogle/bamboogle.*",
            "bamboogle/questions_dev.*",
            "bamboogle/test.*",
        ),
        knowledge={"text": WIKIPEDIA},
        about="125 questions of two hops that no single page answers, over Wikipedia",
        paper="2210.03350",
        licence="not stated",
        get=f"bamboogle/bamboogle.csv is linked from https://github.com/ofirpress/self-ask. {GET_WIKIPEDIA}",
    )
)
