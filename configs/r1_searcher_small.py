"""R1-Searcher in minutes on a laptop: a small policy that answers from memory learns to search, then to answer."""

import ml_collections

from routerl_jax.core.config import to_config_dict
from routerl_jax.recipes.r1_searcher import PROMPT_SUFFIX, STAGE_1, stage_2
from routerl_jax.training import config as schema

STAGE_2_STARTS = 10


def get_config(metric: str = "f1") -> ml_collections.ConfigDict:
    """Warm start, stage 1 (retrieval + format), stage 2 (answer - 2 violation) on Atlas, its knowledge bases as one.

    python -m launch.train --config=configs/r1_searcher_small.py --workdir=runs/r1_searcher_small

    `:em` or `:cover_em` after the configuration's path rewards the answer by that metric instead of F1 (the paper's table 5).

    All questions need a search, because the paper's selection leaves easy ones out. The warm start shows the protocol, but
    85 of 100 demonstrations answer without a search. Its policy is the quickstart's packaged one, which can read. The
    protocol's marks are plain text to it, of twelve tokens or more each.
    """
    return to_config_dict(
        schema.TrainConfig(
            recipe="r1_searcher",
            steps=36,
            model=schema.ModelConfig(path="atlas-warm-start"),
            mesh=schema.MeshConfig(cpu_devices=2),
            engine=schema.EngineConfig(rows=128, max_length=512),
            agent=schema.AgentConfig(grammar="r1_searcher_answer", max_searches=3, k=2, prompt_suffix=PROMPT_SUFFIX),
            knowledge={"atlas": schema.KnowledgeConfig(source="atlas/all")},
            data=schema.DataConfig(
                train="atlas/train/single+multi",
                validation="atlas/validation/single+multi",
                test="atlas/test/single+multi",
            ),
            # with 8 questions per step and a warm start of 200 updates, one of five runs searched exactly once for every
            # question
            rollout=schema.RolloutConfig(examples=16, samples=8),
            stages={
                "stage1": schema.StageConfig(start=0, reward=STAGE_1),
                "stage2": schema.StageConfig(start=STAGE_2_STARTS, reward=stage_2(metric)),
            },
            learner=schema.LearnerConfig(
                advantage="reinforce_pp_baseline",
                drop_no_signal=False,  # as in the released code
                minibatches=4,
                loss=schema.LossConfig(clip_low=0.2, clip_high=0.2, kl="forward", kl_coef=0.02),
                optimizer=schema.OptimizerConfig(
                    lr=5e-4, schedule="linear", warmup=8, decay_to=0.2, weight_decay=0.0, b2=0.99
                ),
                length_buckets=(256, 512),
                micro_tokens=2048,
            ),
            evaluation=schema.EvaluationConfig(every=12, examples=64, final_examples=256, normalizer="r1_searcher"),
            checkpoint=schema.CheckpointConfig(every=6),
            warm_start=schema.WarmStartConfig(
                steps=300,
                optimizer=schema.OptimizerConfig(
                    lr=1e-3, schedule="cosine", warmup=20, decay_to=0.05, weight_decay=0.0
                ),
                examples=32,
                hit=0.95,
                persistence=0.0,
                direct=0.85,
            ),
        )
    )
