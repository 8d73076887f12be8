"""R1-Searcher (arXiv 2503.05592) with a mixture of experts, Qwen3-30B-A3B, on a TPU slice."""

import dataclasses

import ml_collections

from configs.r1_searcher_qwen25_7b import searcher_run
from routerl_jax.core.config import to_config_dict


def get_config() -> ml_collections.ConfigDict:
    """configs/r1_searcher_qwen25_7b.py with a model of 128 experts, of which a token takes 8, in its own chat template.

    python -m launch.train --config=configs/r1_searcher_qwen3_30b_a3b.py --distributed --workdir=/mnt/bucket/r1_searcher_30b \
        --config.knowledge.text.source=hpqa_corpus.tsv
    python -m launch.compile_check --config=configs/r1_searcher_qwen3_30b_a3b.py --topology=v5p:4x4x4

    The learner sends each token through the experts that the sampler chose, because its ratios drift otherwise, and keeps the
    experts' load even (docs/algorithms.md, Mixtures of experts). The paper has no such model.

    Compiled for v5p:4x4x4 (docs/accelerators.md), not run: no step time, no result. Four chips hold a copy of the weights while
    the engine works, 14.2 GiB each, so that a v5e (15.75 GiB) has no room for a cache.
    """
    run = searcher_run("Qwen/Qwen3-30B-A3B")
    return to_config_dict(
        dataclasses.replace(
            run,
            agent=dataclasses.replace(run.agent, prompt="", instruct=True),
            learner=dataclasses.replace(
                run.learner, replay_routing=True, loss=dataclasses.replace(run.learner.loss, balance_coef=0.001)
            ),
        )
    )
