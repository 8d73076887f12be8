"""A whole RL run that takes seconds: a tiny policy on a scripted world; run as a program by tests that kill it.

python -m tests.training.small_run WORKDIR [--resume] [--steps N] [--devices N]
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys

if __name__ == "__main__":
    devices = sys.argv[sys.argv.index("--devices") + 1] if "--devices" in sys.argv else "2"
    os.environ.setdefault("JAX_NUM_CPU_DEVICES", devices)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

from routerl_jax.learning.learner import LossConfig
from routerl_jax.learning.optimizer import OptimizerConfig
from routerl_jax.training import config as schema


def make_policy(directory: pathlib.Path) -> str:
    """A random policy with its tokenizer, as a Hugging Face directory."""
    from routerl_jax.models.huggingface import save_pretrained
    from tests import tiny

    if not (directory / "config.json").is_file():
        save_pretrained(tiny.model(), directory)
    return str(directory)


def make_questions(path: pathlib.Path) -> str:
    """Forty questions with short answers."""
    if not path.is_file():
        lines = [f'{{"id": "q{i}", "question": "What is {i}?", "golden_answers": ["{i % 3}"]}}' for i in range(40)]
        path.write_text("\n".join(lines) + "\n")
    return str(path)


def make_corpus(path: pathlib.Path) -> str:
    """Thirty short passages."""
    if not path.is_file():
        lines = [f'{{"id": "p{i}", "title": "Number {i}", "text": "The value of {i} is {i % 3}."}}' for i in range(30)]
        path.write_text("\n".join(lines) + "\n")
    return str(path)


def make_config(home: pathlib.Path, steps: int = 4, **changes) -> schema.TrainConfig:
    """The run's configuration; its inputs are made in `home`."""
    home.mkdir(parents=True, exist_ok=True)
    questions = make_questions(home / "questions.jsonl")
    fields = {
        "steps": steps,
        "model": schema.ModelConfig(path=make_policy(home / "initial")),
        "engine": schema.EngineConfig(rows=16, max_length=192, segment=16),
        "agent": schema.AgentConfig(grammar="r1_router", max_searches=2, k=2, max_turn_tokens=16, answer_tokens=8),
        "knowledge": {
            "text": schema.KnowledgeConfig(
                source=make_corpus(home / "corpus.jsonl"), index="exact", directory=str(home / "kb")
            )
        },
        "data": schema.DataConfig(
            train=questions, validation="", test="", train_range=(0, 30), validation_range=(30, 34), test_range=(34, 40)
        ),
        "rollout": schema.RolloutConfig(examples=4, samples=4),
        "stages": {
            "first": schema.StageConfig(start=0, reward={"invalid_actions": -0.5, "answered": 0.1}),
            "second": schema.StageConfig(start=2, reward={"f1": 1.0, "invalid_actions": -0.5}),
        },
        "learner": schema.LearnerConfig(
            minibatches=2,
            loss=LossConfig(clip_high=0.28, kl_coef=0.01),
            optimizer=OptimizerConfig(lr=3e-3, schedule="linear"),
            micro_tokens=512,
        ),
        "evaluation": schema.EvaluationConfig(every=2, examples=4, final_examples=6, baselines=False, before=False),
        "checkpoint": schema.CheckpointConfig(every=1),
        "log_episodes": 4,
    }
    return schema.TrainConfig(**{**fields, **changes})


def main() -> None:
    from routerl_jax.parallel import multihost
    from routerl_jax.training.rl import train_rl

    parser = argparse.ArgumentParser()
    parser.add_argument("home", type=pathlib.Path)
    parser.add_argument("workdir", type=pathlib.Path)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--devices", type=int, default=2)
    arguments = parser.parse_args()
    if "JAX_COORDINATOR_ADDRESS" in os.environ:
        multihost.initialize()
    train_rl(make_config(arguments.home, arguments.steps), arguments.workdir, resume=arguments.resume)


if __name__ == "__main__":
    main()
