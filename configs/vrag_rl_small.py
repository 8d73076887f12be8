"""VRAG-RL on Atlas's register in minutes: a small policy learns to look closer at small print, and at the right place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_collections
import numpy as np

from routerl_jax.agents.agent import Agent
from routerl_jax.core.config import to_config_dict
from routerl_jax.core.types import Example
from routerl_jax.data.atlas import register_lessons
from routerl_jax.data.atlas.register import ACROSS, register_questions
from routerl_jax.recipes.vrag_rl.rewards import reward
from routerl_jax.training import config as schema
from routerl_jax.training.alignment import Sheets
from routerl_jax.training.demonstrations import Demonstrations, Mixed, Worked

TOOL = "pages"
SIDE = 28 * ACROSS  # pixels of a page's side as it is seen, and of a crop's: an image token a cell
SHEETS = Sheets(register_lessons.SIGNS, register_lessons.sheet)
STEPS, EXAMPLES, SAMPLES, MINIBATCHES = 40, 8, 8, 2
OPTIMIZER = schema.OptimizerConfig(lr=3e-4, schedule="linear", warmup=4, decay_to=0.2, weight_decay=0.0, b2=0.99)
# So many demonstrations at first only find a mark on a page or read a crop. Then every so many-th does: else places are
# forgotten. Mixed with plans from the beginning, finding is not learnt.
ONLY_SIGHT = 9600
KEPT_SIGHT = 3
NO_LOOKS = {"settings": {"looks": False}}


def train_questions() -> list[Example]:
    return register_questions("train", 1200)


def validation_questions() -> list[Example]:
    return register_questions("validation", 96)


def test_questions() -> list[Example]:
    return register_questions("test", 480)


class Lessons:
    """An endless stream of demonstrations; each is a function of seed and index."""

    def __init__(self, seed: list[int], make: Callable[[np.random.Generator], Worked]) -> None:
        self._seed, self._make = seed, make

    def __getitem__(self, index: int) -> Worked:
        return self._make(np.random.default_rng([*self._seed, index]))

    def __len__(self) -> int:
        return 2**31


class Then:
    """A stream of demonstrations that begins with some of another one."""

    def __init__(self, first: Demonstrations, count: int, rest: Demonstrations) -> None:
        self._first, self._count, self._rest = first, count, rest

    def __getitem__(self, index: int) -> Worked:
        return self._first[index] if index < self._count else self._rest[index]

    def __len__(self) -> int:
        return len(self._rest)


def shown(config: schema.TrainConfig, agent: Agent) -> tuple[Demonstrations, Demonstrations]:
    """Bare lessons in finding and reading, then plans by chance with such lessons between them; to learn from and held out."""

    def plan(rng: np.random.Generator) -> Worked:
        demonstration = register_lessons.plan(rng, TOOL)
        return Worked(demonstration.example, agent.pieces(demonstration))

    def bare(rng: np.random.Generator) -> Worked:
        lesson = register_lessons.finding if rng.random() < 0.8 else register_lessons.reading
        example, text = lesson(rng)
        return Worked(example, [(text, True)], bare=True)

    mixed = [
        Mixed(Lessons([14, config.seed, stream, 0], plan), Lessons([14, config.seed, stream, 1], bare), KEPT_SIGHT)
        for stream in (0, 1)
    ]
    training = Then(Lessons([14, config.seed, 0, 2], bare), ONLY_SIGHT, mixed[0])
    return training, mixed[1]


def get_config() -> ml_collections.ConfigDict:
    """The packaged policy that sees is shown plans, mostly drawn by chance, then learns by GRPO what pays.

    python -m launch.train --config=configs/vrag_rl_small.py --workdir=runs/vrag_rl_small
    """
    return to_config_dict(
        schema.TrainConfig(
            recipe="vrag_rl",
            steps=STEPS,
            model=schema.ModelConfig(path="atlas-sight", max_pixels=SIDE * SIDE, freeze=("visual",)),
            mesh=schema.MeshConfig(cpu_devices=2),
            engine=schema.EngineConfig(rows=64, max_length=256),
            agent=schema.AgentConfig(
                max_searches=4,  # turns
                k=10,
                max_turn_tokens=48,
                answer_tokens=12,
                settings={"regions": {"box_scale": ACROSS}},  # one digit a coordinate; cells are image tokens
            ),
            knowledge={
                TOOL: schema.KnowledgeConfig(source="atlas/register", kind="ocr", settings={"retriever": "bm25"})
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
            evaluation=schema.EvaluationConfig(every=10, examples=0, final_examples=0, names={"trained": "vrag_rl"}),
            checkpoint=schema.CheckpointConfig(every=20),
            warm_start=schema.WarmStartConfig(
                demonstrations="made:configs.vrag_rl_small:shown",
                align=150,
                sheets="configs.vrag_rl_small:SHEETS",
                steps=460,
                optimizer=schema.OptimizerConfig(
                    lr=2e-3, schedule="cosine", warmup=10, decay_to=0.05, weight_decay=0.0, b2=0.99
                ),
                examples=32,
            ),
        )
    )


def _reward(**weights: Any) -> dict[str, Any]:
    return dict(reward(0.0, outcome="em", **weights))


def _outcome() -> dict[str, schema.StageConfig]:
    """The stage without the order of pages in its reward."""
    return {"outcome": schema.StageConfig(reward=_reward(alpha=0.0))}
