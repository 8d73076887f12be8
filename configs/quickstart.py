"""The main job in minutes on a laptop: a small policy learns where to look."""

import ml_collections

from configs.common import ATLAS_KNOWLEDGE
from routerl_jax.core.config import to_config_dict
from routerl_jax.training import config as schema

REWARD = {"em": 1.0, "format": 0.1, "searches": -0.05}


def get_config() -> ml_collections.ConfigDict:
    """GRPO with multi-turn tool calls on Atlas, from the shipped warm start.

    python -m launch.train --config=configs/quickstart.py --workdir=runs/quickstart
    """
    return to_config_dict(
        schema.TrainConfig(
            steps=140,
            model=schema.ModelConfig(path="atlas-warm-start"),
            mesh=schema.MeshConfig(cpu_devices=2),
            engine=schema.EngineConfig(rows=128, max_length=512),
            agent=schema.AgentConfig(grammar="r1_router", max_searches=2, k=2),
            knowledge=ATLAS_KNOWLEDGE,
            rollout=schema.RolloutConfig(examples=16, samples=8),
            stages={"main": schema.StageConfig(reward=REWARD)},
            learner=schema.LearnerConfig(
                advantage="batch_std",  # groups that differ only in search costs must not weigh as much as others
                minibatches=4,
                # forward: the policy recovers choices that it has given up (docs/architecture.md)
                loss=schema.LossConfig(clip_low=0.2, clip_high=0.28, kl="forward", kl_coef=0.15, min_entropy=0.05),
                optimizer=schema.OptimizerConfig(
                    lr=8e-4, schedule="linear", warmup=12, decay_to=0.1, weight_decay=0.0, b2=0.99
                ),
                length_buckets=(256, 512),
                micro_tokens=2048,
            ),
            evaluation=schema.EvaluationConfig(every=20, examples=128, final_examples=512),
            checkpoint=schema.CheckpointConfig(every=20),
            watch=schema.WatchConfig(most={**schema.WatchConfig().most, "rollout/repeated_search_rate": 0.7}),
        )
    )
