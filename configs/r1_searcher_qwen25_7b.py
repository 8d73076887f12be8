"""R1-Searcher (arXiv 2503.05592) on Qwen2.5-7B, a base model, with the paper's settings."""

import dataclasses

import ml_collections

from routerl_jax.core.config import to_config_dict
from routerl_jax.recipes.r1_searcher import (
    BASE_PROMPT,
    EVALUATION_K,
    MAX_SEARCHES,
    PROMPT_SUFFIX,
    RELEASED_STAGE_2,
    STAGE_1,
    TRAIN_K,
    stage_2,
)
from routerl_jax.rewards.metrics import ANSWER_METRICS
from routerl_jax.training import config as schema

VARIANTS = ("paper", "released", "grpo", *ANSWER_METRICS)


def get_config(variant: str = "paper") -> ml_collections.ConfigDict:
    """REINFORCE++-baseline, 64 questions x 16 attempts, 4 updates a step, no KL; stage 1, then stage 2, one pass each.

    python -m launch.train --config=configs/r1_searcher_qwen25_7b.py --distributed --workdir=/mnt/bucket/r1_searcher_qwen25_7b \
        --config.knowledge.text.source=hpqa_corpus.tsv
    python -m launch.compile_check --config=configs/r1_searcher_qwen25_7b.py --topology=v5e:16x16

    Variants after the configuration's path: `:em` or `:cover_em` rewards the answer by that metric instead of F1 (the paper's
    table 5); `:grpo` uses GRPO's advantage (table 3, on Llama); `:released` follows the only script for Qwen, which has stage 2
    alone, with its server's format rules.

    Data: the authors' stage_1.jsonl, stage_2.jsonl and eval_set/ (github.com/RUCAIBox/R1-Searcher, data/) in the working
    directory, and their table of HotpotQA's abstracts. The 63 answers of stage 2 with more than ten words earn the penalty.

    Compiled for v5e:16x16 (docs/accelerators.md), not run: no step time, no result. Any slice works whose number of chips is a
    multiple of 4, if the compile check says that it fits.
    """
    if variant not in VARIANTS:
        raise ValueError(f"variant {variant!r} of the configuration: expected one of {', '.join(VARIANTS)}")
    if variant != "released":
        return to_config_dict(searcher_run("Qwen/Qwen2.5-7B", variant))
    run = searcher_run("Qwen/Qwen2.5-7B")
    return to_config_dict(dataclasses.replace(run, stages={"stage2": schema.StageConfig(reward=RELEASED_STAGE_2)}))


def searcher_run(path: str, variant: str = "paper") -> schema.TrainConfig:
    """The run with any model of this size. `variant`: "paper", "grpo", or another metric of the answer."""
    grpo = variant == "grpo"
    return schema.TrainConfig(
        recipe="r1_searcher",
        steps=0,  # one pass in each stage: 6 and 128 steps over 350 and 8,148 questions
        model=schema.ModelConfig(path=path, dtype="float32", compute_dtype="bfloat16"),
        # Four chips share the heads, because Qwen2.5-7B has 4 key/value heads; decoding reads every weight for each token.
        mesh=schema.MeshConfig(data=1, fsdp=-1, tensor=4, layout="fsdp+tensor"),
        engine=schema.EngineConfig(rows=1024, max_length=4096, segment=64, layout="tensor"),
        agent=schema.AgentConfig(
            max_searches=MAX_SEARCHES,
            k=TRAIN_K,
            on_invalid="end",  # as in the released rollout
            max_turn_tokens=512,
            answer_tokens=512,  # the last turn may think before it answers
            prompt=BASE_PROMPT,
            prompt_suffix=PROMPT_SUFFIX,
        ),
        knowledge={
            "text": schema.KnowledgeConfig(source="corpus.jsonl", kind="dense_text", encoder="BAAI/bge-large-en-v1.5")
        },
        data=schema.DataConfig(
            train="stage_2.jsonl",
            epochs=1,
            validation="2wiki_500.jsonl",
            test="hotpotqa_500.jsonl",
        ),
        rollout=schema.RolloutConfig(examples=64, samples=16, temperature=1.0, top_p=0.95),
        stages={
            "stage1": schema.StageConfig(start=0, reward=STAGE_1, data={"train": "stage_1.jsonl"}),
            "stage2": schema.StageConfig(
                after="stage1", reward=stage_2("f1" if variant in ("paper", "grpo") else variant)
            ),
        },
        learner=schema.LearnerConfig(
            advantage="grpo" if grpo else "reinforce_pp_baseline",
            drop_no_signal=False,  # the released code whitens over groups of equal rewards, and trains on them
            minibatches=4,
            aggregation="sequence",
            loss=schema.LossConfig(clip_low=0.2, clip_high=0.2),
            optimizer=schema.OptimizerConfig(lr=2e-6, weight_decay=0.0),
            # Short conversations share rows. One bucket compiles in a third of the time of three. Attention between
            # conversations of a row is wasted, but is at most a twentieth of the work at 7 billion parameters.
            length_buckets=(4096,),
            micro_tokens=64 * 4096,  # on v5e:16x16 one long row for each group of four chips
            remat="full",
        ),
        evaluation=schema.EvaluationConfig(
            every=20, examples=128, final_examples=-1, k=EVALUATION_K, normalizer="r1_searcher"
        ),
        checkpoint=schema.CheckpointConfig(every=20),
    )
