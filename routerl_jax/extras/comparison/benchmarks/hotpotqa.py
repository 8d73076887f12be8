"""HotpotQA (Yang et al., EMNLP 2018): two hops over the first paragraphs of Wikipedia."""

from __future__ import annotations

from routerl_jax.extras.comparison.benchmarks.benchmark import BENCHMARKS, Benchmark, get_pool
from routerl_jax.training.config import KnowledgeConfig

BENCHMARKS.register("hotpotqa")(
    Benchmark(
        questions=(
            "hotpotqa/hotpot_dev_distractor_v1.json*",
            "hotpotqa/questions_dev.*",
            "hotpotqa/dev.*",
        ),
        knowledge={"text": KnowledgeConfig(source="hotpotqa/corpus.*")},
        about="two hops, bridges and comparisons, over the passages that come with the questions",
        paper="1809.09600",
        licence="CC BY-SA 4.0",
        get=(
            "hotpotqa/hotpot_dev_distractor_v1.json is had at http://curtis.ml.cmu.edu/datasets/hotpot/. "
            f"{get_pool('hotpotqa/hotpot_dev_distractor_v1.json')}"
        ),
    )
)
