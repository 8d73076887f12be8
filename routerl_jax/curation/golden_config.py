"""The configuration of `launch.construct_data`. Every field is read somewhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from routerl_jax.core.checked import BelowOne, Count, NonNegative, Positive, PositiveFraction, Seed, Size, checked
from routerl_jax.llms.config import ChatModelConfig
from routerl_jax.rewards.metrics import ANSWER_METRICS
from routerl_jax.rewards.normalize import NORMALIZERS
from routerl_jax.training.sections import KnowledgeConfig

ACCURACY = "accuracy"  # recipes.r1_router.rewards.final_accuracy, the paper's


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class AttemptConfig:
    """How the language model works on a question, and when its answer is right. Another value is another job."""

    max_searches: Size = 3  # most sub-questions (n of equation 2)
    min_searches: Count = 0  # least; fewer: rejected
    k: Size = 5  # passages per search
    candidates: Size = 1  # most retrievers that a sub-question may name; all are searched, and all are gold
    attempts: Size = 4  # per question, until one is right (keep="first") or in any case (keep="shortest")
    # of the right attempts: the first, or the one with the fewest searches
    keep: Literal["first", "shortest"] = "first"
    shots: Count = 4  # most worked chats before each (curation.shots); the paper has 8
    retries: Count = 2  # further replies asked for where one can't be read
    temperature: NonNegative = 1.0  # of the replies
    max_tokens: Size = 2048  # of a reply
    max_document: Count = 2000  # characters of a document that are shown and written; 0: all
    sees: tuple[str, ...] = ("text_image",)  # knowledge bases that are asked with the question's picture, too
    metric: str = ACCURACY  # or one of rewards.metrics.ANSWER_METRICS; right where it is 1
    normalizer: str = "vqa"  # rewards.normalize.NORMALIZERS

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
            known = ", ".join((ACCURACY, *ANSWER_METRICS))
            raise ValueError(f"config.attempt.metric={self.metric!r}: known are {known}")
        NORMALIZERS.get(self.normalizer)  # raises ValueError that lists them


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class AmountConfig:
    """How much is made, and what of it goes into the files. A job may be continued with other values."""

    questions: Count = 0  # most that are tried of a data set; 0: all
    per_dataset: Size = 1000  # trajectories of a data set after which no more of its questions are tried
    dataset_ratio: NonNegative = 2.0  # most that a data set may have beside the one with the fewest; 0: any
    at_least: Count = 100  # trajectories that a data set keeps, if it has them, whatever the ratio
    pattern_share: PositiveFraction = 1.0  # most of a data set's trajectories that may have one sequence of retrievers
    validation: BelowOne = 0.2  # share of each data set that goes to validation.jsonl
    concurrency: Size = 32  # questions under way at once
    patience: Size = 20  # questions in a row that may fail before the job stops
    search_timeout: Positive = 60.0  # seconds
    read_price: NonNegative = 0.0  # price of a million tokens that the model reads, for the report
    write_price: NonNegative = 0.0  # price of a million tokens that it writes

    def __post_init__(self) -> None:
        if self.dataset_ratio and self.dataset_ratio < 1:
            raise ValueError(f"config.amount.dataset_ratio={self.dataset_ratio} must be at least 1, or 0 for any")


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class ConstructConfig:
    """A job that makes golden trajectories."""

    job: Literal["golden"] = "golden"  # says which job it is
    data: str = ""  # questions, as data.readers.open_dataset takes them; several with commas between
    # who works on them: a language model, or nobody, where data sets say how their questions are answered (data.gold_paths)
    teacher: Literal["model", "annotations"] = "model"
    llm: ChatModelConfig = dataclasses.field(default_factory=ChatModelConfig)  # the language model
    # annotations: the knowledge base that answers a data set's questions, where paths don't say: DATASET=NAME,DATASET=NAME
    homes: str = ""
    # the knowledge bases that are searched, by name
    knowledge: Mapping[str, KnowledgeConfig] = dataclasses.field(default_factory=dict)
    attempt: AttemptConfig = AttemptConfig()
    amount: AmountConfig = AmountConfig()
    seed: Seed = 0  # seed of the order in which questions are tried

    def __post_init__(self) -> None:
        if not self.data:
            raise ValueError("config.data is not set: name the questions (--config.data=FILE,FILE; docs/data.md)")
        if not self.knowledge:
            raise ValueError("config.knowledge is empty: name at least one knowledge base")
        for dataset, home in self.home_of.items():
            if home not in self.knowledge:
                raise ValueError(
                    f"config.homes={self.homes!r}: {home!r} (of {dataset!r}) is no knowledge base of the job: "
                    f"{', '.join(self.knowledge)}"
                )

    @property
    def home_of(self) -> dict[str, str]:
        """`homes` by data set."""
        parts = [part.strip().partition("=") for part in self.homes.split(",") if part.strip()]
        return {dataset.strip(): home.strip() for dataset, _, home in parts}

    def decisive(self) -> dict[str, Any]:
        """What attempts depend on beside the questions themselves: other values are another job."""
        model = dataclasses.asdict(self.llm)
        by_model = {"llm": {key: model[key] for key in ("kind", "model", "extra", "max_length", "dtype")}}
        return {
            "seed": self.seed,
            **(by_model if self.teacher == "model" else {"homes": self.homes}),
            "knowledge": {name: dataclasses.asdict(section) for name, section in self.knowledge.items()},
            "attempt": dataclasses.asdict(self.attempt),
        }
