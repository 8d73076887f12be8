"""Qwen2.5-7B learns to search, on a TPU slice: R1-Searcher's setting (arXiv 2503.05592) with GRPO, answers scored by F1."""

import ml_collections

from configs.smollm2_search import PROMPT
from routerl_jax.core.config import to_config_dict
from routerl_jax.learning.learner import LossConfig
from routerl_jax.learning.optimizer import OptimizerConfig
from routerl_jax.training.config import (
    AgentConfig,
    CheckpointConfig,
    DataConfig,
    EngineConfig,
    EvaluationConfig,
    KnowledgeConfig,
    LearnerConfig,
    MeshConfig,
    ModelConfig,
    RolloutConfig,
    StageConfig,
    TrainConfig,
)


def get_config() -> ml_collections.ConfigDict:
    """64 questions x 16 attempts a step, conversations of up to 4,096 tokens, 4 updates a step.

    python -m launch.train --config=configs/search_qwen25_7b.py --distributed --workdir=/mnt/bucket/search_qwen25_7b \
        --config.data.train=questions.jsonl --config.knowledge.text.source=corpus.jsonl
    python -m launch.compile_check --config=configs/search_qwen25_7b.py --topology=v5e:16x16

    Questions and corpus as in configs/smollm2_search.py; the first 8,000 questions train, the next 128 validate, the next
    500 test. Sequence length, group size, batch and learning rate are the paper's; the advantage, the prompt and the
    encoder are not. It has been compiled for v5e:16x16 (docs/accelerators.md) and not been run: no step time, no result.
    Any slice whose chips are a multiple of 4 will do, if the compile check says that it fits.
    """
    return to_config_dict(search_run("Qwen/Qwen2.5-7B"))


def search_run(path: str) -> TrainConfig:
    """The run, with another model of that size if you like."""
    return TrainConfig(
        steps=125,
        model=ModelConfig(path=path, dtype="float32", compute_dtype="bfloat16"),
        # Four chips share the heads, as Qwen2.5-7B has 4 key/value heads; decoding reads every weight for each token.
        mesh=MeshConfig(data=1, fsdp=-1, tensor=4, layout="fsdp+tensor"),
        engine=EngineConfig(rows=1024, max_length=4096, segment=64, layout="tensor"),
        agent=AgentConfig(
            grammar="r1_searcher",
            max_searches=4,
            k=3,
            max_turn_tokens=512,
            answer_tokens=64,
            prompt=PROMPT,
            prompt_suffix="<think>",
        ),
        knowledge={"text": KnowledgeConfig(source="corpus.jsonl", kind="dense_text")},
        data=DataConfig(
            train="questions.jsonl",
            validation="",
            test="",
            train_range=(0, 8000),
            validation_range=(8000, 8128),
            test_range=(8128, 8628),
        ),
        rollout=RolloutConfig(examples=64, samples=16, temperature=1.0),
        stages={"main": StageConfig(reward={"f1": 1.0, "format": 0.2, "invalid_actions": -0.1})},
        learner=LearnerConfig(
            advantage="grpo",
            minibatches=4,
            loss=LossConfig(clip_low=0.2, clip_high=0.2, kl="k3", kl_coef=0.0001),
            optimizer=OptimizerConfig(lr=2e-6, weight_decay=0.0),
            # Short conversations share rows. One bucket compiles in a third of the time of three, and what attention computes
            # between conversations of a row in vain is no more than a twentieth of the work at 7 billion parameters.
            length_buckets=(4096,),
            micro_tokens=64 * 4096,  # on v5e:16x16 one long row for each group of four chips
            remat="full",
        ),
        evaluation=EvaluationConfig(every=25, examples=128, final_examples=0, normalizer="r1_searcher"),
        checkpoint=CheckpointConfig(every=25),
    )
