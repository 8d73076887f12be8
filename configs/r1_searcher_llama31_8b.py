"""R1-Searcher (arXiv 2503.05592) on Llama-3.1-8B-Instruct, with the settings of its released scripts."""

import dataclasses

import ml_collections

from configs.r1_searcher_qwen25_7b import searcher_run
from routerl_jax.core.config import to_config_dict
from routerl_jax.recipes.r1_searcher import LLAMA_STAGE_1, LLAMA_STAGE_2
from routerl_jax.training.config import StageConfig

# One pass over 350 questions, 15 a step, and over 8,148, 65 a step.
STAGE_1_STEPS, STAGE_2_STEPS = 23, 125


def get_config(variant: str = "released") -> ml_collections.ConfigDict:
    """As configs/r1_searcher_qwen25_7b.py but for the model, its prompt, the KL, the stages and their batches.

    python -m launch.train --config=configs/r1_searcher_llama31_8b.py --distributed --workdir=/mnt/bucket/r1_searcher_llama \
        --config.knowledge.text.source=hpqa_corpus.tsv
    python -m launch.compile_check --config=configs/r1_searcher_llama31_8b.py --topology=v5e:16x16

    Each script is a run of its own: in stage 2 the KL is to the policy of stage 1, and Adam's moments are new. They
    differ from the paper: stage 1 rewards the answer too and divides by the group's standard deviation, stage
    2's penalty is 1 and spares the answer's wording. For the paper's stages take STAGE_1 and STAGE_2. `:grpo` after the
    configuration's path takes GRPO's advantage in both stages (the comparison of the paper's table 3).

    Compiled for v5e:16x16 (docs/accelerators.md), not run. The weights need Meta's licence: give the directory you
    downloaded, --config.model.path=DIR.
    """
    if variant not in ("released", "grpo"):
        raise ValueError(f"variant {variant!r} of the configuration is neither 'released' nor 'grpo'")
    run = searcher_run("meta-llama/Llama-3.1-8B-Instruct", "grpo" if variant == "grpo" else "f1")
    run = dataclasses.replace(
        run,
        steps=STAGE_1_STEPS + STAGE_2_STEPS,
        agent=dataclasses.replace(run.agent, prompt="", instruct=True),
        rollout=dataclasses.replace(run.rollout, examples=65),
        stages={
            "stage1": StageConfig(
                start=0,
                reward=LLAMA_STAGE_1,
                data={"train": "stage_1.jsonl"},
                rollout={"examples": 15},
                learner={"advantage": "grpo"},
            ),
            "stage2": StageConfig(start=STAGE_1_STEPS, reward=LLAMA_STAGE_2, restart=True),
        },
        learner=dataclasses.replace(run.learner, reward_kl_coef=1e-4, reward_kl="token"),
    )
    return to_config_dict(run)
