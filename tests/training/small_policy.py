"""A run of two layers for the compile check; also a file for --config."""

from __future__ import annotations

import ml_collections

from routerl_jax.core.config import to_config_dict
from routerl_jax.learning.losses import LossConfig
from routerl_jax.training.config import (
    EngineConfig,
    KnowledgeConfig,
    LearnerConfig,
    MeshConfig,
    ModelConfig,
    RolloutConfig,
    TrainConfig,
)

ARCHITECTURE = {
    "model_type": "qwen2",
    "vocab_size": 1024,
    "embed": 512,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 128,
    "mlp": 1280,
    "max_length": 1024,
    "qkv_bias": True,
}


def small_policy(layout: str = "tensor") -> TrainConfig:
    """For four chips, two of which share the heads. `layout`: of the engine's weights."""
    return TrainConfig(
        model=ModelConfig(architecture=ARCHITECTURE, dtype="float32", compute_dtype="bfloat16"),
        mesh=MeshConfig(data=1, fsdp=2, tensor=2, layout="fsdp+tensor"),
        engine=EngineConfig(rows=16, max_length=256, segment=4, layout=layout),
        knowledge={"text": KnowledgeConfig(source="corpus.jsonl")},
        rollout=RolloutConfig(examples=4, samples=4),
        learner=LearnerConfig(micro_tokens=1024, remat="full", loss=LossConfig(kl_coef=0.1)),
    )


def get_config() -> ml_collections.ConfigDict:
    return to_config_dict(small_policy())
