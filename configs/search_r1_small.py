"""Search-R1 in minutes on one core: a small policy that seldom searches learns to search, from EM alone."""

import ml_collections

from routerl_jax.core.config import to_config_dict
from routerl_jax.recipes.search_r1 import REWARD
from routerl_jax.training import config as schema


def get_config() -> ml_collections.ConfigDict:
    """Warm start, then GRPO with exact match as the only reward, on Atlas with its knowledge bases as one.

    python -m launch.train --config=configs/search_r1_small.py --workdir=runs/search_r1_small

    All questions need a search. The warm start shows the protocol, but 70 of 100 demonstrations answer without a search.
    Its policy is the quickstart's packaged one, which can read.
    """
    return to_config_dict(
        schema.TrainConfig(
            recipe="search_r1",
            steps=24,
            model=schema.ModelConfig(path="atlas-warm-start"),
            mesh=schema.MeshConfig(cpu_devices=1),
            engine=schema.EngineConfig(rows=128, max_length=384),
            agent=schema.AgentConfig(max_searches=3, k=2),
            knowledge={"atlas": schema.KnowledgeConfig(source="atlas/all")},
            data=schema.DataConfig(
                train="atlas/train/single+multi",
                validation="atlas/validation/single+multi",
                test="atlas/test/single+multi",
            ),
            rollout=schema.RolloutConfig(examples=16, samples=8),
            stages={"main": schema.StageConfig(reward=dict(REWARD))},
            learner=schema.LearnerConfig(
                advantage="grpo",
                minibatches=4,
                loss=schema.LossConfig(clip_low=0.2, clip_high=0.2, kl="forward", kl_coef=0.02),
                optimizer=schema.OptimizerConfig(
                    lr=5e-4, schedule="linear", warmup=8, decay_to=0.2, weight_decay=0.0, b2=0.99
                ),
                length_buckets=(192, 384),
                micro_tokens=2048,
            ),
            evaluation=schema.EvaluationConfig(every=12, examples=64, final_examples=256, normalizer="search_r1"),
            checkpoint=schema.CheckpointConfig(every=12),
            warm_start=schema.WarmStartConfig(
                steps=200,
                optimizer=schema.OptimizerConfig(
                    lr=1e-3, schedule="cosine", warmup=20, decay_to=0.05, weight_decay=0.0
                ),
                examples=32,
                hit=0.95,
                persistence=0.0,
                direct=0.7,
            ),
        )
    )
