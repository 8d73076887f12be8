"""A real model learns which source answers a question, by reinforcement learning alone."""

from typing import Literal

import ml_collections

from routerl_jax.core.config import to_config_dict
from routerl_jax.models.lora import LoraConfig
from routerl_jax.training import config as schema

DATA = "runs/real_data"  # what benchmarks.real_data writes
DESCRIPTIONS = {
    "people": "articles about people: their lives and families",
    "works": "articles about films, music, books and series",
    "table": "rows of tables: results, lists, records",
}
PROMPT = "Sources:\n{sources}\nThink, search one source, answer.\nQuestion: {question}\n"


def get_config(sources: str = "real") -> ml_collections.ConfigDict:
    """SmolLM2-135M-Instruct with an adapter, one search a question. Three real sources, or `own`: those of the command line.
    `kinds`: up to two searches, each at a price, and questions of which some need two, in two sources.

    python -m benchmarks.real_data --output=runs/real_data
    python -m launch.train --config=configs/sources.py --workdir=runs/sources
    python -m launch.train --config=configs/sources.py:kinds --workdir=runs/kinds
    python -m launch.train --config=configs/sources.py:own --workdir=runs/mine --config.data.train=questions.jsonl \
        --config.data.validation=validation.jsonl --config.data.test=test.jsonl \
        --config.knowledge.notes.source=notes.jsonl --config.knowledge.notes.description="minutes of meetings" \
        --config.knowledge.tickets.source=tickets.jsonl --config.knowledge.tickets.description="problems and how they ended"

    A question needs accepted answers, and nothing else. The supervised start draws the source of every search at random, so it
    teaches the protocol and reading, but not where to look. Reinforcement learning then rewards the answer.
    python -m launch.check_data --knowledge says beforehand which questions no source answers.

    Each attempt is tried with all sources (`rollout.forks`), and learns from what each of them made of it: a source that
    is rarely chosen would otherwise be learnt about rarely, and then be chosen less.

    docs/real_model.md has what one run of `real` learnt, on the seed that chose the settings. `kinds` and `own` were not run to
    their ends.

    Raises:
      ValueError: `sources` is another word.
    """
    if sources not in ("real", "kinds", "own"):
        raise ValueError(f"configs/sources.py:{sources} is none of real, kinds and own")
    questions = "" if sources == "own" else f"{DATA}/{'kinds_' * (sources == 'kinds')}"
    knowledge = {
        name: schema.KnowledgeConfig(source=f"{DATA}/{name}.jsonl", kind="bm25", description=description)
        for name, description in DESCRIPTIONS.items()
    }
    config = to_config_dict(
        schema.TrainConfig(
            recipe="search",
            steps=24,
            model=schema.ModelConfig(
                path="SmolLM2-135M-Instruct",
                dtype="float32",
                lora=LoraConfig(rank=8, alpha=16.0),
            ),
            mesh=schema.MeshConfig(cpu_devices=1),
            engine=schema.EngineConfig(rows=64, max_length=768),
            agent=schema.AgentConfig(
                grammar="r1_router", max_searches=1, k=2, prompt=PROMPT, max_turn_tokens=72, answer_tokens=16
            ),
            knowledge=knowledge,
            data=schema.DataConfig(
                train=questions and f"{questions}train.jsonl",
                validation=questions and f"{questions}validation.jsonl",
                test=questions and f"{questions}test.jsonl",
            ),
            rollout=schema.RolloutConfig(examples=21, samples=1, forks=1),
            stages={"main": schema.StageConfig(reward={"em": 1.0, "format": 0.1})},
            learner=schema.LearnerConfig(
                advantage="batch_std",
                credit="counterfactual",
                forks=schema.ForkCreditConfig(weights="even", baseline="worst"),
                drop_tails=True,
                minibatches=2,
                loss=schema.LossConfig(kind="reinforce"),
                optimizer=_optimizer(1.5e-3, "linear", 3, 0.2),
                length_buckets=(128, 256, 384, 768),
                share_prefixes=True,
                micro_tokens=768,
            ),
            evaluation=schema.EvaluationConfig(
                every=8, examples=64, final_examples=-1, names={"warm_start": "start", "trained": "learnt"}
            ),
            checkpoint=schema.CheckpointConfig(every=2),
            warm_start=schema.WarmStartConfig(
                steps=48, demonstrations="drawn", examples=16, optimizer=_optimizer(1e-3, "cosine", 4, 0.1)
            ),
        )
    )
    if sources == "own":
        config.knowledge = {}  # checked once the command line has named some
    if sources == "kinds":
        config.agent.max_searches = 2
        config.rollout.examples, config.rollout.samples = (
            12,
            2,
        )  # with one sample, queries and answers have no advantage
        config.agent.prompt = PROMPT.replace("search one source", "search")
        config.engine.max_length = 1152
        config.learner.length_buckets = (128, 256, 384, 768, 1152)
        config.stages.main.reward = {"em": 1.0, "found": 0.5, "format": 0.1, "searches": -0.1}
    return config


def _optimizer(
    lr: float, schedule: Literal["linear", "cosine"], warmup: int, decay_to: float
) -> schema.OptimizerConfig:
    return schema.OptimizerConfig(lr=lr, schedule=schedule, warmup=warmup, decay_to=decay_to, weight_decay=0.0, b2=0.99)
