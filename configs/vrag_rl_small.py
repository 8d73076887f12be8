"""VRAG-RL on Atlas's register in minutes: a small policy learns to look closer at small print, and at the right place."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import ml_collections
import numpy as np

from routerl_jax.agents.agent import Agent
from routerl_jax.core.config import to_config_dict
from routerl_jax.core.types import Example
from routerl_jax.data.atlas import register_lessons
from routerl_jax.data.atlas.register import ACROSS, SIZE, register_questions
from routerl_jax.recipes.vrag_rl.rewards import reward
from routerl_jax.training import config as schema
from routerl_jax.training.alignment import Sheets
from routerl_jax.training.demonstrations import Demonstrations, Worked, drawn, mixed, then

TOOL = "pages"
SIDE = 28 * ACROSS  # pixels of a page's side as it is seen, and of a crop's: an image token a cell
SHEETS = Sheets(register_lessons.SIGNS, register_lessons.sheet)
RAW_SHEETS = Sheets(register_lessons.SIGNS, register_lessons.raw_sheet)
STEPS, EXAMPLES, SAMPLES, MINIBATCHES = 100, 16, 8, 2
OPTIMIZER = schema.OptimizerConfig(lr=2e-4, schedule="linear", warmup=4, decay_to=0.2, weight_decay=0.0, b2=0.99)
# So many demonstrations at first are parts of a plan. Then every so many-th is: else places are forgotten. Mixed with
# plans from the beginning, finding is not learnt.
ONLY_PARTS = 16000
KEPT_PARTS = 4
SEARCHING, READING = 0.25, 0.15  # of the parts. The others find a mark on a page.
NO_LOOKS = {"settings": {"looks": False}}


def train_questions() -> list[Example]:
    return register_questions("train", 1200)


def one_page_questions() -> list[Example]:
    return [example for example in train_questions() if example.metadata["type"] != "two_page"]


def validation_questions() -> list[Example]:
    return register_questions("validation", 96)


def test_questions() -> list[Example]:
    return register_questions("test", 480)


def shown(config: schema.TrainConfig, agent: Agent, raw: bool = False) -> tuple[Demonstrations, Demonstrations]:
    """Lessons in parts of a plan, then whole plans by chance with some of those between; to learn from and held out.

    Args:
      raw: pages are seen at their full size, and nothing is looked at closer.
    """
    shares = register_lessons.Shares(looks=0) if raw else register_lessons.Shares()

    def plan(rng: np.random.Generator) -> Worked:
        demonstration = register_lessons.plan(rng, TOOL, shares, raw=raw)
        return Worked(demonstration.example, agent.pieces(demonstration))

    def part(rng: np.random.Generator) -> Worked:
        kind = rng.random()
        if kind < SEARCHING:
            whole = plan(rng)
            return whole._replace(pieces=whole.pieces[:1])
        if raw or kind >= SEARCHING + READING:
            example, text = register_lessons.finding(rng, raw)
        else:
            example, text = register_lessons.reading(rng)
        return Worked(example, [(text, True)], bare=True)

    def stream(number: int) -> Demonstrations:
        plans, parts = (drawn([14, config.seed, number, i], draw) for i, draw in enumerate((plan, part)))
        return mixed(plans, parts, KEPT_PARTS)

    return then(drawn([14, config.seed, 0, 2], part), ONLY_PARTS, stream(0)), stream(1)


shown_raw = functools.partial(shown, raw=True)


def get_config(variant: str = "") -> ml_collections.ConfigDict:
    """The packaged policy that sees is shown plans, mostly drawn by chance, then learns by GRPO what pays.

    python -m launch.train --config=configs/vrag_rl_small.py --workdir=runs/vrag_rl_small

    `:whole_page` sees every page at its full size, 81 image tokens instead of 9, and has no closer looks: a run of its own,
    with a start of its own. `:one_page` trains on questions about one page alone, with the order of pages in the reward and
    without. `:judge` has the verdict of config.judge in the reward, in the place of exact match, and in the tables.

    Raises:
      ValueError: there is no such variant.
    """
    variants = {"": _run, "whole_page": _whole_page, "one_page": _one_page, "judge": _judge}
    if variant not in variants:
        raise ValueError(f"configs/vrag_rl_small.py:{variant} is not known; it may be {', '.join(variants)[2:]}")
    return to_config_dict(variants[variant]())


def _whole_page() -> schema.TrainConfig:
    run = _run()
    return dataclasses.replace(
        run,
        model=dataclasses.replace(run.model, max_pixels=SIZE[0] * SIZE[1]),
        engine=dataclasses.replace(run.engine, max_length=512),
        agent=dataclasses.replace(run.agent, settings={**run.agent.settings, **NO_LOOKS["settings"]}),
        controls={},
        learner=dataclasses.replace(run.learner, length_buckets=(256, 512)),
        evaluation=dataclasses.replace(run.evaluation, names={"trained": "whole_page"}),
        warm_start=dataclasses.replace(
            run.warm_start,
            demonstrations="made:configs.vrag_rl_small:shown_raw",
            sheets="configs.vrag_rl_small:RAW_SHEETS",
        ),
    )


def _one_page() -> schema.TrainConfig:
    run = _run()
    return dataclasses.replace(
        run,
        data=dataclasses.replace(run.data, train="configs.vrag_rl_small:one_page_questions"),
        controls={"crop_outcome": run.controls["crop_outcome"]},
    )


def _judge() -> schema.TrainConfig:
    run = _run()
    return dataclasses.replace(
        run,
        stages={"main": schema.StageConfig(reward=dict(reward(0.0)))},
        controls={},
        judge=schema.JudgeConfig(model="Qwen2.5-7B-Instruct", base_url="http://127.0.0.1:8000/v1", style="vrag"),
        evaluation=dataclasses.replace(run.evaluation, judge=True),
    )


def _run() -> schema.TrainConfig:
    return schema.TrainConfig(
        recipe="vrag_rl",
        steps=STEPS,
        model=schema.ModelConfig(path="atlas-sight", max_pixels=SIDE * SIDE, freeze=("visual",)),
        mesh=schema.MeshConfig(cpu_devices=2),
        engine=schema.EngineConfig(rows=64, max_length=256),
        agent=schema.AgentConfig(
            max_searches=register_lessons.TURNS,
            k=10,
            max_turn_tokens=48,
            answer_tokens=12,
            # one digit a coordinate, and cells are image tokens; a thought before an answer that is begun, as before others
            settings={"regions": {"box_scale": ACROSS}, "thoughts": True},
        ),
        knowledge={
            TOOL: schema.KnowledgeConfig(
                source="atlas/register", kind="ocr", settings={"retriever": "bm25", "words": {"split": "latin"}}
            )
        },
        data=schema.DataConfig(
            train="configs.vrag_rl_small:train_questions",
            validation="configs.vrag_rl_small:validation_questions",
            test="configs.vrag_rl_small:test_questions",
        ),
        rollout=schema.RolloutConfig(examples=EXAMPLES, samples=SAMPLES),
        stages={"main": schema.StageConfig(reward=_reward())},
        controls={
            "search_only": schema.ControlConfig(agent=NO_LOOKS),
            "crop_outcome": schema.ControlConfig(stages=_outcome()),
            "search_only_outcome": schema.ControlConfig(agent=NO_LOOKS, stages=_outcome()),
        },
        learner=schema.LearnerConfig(
            advantage="grpo",
            minibatches=MINIBATCHES,
            loss=schema.LossConfig(kl_coef=0.01),
            optimizer=OPTIMIZER,
            length_buckets=(256,),
            micro_tokens=2560,
        ),
        evaluation=schema.EvaluationConfig(every=25, examples=-1, final_examples=-1, names={"trained": "vrag_rl"}),
        checkpoint=schema.CheckpointConfig(every=50),
        warm_start=schema.WarmStartConfig(
            demonstrations="made:configs.vrag_rl_small:shown",
            align=400,
            sheets="configs.vrag_rl_small:SHEETS",
            steps=1000,
            optimizer=schema.OptimizerConfig(
                lr=2e-3, schedule="cosine", warmup=10, decay_to=0.05, weight_decay=0.0, b2=0.99
            ),
            examples=32,
        ),
    )


def _reward(**weights: Any) -> dict[str, Any]:
    return dict(reward(0.0, outcome="em", **weights))


def _outcome() -> dict[str, schema.StageConfig]:
    """The stage without the order of pages in its reward."""
    return {"outcome": schema.StageConfig(reward=_reward(alpha=0.0))}
