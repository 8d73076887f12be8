"""MMSearch-R1 on Atlas's flags in minutes: a small policy that sees learns to search only for what it doesn't know."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import ml_collections
import numpy as np

from routerl_jax.agents.agent import Agent
from routerl_jax.core.config import to_config_dict
from routerl_jax.core.types import Demonstration, Example, Passage, TextAndImage
from routerl_jax.data.atlas.invented import invented_world
from routerl_jax.data.atlas.known import known_questions, strength
from routerl_jax.data.atlas.sight import NEEDED, PLANS, Plan, Planned, planned, renamed, restated, value_by_chance
from routerl_jax.recipes.mmsearch_r1.rewards import REWARD, reward
from routerl_jax.training import config as schema
from routerl_jax.training.demonstrations import Demonstrations, Worked, mixed, shuffled, sight_demonstrations
from routerl_jax.training.knowledge import open_knowledge_bases

TOOLS = ("image", "text")
KNOWLEDGE = {
    "image": schema.KnowledgeConfig(
        source="atlas/flags",
        kind="reverse_image",
        encoder="colours+all-MiniLM-L6-v2",
        index="exact",
        settings={"picture_format": "png"},
    ),
    "text": schema.KnowledgeConfig(source="atlas/facts", kind="bm25", settings={"words": {"split": "latin"}}),
}
K, IMAGE_K = 2, 5
QUESTIONS = 1600  # of training; those of demonstrations have other pictures
DEMONSTRATIONS = 2400
STEPS, EXAMPLES, SAMPLES, MINIBATCHES = 40, 16, 8, 4
OPTIMIZER = schema.OptimizerConfig(lr=3e-4, schedule="linear", warmup=4, decay_to=0.2, weight_decay=0.0, b2=0.99)
LEANING = 0.4  # of demonstrations that need a search, the share with the plan that they need; all others' are by chance
# Every so many-th demonstration is one of what the packaged policy was taught, mostly of the known countries.
KEPT_SIGHT = 3
SIGHT = {"name": 0.25, "about": 0.3, "unknown": 0.25, "fact": 0.1, "describe": 0.03, "figures": 0.07}


def train_questions() -> list[Example]:
    """Training questions. Half of them can be answered without a search.

    With fewer, the policy would learn to search always before it learns which questions it can answer.
    """
    asked = known_questions("train", 2 * QUESTIONS)
    free = [example for example in asked if example.metadata["kind"] == "search_free"]
    required = [example for example in asked[:QUESTIONS] if example.metadata["kind"] != "search_free"]
    return [example for pair in zip(free, required) for example in pair]


def search_required() -> list[Example]:
    """The training questions that can't be answered without a search."""
    return [example for example in train_questions() if example.metadata["kind"] != "search_free"]


def validation_questions() -> list[Example]:
    """The known countries in other pictures, and 56 others."""
    return known_questions("validation", 80)


def test_questions() -> list[Example]:
    """The known countries in other pictures, and 184 others, a quarter of them real."""
    return known_questions("test", 400)


def shown(config: schema.TrainConfig, agent: Agent) -> tuple[Demonstrations, Demonstrations]:
    """Worked examples that search too often and too rarely, to learn from, and others that are held out."""
    rng = np.random.default_rng([12, config.seed])
    questions = known_questions("train", DEMONSTRATIONS, 2 * QUESTIONS)
    plans = [planned(question, _plan(question, rng)) for question in questions]
    return _demonstrations(
        config, [_told_otherwise(demonstration, rng) for demonstration in _searched(config, plans)], agent
    )


def _plan(example: Example, rng: np.random.Generator) -> Plan:
    """The searches that a question needs, for some of the questions that need a search; else a random plan.

    So the first policy searches too much, but less for questions that it can answer, as large models do. If plans did not
    depend on that at all, an update on one kind of question would change its behaviour on all kinds.
    """
    kind = example.metadata["kind"]
    return NEEDED[kind] if kind != "search_free" and rng.random() < LEANING else PLANS[int(rng.integers(len(PLANS)))]


def _told_otherwise(demonstration: Demonstration, rng: np.random.Generator) -> Demonstration:
    """Changes the search results of half of the demonstrations, so that the policy reads them and does not answer from memory.

    A country that the policy doesn't know gets another name; a fact that it knows gets another value.
    """
    metadata, tools = demonstration.example.metadata, {step.tool for step in demonstration.steps}
    unknown = strength(metadata["country"]) == "none"
    if rng.random() < 0.5:
        return demonstration
    if unknown and "image" in tools:
        return renamed(demonstration, invented_world(int(rng.integers(2**31)), countries=1, elements=0)[0].name)
    if not unknown and "text" in tools and metadata["relation"]:
        return restated(demonstration, value_by_chance(metadata["relation"], rng))
    return demonstration


def taught(config: schema.TrainConfig, agent: Agent) -> tuple[Demonstrations, Demonstrations]:
    """The plans of a teacher that knows what the policy knows, on the training questions."""
    plans = [planned(question, NEEDED[question.metadata["kind"]]) for question in train_questions()]
    return _demonstrations(config, _searched(config, plans), agent)


def _searched(config: schema.TrainConfig, plans: Sequence[Planned]) -> list[Demonstration]:
    """Carries out the plans, with one call of each knowledge base for all of them."""
    tools = open_knowledge_bases(config.knowledge, progress=False)
    pictured = [plan for plan in plans if "image" in plan.plan]
    worded = [plan for plan in plans if "text" in plan.plan]
    pictures = tools[TOOLS[0]].search([TextAndImage(image=plan.example.images[0]) for plan in pictured], IMAGE_K)
    by_picture: dict[int, Sequence[Passage]] = {id(plan): passages for plan, passages in zip(pictured, pictures)}
    queries = [plan.query(plan.named(by_picture.get(id(plan)))) for plan in worded]
    in_words = {id(plan): passages for plan, passages in zip(worded, tools[TOOLS[1]].search(queries, K))}
    return [plan.demonstration(TOOLS, by_picture.get(id(plan)), in_words.get(id(plan))) for plan in plans]


def _demonstrations(
    config: schema.TrainConfig, demonstrations: Sequence[Demonstration], agent: Agent
) -> tuple[Demonstrations, Demonstrations]:
    worked = [Worked(demonstration.example, agent.pieces(demonstration)) for demonstration in demonstrations]
    held_out = len(worked) // 20
    parts = worked[held_out:], worked[:held_out]
    training, judged = (
        mixed(shuffled(part, config.seed), sight_demonstrations(config.seed + stream, SIGHT), KEPT_SIGHT)
        for stream, part in enumerate(parts)
    )
    return training, judged


def get_config(variant: str = "") -> ml_collections.ConfigDict:
    """The packaged policy that sees is shown plans, most of them drawn by chance, then learns by GRPO what pays.

    python -m launch.train --config=configs/mmsearch_r1_small.py --workdir=runs/mmsearch_r1_small

    `:prices` has a control more, for which a search costs three tenths of a right answer (benchmarks.search_predictions).

    Raises:
      ValueError: there is no such variant.
    """
    if variant not in ("", "prices"):
        raise ValueError(f"configs/mmsearch_r1_small.py:{variant} is not known; the only variant is prices")
    run = _run()
    if variant:
        dear = schema.ControlConfig(stages={"dear": schema.StageConfig(reward=reward(0.3))})
        run = dataclasses.replace(run, controls={**run.controls, "high_penalty": dear})
    return to_config_dict(run)


def _run() -> schema.TrainConfig:
    return schema.TrainConfig(
        recipe="mmsearch_r1",
        steps=STEPS,
        # else what RL teaches of known flags spreads to unknown ones: more and more of them are called known
        model=schema.ModelConfig(path="atlas-sight", freeze=("visual", "embedding")),
        mesh=schema.MeshConfig(cpu_devices=2),
        engine=schema.EngineConfig(rows=128, max_length=448),
        agent=schema.AgentConfig(
            max_searches=2,
            k=K,
            max_turn_tokens=96,
            answer_tokens=24,
            # the results in docs/mmsearch_r1.md were made with the picture shown again after each search
            settings={"image_k": IMAGE_K, "thoughts": True, "repeat_pictures": True},
        ),
        knowledge=KNOWLEDGE,
        data=schema.DataConfig(
            train="configs.mmsearch_r1_small:train_questions",
            validation="configs.mmsearch_r1_small:validation_questions",
            test="configs.mmsearch_r1_small:test_questions",
            overlap="ignore",
        ),
        # At temperature 1 misread names cost more than a search does.
        rollout=schema.RolloutConfig(examples=EXAMPLES, samples=SAMPLES, temperature=0.6),
        stages={"main": schema.StageConfig(reward=dict(REWARD))},
        controls={
            "no_penalty": schema.ControlConfig(stages={"free": schema.StageConfig(reward=reward(0.0))}),
            "unbalanced": schema.ControlConfig(data={"train": "configs.mmsearch_r1_small:search_required"}),
            "sft": schema.ControlConfig(
                # as many passes over the questions as the run makes
                supervised=schema.WarmStartConfig(
                    demonstrations="made:configs.mmsearch_r1_small:taught",
                    steps=STEPS * MINIBATCHES // SAMPLES,
                    examples=EXAMPLES * SAMPLES // MINIBATCHES,
                    optimizer=OPTIMIZER,
                )
            ),
        },
        learner=schema.LearnerConfig(
            advantage="grpo",
            std_floor=0.05,  # groups that differ in the price of a search alone count as much as others
            minibatches=MINIBATCHES,
            loss=schema.LossConfig(clip_low=0.2, clip_high=0.28, kl="forward", kl_coef=0.1, min_entropy=0.05),
            optimizer=OPTIMIZER,
            length_buckets=(128, 256, 448),
            micro_tokens=2560,
        ),
        evaluation=schema.EvaluationConfig(
            every=8,
            examples=-1,
            final_examples=-1,
            before_baselines=("direct", "rag_workflow"),
            calibration=schema.CalibrationConfig(kind="search_free"),
            names={"trained": "mmsearch_r1"},
        ),
        checkpoint=schema.CheckpointConfig(every=8),
        warm_start=schema.WarmStartConfig(
            demonstrations="made:configs.mmsearch_r1_small:shown",
            steps=600,
            train_frozen=True,
            optimizer=schema.OptimizerConfig(lr=2e-3, schedule="cosine", warmup=10, decay_to=0.05, weight_decay=0.0),
            examples=32,
            drills=0.1,
            observation_weight=0.1,
        ),
    )
