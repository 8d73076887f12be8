"""R1-Searcher (arXiv 2503.05592) on Llama-3.1-8B-Instruct, with the settings of its released scripts."""

import dataclasses

import ml_collections

from configs.r1_searcher_qwen25_7b import searcher_run
from routerl_jax.core.config import to_config_dict
from routerl_jax.recipes.r1_searcher import LLAMA_STAGE_1, LLAMA_STAGE_2
from routerl_jax.training import config as schema


def get_config(variant: str = "released") -> ml_collections.ConfigDict:
    """Like configs/r1_searcher_qwen25_7b.py, except for the model, its prompt, the KL, the stages and their batches.

    python -m launch.train --config=configs/r1_searcher_llama31_8b.py --distributed --workdir=/mnt/bucket/r1_searcher_llama \
        --config.knowledge.text.source=hpqa_corpus.tsv
    python -m launch.compile_check --config=configs/r1_searcher_llama31_8b.py --topology=v5e:16x16

    Each script is a run of its own: in stage 2, the KL is to the policy of stage 1, and Adam's moments are new. The scripts
    differ from the paper: stage 1 also rewards the answer and divides by the group's standard deviation; stage 2's penalty is 1
    and ignores the wording of the answer; steps have 15 and 65 questions.

    `:paper` after the configuration's path uses the paper's stages, with 64 questions in both, as one run. `:grpo` uses the
    scripts with GRPO's advantage in both stages (the comparison of the paper's table 3).

    Compiled for v5e:16x16 (docs/accelerators.md), not run. The weights need Meta's licence: give the directory that you
    downloaded, --config.model.path=DIR.
    """
    if variant not in ("released", "paper", "grpo"):
        raise ValueError(f"variant {variant!r} of the configuration: expected released, paper or grpo")
    run = searcher_run("meta-llama/Llama-3.1-8B-Instruct", "grpo" if variant == "grpo" else "paper")
    run = dataclasses.replace(
        run,
        agent=dataclasses.replace(run.agent, prompt="", instruct=True),
        learner=dataclasses.replace(run.learner, reward_kl_coef=1e-4, reward_kl="token"),
    )
    return to_config_dict(run if variant == "paper" else _released(run))


def _released(run: schema.TrainConfig) -> schema.TrainConfig:
    return dataclasses.replace(
        run,
        rollout=dataclasses.replace(run.rollout, examples=65),
        stages={
            "stage1": schema.StageConfig(
                start=0,
                reward=LLAMA_STAGE_1,
                data={"train": "stage_1.jsonl"},
                rollout={"examples": 15},
                learner={"advantage": "grpo"},
            ),
            "stage2": schema.StageConfig(after="stage1", reward=LLAMA_STAGE_2, restart=True),
        },
    )
