"""2WikiMultihopQA (Ho et al., COLING 2020): two to four hops, with their evidence as triples."""

from __future__ import annotations

from routerl_jax.extras.comparison.benchmarks.benchmark import BENCHMARKS, Benchmark, get_pool
from routerl_jax.training.config import KnowledgeConfig

BENCHMARKS.register("2wikimultihopqa")(
    Benchmark(
        questions=(
            "2wikimultihopqa:2wikimultihopqa/dev.json*",
            "2wikimultihopqa/questions_dev.*",
            "2wikimultihopqa/dev.*",
        ),
        knowledge={"text": KnowledgeConfig(source="2wikimultihopqa/corpus.*")},
        about="two to four hops over the passages that come with the questions",
        paper="2011.01060",
        licence="Apache-2.0 (its repository)",
        get=(
            "2wikimultihopqa/dev.json and id_aliases.json are had at https://github.com/Alab-NII/2wikimultihop. "
            f"{get_pool('2wikimultihopqa/dev.json')}"
        ),
    )
)
