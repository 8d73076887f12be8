"""A small vision policy: its tower reads flags and figures, and it knows facts about sixty countries."""

from __future__ import annotations

import dataclasses

import ml_collections

from configs.common import ATLAS_KNOWLEDGE
from routerl_jax.agents.agent import Agent
from routerl_jax.core.config import to_config_dict
from routerl_jax.training import config as schema
from routerl_jax.training.demonstrations import Demonstrations, mixed, open_demonstrations, sight_demonstrations

TOWER = {
    "depth": 2,
    "embed": 64,
    "heads": 2,
    "mlp": 128,
    "window": 112,
    "full_layers": [],  # a flag or a sheet of figures fits into one window
    "max_pixels": 20 * 28 * 28,  # a flag of data.atlas.known takes eight tokens, a sheet of figures sixteen
}
OLD = 10  # every 10th demonstration is one of the warm start's, so that the policy does not forget reading and tags


def shown(config: schema.TrainConfig, agent: Agent) -> tuple[Demonstrations, Demonstrations]:
    """The demonstrations to train on, and the held-out ones."""
    atlas = dataclasses.replace(config.warm_start, demonstrations="atlas")
    old = open_demonstrations(dataclasses.replace(config, warm_start=atlas), agent)
    training, held_out = (mixed(sight_demonstrations(config.seed + stream), old[stream], OLD) for stream in (0, 1))
    return training, held_out


def get_config() -> ml_collections.ConfigDict:
    """Trains the policy that ships in routerl_jax/data/atlas/sight_policy, from the shipped warm start and a random tower.

    python -m launch.train --config=configs/atlas_sight.py --workdir=runs/atlas_sight

    About 20 minutes on two cores (AVX2). `python -m benchmarks.atlas_sight` measures what it can see.
    """
    return to_config_dict(
        schema.TrainConfig(
            kind="sft",
            seed=1,
            steps=1200,
            model=schema.ModelConfig(path="atlas-warm-start", sight=TOWER),
            mesh=schema.MeshConfig(cpu_devices=2),
            agent=schema.AgentConfig(grammar="r1_router", max_searches=3, k=2),
            knowledge=ATLAS_KNOWLEDGE,
            learner=schema.LearnerConfig(
                aggregation="sequence",  # a name weighs as much as a demonstration of a hundred tokens
                optimizer=schema.OptimizerConfig(
                    lr=2e-3, schedule="cosine", warmup=20, decay_to=0.05, weight_decay=0.0, b2=0.99
                ),
                length_buckets=(128, 512),
                micro_tokens=2048,
            ),
            evaluation=schema.EvaluationConfig(every=400),
            checkpoint=schema.CheckpointConfig(every=100),
            warm_start=schema.WarmStartConfig(
                demonstrations="made:configs.atlas_sight:shown",
                align=200,
                examples=48,
                invented=1.0,  # facts about real countries come only from SightSource
                hit=0.6,
                persistence=0.8,
                drills=0.04,
                observation_weight=0.1,
            ),
        )
    )
