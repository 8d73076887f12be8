"""Search-R1 (arXiv 2503.09516) with Qwen2.5-3B and GRPO, with the paper's settings, on a TPU slice."""

import dataclasses

import ml_collections

from routerl_jax.core.config import to_config_dict
from routerl_jax.recipes import search_r1
from routerl_jax.training import config as schema

STEPS = 500
UPDATES = 10  # per step: 2,560 episodes in mini-batches of 256


def get_config(variant: str = "") -> ml_collections.ConfigDict:
    """512 questions x 5 attempts per step, 10 updates per step, 500 steps. A server does the retrieval.

    python -m launch.serve_kb --kb=wiki=kb/wiki18 --port=8000      # E5-base-v2, or Search-R1's own server
    python -m launch.train --config=configs/search_r1_qwen25_3b.py --distributed --workdir=/mnt/bucket/search_r1 \
        --config.data.train=train.parquet --config.data.test=test.parquet
    python -m launch.compile_check --config=configs/search_r1_qwen25_3b.py --topology=v5e:8x8

    Questions: Search-R1's nq_hotpotqa_train (train.parquet, test.parquet), rows of verl. Retrieval: any server that answers
    `POST /retrieve` at config.knowledge.wiki.source. If that is a corpus file, a knowledge base is built with E5-base-v2. The
    first 128 test questions are used for validation, and config.evaluation.final_examples of them for the final table.
    Compiled for v5e:8x8 (docs/accelerators.md), not run: no step time, no result.

    `:tool_calls` is not the paper's: the instruct model searches by JSON tool calls in its own chat template.
    """
    if variant not in ("", "tool_calls"):
        raise ValueError(f"variant {variant!r} of the configuration: expected none, or tool_calls")
    run = _paper()
    return to_config_dict(_tool_calls(run) if variant else run)


def _tool_calls(run: schema.TrainConfig) -> schema.TrainConfig:
    return dataclasses.replace(
        run,
        model=dataclasses.replace(run.model, path="Qwen/Qwen2.5-3B-Instruct"),
        agent=dataclasses.replace(run.agent, grammar="tool_calls"),
        knowledge={
            "wiki": dataclasses.replace(run.knowledge["wiki"], description="English Wikipedia of December 2018.")
        },
    )


def _paper() -> schema.TrainConfig:
    return schema.TrainConfig(
        recipe="search_r1",
        steps=STEPS,
        model=schema.ModelConfig(path="Qwen/Qwen2.5-3B", dtype="float32", compute_dtype="bfloat16"),
        # Qwen2.5-3B has 2 key/value heads: two chips share them.
        mesh=schema.MeshConfig(data=1, fsdp=-1, tensor=2, layout="fsdp+tensor"),
        engine=schema.EngineConfig(rows=1024, max_length=4096, segment=64, layout="tensor"),
        agent=schema.AgentConfig(
            max_searches=search_r1.MAX_SEARCHES,
            k=search_r1.PASSAGES,
            max_turn_tokens=500,
            max_observation_tokens=500,
            answer_tokens=64,
            instruct=True,
        ),
        knowledge={
            "wiki": schema.KnowledgeConfig(
                source="http://127.0.0.1:8000/retrieve", encoder="intfloat/e5-base-v2", index="exact"
            )
        },
        # The paper validates on test questions, and some of them stand in the training set (launch.check_data).
        data=schema.DataConfig(train="train.parquet", validation="test.parquet", test="test.parquet", overlap="warn"),
        rollout=schema.RolloutConfig(examples=512, samples=5, temperature=1.0),
        stages={"main": schema.StageConfig(reward=dict(search_r1.REWARD))},
        learner=schema.LearnerConfig(
            advantage="grpo",
            drop_no_signal=False,
            minibatches=UPDATES,
            loss=schema.LossConfig(clip_low=0.2, clip_high=0.2, kl="k3", kl_coef=0.001, entropy_coef=0.001),
            optimizer=schema.OptimizerConfig(
                lr=1e-6, warmup=round(0.285 * STEPS * UPDATES), weight_decay=0.01, b2=0.999
            ),
            length_buckets=(4096,),
            micro_tokens=64 * 4096,
            remat="full",
        ),
        evaluation=schema.EvaluationConfig(every=50, examples=128, final_examples=2000, normalizer="search_r1"),
        checkpoint=schema.CheckpointConfig(every=50),
    )
