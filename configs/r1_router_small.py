"""R1-Router on Atlas in minutes: a small vision policy learns by Step-GRPO where to look and when to stop."""

import dataclasses

import ml_collections

from configs.common import ATLAS_KNOWLEDGE
from routerl_jax.core.config import to_config_dict
from routerl_jax.core.types import Example
from routerl_jax.data.trajectories import StepExamples
from routerl_jax.recipes.r1_router.rewards import REWARD
from routerl_jax.training import config as schema
from routerl_jax.training.golden import atlas_golden, atlas_questions

ENCODER = "all-MiniLM-L6-v2"
KNOWLEDGE = {
    **ATLAS_KNOWLEDGE,
    "text_image": schema.KnowledgeConfig(
        source="atlas/text_image",
        kind="text_image",
        encoder=f"colours+{ENCODER}",
        index="exact",
        settings={"picture_format": "png"},
    ),
}
K = 2  # passages per search
STEPS, EXAMPLES, SAMPLES, MINIBATCHES = 160, 48, 8, 4
OPTIMIZER = schema.OptimizerConfig(lr=8e-4, schedule="linear", warmup=12, decay_to=0.1, weight_decay=0.0, b2=0.99)
TRAIN = {"none": 21, "single": 120, "multi": 150, "visual": 150}  # as many as the paper has: 441
VALIDATION = {"none": 6, "single": 33, "multi": 40, "visual": 40}  # 119
ONLINE_EXAMPLES = (
    9  # questions per step: 72 attempts of 70 to 80 tokens, about as many tokens as Step-GRPO's 384 chats of 14
)


def golden_train() -> StepExamples:
    """The golden steps of the training questions."""
    return atlas_golden("train", TRAIN, KNOWLEDGE, K)


def train_questions() -> list[Example]:
    """The same questions, to be answered from beginning to end."""
    return atlas_questions("train", TRAIN)


def golden_validation() -> StepExamples:
    """The golden steps of 119 questions about other entities."""
    return atlas_golden("validation", VALIDATION, KNOWLEDGE, K)


def validation_questions() -> list[Example]:
    """The questions of `golden_validation`."""
    return atlas_questions("validation", VALIDATION, mixed=True)


def test_questions() -> list[Example]:
    """400 questions about further entities."""
    return atlas_questions("test", {"none": 40, "single": 120, "multi": 120, "visual": 120}, mixed=True)


def get_config(variant: str = "step_grpo") -> ml_collections.ConfigDict:
    """The quickstart's policy gets a vision tower, is trained on demonstrations of independent chats, and then on golden steps.

    python -m launch.train --config=configs/r1_router_small.py --workdir=runs/r1_router_small

    `:online` trains on the same questions without golden steps: on the policy's own chats with live retrieval. It has the same
    rewards, compared with the gold path, and a penalty for bad form. Each turn is credited with its own reward.

    Raises:
      ValueError: there is no such variant.
    """
    if variant not in ("step_grpo", "online"):
        raise ValueError(f"configs/r1_router_small.py:{variant} is neither step_grpo nor online")
    run = _step_grpo()
    return to_config_dict(_online(run) if variant == "online" else run)


def _online(run: schema.TrainConfig) -> schema.TrainConfig:
    rewards = {
        "r1_router.turn_route": {"encoder": ENCODER},
        "r1_router.turn_answer": {},
        "r1_router.turn_format": {
            "weight": 0.3
        },  # without it, half of all turns had a bad form after the first 20 steps
    }
    names = {old: new.replace("step_grpo", "online") for old, new in run.evaluation.names.items()}
    return dataclasses.replace(
        run,
        data=dataclasses.replace(
            run.data,
            train="configs.r1_router_small:train_questions",
            validation="configs.r1_router_small:validation_questions",
        ),
        rollout=dataclasses.replace(run.rollout, examples=ONLINE_EXAMPLES),
        stages={"main": schema.StageConfig(reward=rewards)},
        controls={},
        learner=dataclasses.replace(run.learner, credit="turn", turn=schema.TurnCreditConfig(discount=0.0)),
        evaluation=dataclasses.replace(run.evaluation, names=names),
    )


def _step_grpo() -> schema.TrainConfig:
    return schema.TrainConfig(
        recipe="r1_router",
        steps=STEPS,
        model=schema.ModelConfig(
            path="atlas-warm-start",
            sight={
                "depth": 2,
                "embed": 32,
                "heads": 2,
                "mlp": 64,
                "window": 112,
                "full_layers": [1],
                "max_pixels": 8 * 28 * 28,  # a flag takes eight tokens
            },
        ),
        mesh=schema.MeshConfig(cpu_devices=2),
        engine=schema.EngineConfig(rows=256, max_length=384),
        agent=schema.AgentConfig(max_searches=3, k=K, max_turn_tokens=64, answer_tokens=24),
        knowledge=KNOWLEDGE,
        data=schema.DataConfig(
            train="configs.r1_router_small:golden_train",
            validation="configs.r1_router_small:golden_validation",
            test="configs.r1_router_small:test_questions",
        ),
        rollout=schema.RolloutConfig(examples=EXAMPLES, samples=SAMPLES),
        stages={"main": schema.StageConfig(reward={**REWARD, "r1_router.route": {"encoder": ENCODER}})},
        controls={
            "sft": schema.ControlConfig(
                # trains on each golden step as often as Step-GRPO, which makes 8 attempts at it
                supervised=schema.WarmStartConfig(
                    demonstrations="configs.r1_router_small:golden_train",
                    steps=STEPS * MINIBATCHES // SAMPLES,
                    examples=EXAMPLES * SAMPLES // MINIBATCHES,
                    optimizer=OPTIMIZER,
                )
            )
        },
        learner=schema.LearnerConfig(
            advantage="grpo",
            std_floor=0.1,
            minibatches=MINIBATCHES,
            aggregation="token",
            loss=schema.LossConfig(clip_low=0.2, clip_high=0.28, kl="k3", kl_coef=0.1, min_entropy=0.2),
            optimizer=OPTIMIZER,
            length_buckets=(160, 512),
            micro_tokens=2560,
        ),
        evaluation=schema.EvaluationConfig(
            every=20,
            examples=-1,
            final_examples=-1,
            normalizer="vqa",
            names={
                "warm_start": "prompt",
                "trained": "step_grpo",
                "random_kb": "step_grpo_random_routing",
                "full_budget": "step_grpo_fixed_three",
                "full_budget_random": "step_grpo_fixed_three_random",
            },
        ),
        checkpoint=schema.CheckpointConfig(every=20),
        warm_start=schema.WarmStartConfig(
            steps=200,
            optimizer=schema.OptimizerConfig(lr=2e-3, schedule="cosine", warmup=10, decay_to=0.05, weight_decay=0.0),
            examples=48,
            hit=0.6,
            drills=0.1,
            observation_weight=0.1,
        ),
    )
