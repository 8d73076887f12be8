"""The configuration of the job that makes golden trajectories (`launch.construct_data`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from routerl_jax.core.config import (
    Amount,
    BelowOne,
    Count,
    NonNegative,
    Positive,
    PositiveFraction,
    Seed,
    Size,
    checked,
)
from routerl_jax.rewards.metrics import ANSWER_METRICS, NORMALIZERS
from routerl_jax.services.config import ChatModelConfig
from routerl_jax.training.sections import KnowledgeConfig

ACCURACY = "accuracy"  # recipes.r1_router.rewards.final_accuracy, the paper's


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class AttemptConfig:
    """How the language model works on a question, and when its answer is right. Other values make another job."""

    max_searches: Size = 3  # most sub-questions (n of equation 2)
    min_searches: Count = 0  # fewest sub-questions; attempts with fewer are rejected
    k: Size = 5  # passages per search
    candidates: Size = 1  # most retrievers that a sub-question may name; all are searched, and all count as gold
    attempts: Size = 4  # per question: until one is right (keep="first"), or always so many (keep="shortest")
    # which right attempt is kept: the first, or the one with the fewest sub-questions
    keep: Literal["first", "shortest"] = "first"
    shots: Count = 4  # most worked examples before each chat (curation.shots); the paper has 8
    retries: Count = 2  # further requests if a reply can't be read
    temperature: NonNegative = 1.0  # temperature of the sampling of replies
    max_tokens: Size = 2048  # most tokens of a reply
    max_document: Count = 2000  # most characters of a document that are shown and written; 0: all
    sees: tuple[str, ...] = ("text_image",)  # knowledge bases that also get the question's picture
    metric: str = ACCURACY  # or one of rewards.metrics.ANSWER_METRICS; an answer is right if it is 1
    normalizer: str = "vqa"  # rewards.metrics.NORMALIZERS

    def __post_init__(self) -> None:
        if not 0 <= self.min_searches <= self.max_searches:
            raise ValueError(
                f"config.attempt.min_searches={self.min_searches} must be in [0, max_searches={self.max_searches}]"
            )
        if self.attempts > 1 and self.temperature == 0:
            raise ValueError(
                f"config.attempt.temperature=0.0: all {self.attempts} attempts would be the same; set attempts=1, or a "
                "temperature"
            )
        if self.metric not in (ACCURACY, *ANSWER_METRICS):
            metrics = ", ".join((ACCURACY, *ANSWER_METRICS))
            raise ValueError(f"config.attempt.metric={self.metric!r}: known are {metrics}")
        NORMALIZERS.get(self.normalizer)  # raises ValueError that lists them


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class AmountConfig:
    """How much is made, and how much of it goes into the files. A job may be continued with other values."""

    questions: Amount = -1  # most questions that are tried per data set; -1: all
    per_dataset: Size = 1000  # most trajectories per data set; then no more of its questions are tried
    dataset_ratio: NonNegative = 2.0  # most trajectories of a data set, relative to the smallest one; 0: no limit
    at_least: Count = 100  # a data set keeps so many trajectories, if it has them, whatever the ratio
    pattern_share: PositiveFraction = 1.0  # largest share of a data set's trajectories with one sequence of retrievers
    validation: BelowOne = 0.2  # share of each data set's trajectories that goes to validation.jsonl
    concurrency: Size = 32  # questions in progress at once
    patience: Size = 20  # the job stops after so many failed questions in a row
    search_timeout: Positive = 60.0  # seconds after which a search counts as failed
    read_price: NonNegative = 0.0  # price of a million tokens that the model reads, for the report
    write_price: NonNegative = 0.0  # price of a million tokens that the model writes

    def __post_init__(self) -> None:
        if self.dataset_ratio and self.dataset_ratio < 1:
            raise ValueError(f"config.amount.dataset_ratio={self.dataset_ratio} must be at least 1, or 0 for any")


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class ConstructConfig:
    """A job that makes golden trajectories."""

    job: Literal["golden"] = "golden"  # the job that this configuration is for
    data: str = ""  # questions, as data.readers.open_dataset takes them; several are separated by commas
    # model: a language model answers the questions; annotations: the data sets say how they are answered (data.gold_paths)
    teacher: Literal["model", "annotations"] = "model"
    llm: ChatModelConfig = dataclasses.field(default_factory=ChatModelConfig)  # the language model
    # annotations: the knowledge base that answers a data set's questions if gold paths name none: DATASET=NAME,DATASET=NAME
    default_kb: str = ""
    # the knowledge bases, by name
    knowledge: Mapping[str, KnowledgeConfig] = dataclasses.field(default_factory=dict)
    attempt: AttemptConfig = AttemptConfig()
    amount: AmountConfig = AmountConfig()
    seed: Seed = 0  # seed of the order in which questions are tried

    def __post_init__(self) -> None:
        if not self.data:
            raise ValueError("config.data is not set: name the questions (--config.data=FILE,FILE; docs/data.md)")
        if not self.knowledge:
            raise ValueError("config.knowledge is empty: name at least one knowledge base")
        for dataset, name in self.default_kbs.items():
            if name not in self.knowledge:
                raise ValueError(
                    f"config.default_kb={self.default_kb!r}: {name!r} (of {dataset!r}) is no knowledge base of the job: "
                    f"{', '.join(self.knowledge)}"
                )

    @property
    def default_kbs(self) -> dict[str, str]:
        """`default_kb` by data set."""
        parts = [part.strip().partition("=") for part in self.default_kb.split(",") if part.strip()]
        return {dataset.strip(): name.strip() for dataset, _, name in parts}

    def decisive(self) -> dict[str, Any]:
        """The settings that attempts depend on, besides the questions. Other values make another job."""
        model = dataclasses.asdict(self.llm)
        by_model = {"llm": {key: model[key] for key in ("kind", "model", "extra", "max_length", "dtype")}}
        return {
            "seed": self.seed,
            **(by_model if self.teacher == "model" else {"default_kb": self.default_kb}),
            "knowledge": {name: dataclasses.asdict(section) for name, section in self.knowledge.items()},
            "attempt": dataclasses.asdict(self.attempt),
        }
