"""MMSearch-R1 (arXiv 2506.20670) with its paper's settings: Qwen2.5-VL-7B learns when to search, by the picture or by text."""

import ml_collections

from configs.common import with_tool_calls
from routerl_jax.core.config import to_config_dict
from routerl_jax.recipes.mmsearch_r1.rewards import RELEASED_REWARD, REWARD
from routerl_jax.training import config as schema

VARIANTS = ("paper", "released", "tool_calls")
RELEASED_EPOCHS = 30
# Differences of the released code: two text searches, an image search in any round, no forced answer.
RELEASED_AGENT = {"text_searches": 2, "image_first": False, "force_answer": False}


def get_config(variant: str = "paper") -> ml_collections.ConfigDict:
    """512 questions x 8 attempts a step, 4 updates a step, 50 steps, KL 1e-3, no supervised start.

    python -m launch.train --config=configs/mmsearch_r1_qwen25_vl_7b.py --distributed --workdir=/mnt/bucket/mmsearch_r1 \
        --config.data.train=fvqa_train.parquet --config.data.test=fvqa_test.parquet
    python -m launch.compile_check --config=configs/mmsearch_r1_qwen25_vl_7b.py --topology=v5e:16x16

    Data: FVQA (lmms-lab/FVQA on the hub). Tools: kb/lens and kb/google, web knowledge bases that launch.build_kb makes from
    routerl_jax.knowledge.web.config.mmsearch_r1 (docs/web.md). Any other knowledge bases for image searches and for text
    searches work, too. `:released` after the configuration's path follows the released code where it differs: 32 questions x
    4 attempts, one update per step, 30 passes, a sigmoid decay of the learning rate, a mean over tokens, two text searches.
    `:tool_calls` is not the paper's: searches are JSON tool calls.

    Compiled for v5e:16x16 (docs/accelerators.md), not run: no step time, no result.
    """
    if variant not in VARIANTS:
        raise ValueError(f"variant {variant!r} of the configuration: expected one of {', '.join(VARIANTS)}")
    run = _run(released=variant == "released")
    return to_config_dict(with_tool_calls(run) if variant == "tool_calls" else run)


def _run(released: bool) -> schema.TrainConfig:
    return schema.TrainConfig(
        recipe="mmsearch_r1",
        steps=0 if released else 50,
        model=schema.ModelConfig(
            path="Qwen/Qwen2.5-VL-7B-Instruct",
            dtype="float32",
            compute_dtype="bfloat16",
            max_pixels=2 * 672 * 672,
            freeze=("visual",),
        ),
        # Four chips share the heads, because Qwen2.5-VL-7B has 4 key/value heads.
        mesh=schema.MeshConfig(data=1, fsdp=-1, tensor=4, layout="fsdp+tensor"),
        engine=schema.EngineConfig(rows=1024, max_length=12288, segment=64, layout="tensor"),
        agent=schema.AgentConfig(
            max_searches=2,
            k=5,
            max_turn_tokens=2048,
            answer_tokens=128,
            instruct=True,
            sees=("image",),
            settings=RELEASED_AGENT if released else {},
        ),
        knowledge={
            "image": schema.KnowledgeConfig(kind="web", directory="kb/lens"),
            "text": schema.KnowledgeConfig(kind="web", directory="kb/google"),
        },
        data=schema.DataConfig(
            train="fvqa:fvqa_train.parquet",
            epochs=RELEASED_EPOCHS if released else 0,
            validation="fvqa:fvqa_test.parquet",
            test="fvqa:fvqa_test.parquet",
        ),
        rollout=schema.RolloutConfig(
            examples=32 if released else 512,
            samples=4 if released else 8,
            temperature=1.0,
            deterministic=False,  # the web is slow; episodes that wait for it must not delay others
            tool_timeout=120.0,
        ),
        stages={"main": schema.StageConfig(reward=dict(RELEASED_REWARD if released else REWARD))},
        learner=schema.LearnerConfig(
            advantage="grpo",
            drop_no_signal=False,  # equation 2 averages over them too
            minibatches=1 if released else 4,
            aggregation="token" if released else "sequence",
            loss=schema.LossConfig(clip_low=0.2, clip_high=0.2, kl="k3", kl_coef=0.001),
            optimizer=schema.OptimizerConfig(
                lr=2e-6,
                schedule="sigmoid" if released else "constant",
                decay_to=0.05 if released else 0.1,
                midpoint=45 if released else 0,
                weight_decay=0.01,
                b2=0.999,
            ),
            length_buckets=(12288,),
            micro_tokens=64 * 12288,  # one long row for each group of four of the 256 chips
            remat="full",
        ),
        evaluation=schema.EvaluationConfig(every=10, examples=128, final_examples=1800, normalizer="search_r1"),
        checkpoint=schema.CheckpointConfig(every=10),
    )
