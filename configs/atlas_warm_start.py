"""Supervised training of the quickstart's initial policy."""

import ml_collections

from configs.common import ATLAS_KNOWLEDGE, ATLAS_POLICY
from routerl_jax.core.config import to_config_dict
from routerl_jax.training import config as schema


def get_config() -> ml_collections.ConfigDict:
    """Trains the policy that ships in routerl_jax/data/atlas/warm_start, from random weights.

    python -m launch.train --config=configs/atlas_warm_start.py --workdir=runs/atlas_warm_start
    """
    return to_config_dict(
        schema.TrainConfig(
            kind="sft",
            steps=2000,
            model=schema.ModelConfig(architecture=ATLAS_POLICY),
            mesh=schema.MeshConfig(cpu_devices=2),
            agent=schema.AgentConfig(grammar="r1_router", max_searches=3, k=2),
            knowledge=ATLAS_KNOWLEDGE,
            learner=schema.LearnerConfig(
                optimizer=schema.OptimizerConfig(
                    kind="muon", lr=8e-3, adam_lr=3e-3, schedule="cosine", warmup=50, decay_to=0.03, weight_decay=0.02
                ),
                length_buckets=(256, 512),
                micro_tokens=2048,
            ),
            evaluation=schema.EvaluationConfig(every=100),
            checkpoint=schema.CheckpointConfig(every=400),
            warm_start=schema.WarmStartConfig(
                examples=40, hit=0.6, persistence=0.8, drills=0.4, observation_weight=0.3
            ),
        )
    )
