"""The common parts of jobs in which language models write demonstrations for a policy, question by question."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from routerl_jax.core.config import Amount, Count, NonNegative, Positive, Seed, Size, checked, naming
from routerl_jax.core.types import Example
from routerl_jax.extras.curation.job import FAILED, Job, Record, Result
from routerl_jax.extras.curation.questions import Question, all_questions, digest_of, within
from routerl_jax.models.decoder import Decoder
from routerl_jax.models.huggingface import load_without_weights
from routerl_jax.recipes.recipe import AgentConfig
from routerl_jax.rewards.metrics import ANSWER_METRICS, NORMALIZERS
from routerl_jax.training.sections import KnowledgeConfig

Made = TypeVar("Made")  # a demonstration
Demonstrate = Callable[[Question], Awaitable[dict[str, Any]]]


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class DemonstrationConfig:
    """Questions, the policy that is to learn, and how long and how often language models are asked."""

    data: str = ""  # questions, as data.readers.open_dataset takes them; several are separated by commas
    # the policy that is to learn, in whose form demonstrations are written: directory, hub id or packaged model. Its tokenizer
    # and image processing are read, its weights are not
    student: str = ""
    agent: AgentConfig = AgentConfig(max_searches=2)  # as in the run that learns; the models also get instructions
    # the knowledge bases, by name
    knowledge: Mapping[str, KnowledgeConfig] = dataclasses.field(default_factory=dict)
    attempts: Size = 1  # most attempts per question; the first right one is the last
    temperature: NonNegative = 0.0  # temperature of the sampling of replies
    max_tokens: Size = 2048  # most tokens of a reply
    # most tokens of a demonstration as the policy reads it; longer ones are rejected; 0: no limit
    max_length: Count = 0
    metric: str = "em"  # rewards.metrics.ANSWER_METRICS; an answer is right if it is 1
    normalizer: str = "search_r1"  # rewards.metrics.NORMALIZERS
    questions: Amount = -1  # most questions that are tried per data set; -1: all
    concurrency: Size = 32  # questions in progress at once
    patience: Size = 20  # the job stops after so many failed questions in a row
    search_timeout: Positive = 60.0  # seconds after which a search counts as failed
    read_price: NonNegative = 0.0  # price of a million tokens that the model reads, for the report
    write_price: NonNegative = 0.0  # price of a million tokens that the model writes
    seed: Seed = 0  # seed of the order in which questions are tried

    def __post_init__(self) -> None:
        if not self.data:
            raise ValueError("config.data is not set: name the questions (--config.data=FILE,FILE; docs/data.md)")
        if not self.student:
            raise ValueError(
                "config.student is not set: name the policy that is to learn, in whose form demonstrations are written"
            )
        if self.attempts > 1 and self.temperature == 0:
            raise ValueError(
                f"config.temperature=0.0: all {self.attempts} attempts would be the same; set attempts=1, or a temperature"
            )
        if self.metric not in ANSWER_METRICS:
            raise ValueError(f"config.metric={self.metric!r}: known are {', '.join(ANSWER_METRICS)}")
        with naming("config.normalizer"):
            NORMALIZERS.get(self.normalizer)

    def decisive(self) -> dict[str, Any]:
        """The settings that demonstrations depend on, besides the questions. Other values make another job."""
        keys = ("student", "attempts", "temperature", "max_tokens", "max_length", "metric", "normalizer", "seed")
        return {
            **{key: getattr(self, key) for key in keys},
            "agent": dataclasses.asdict(self.agent),
            "knowledge": {name: dataclasses.asdict(section) for name, section in self.knowledge.items()},
        }


class AttemptResult(Protocol):
    """The result of an attempt. `record()` is JSON-serialisable."""

    @property
    def outcome(self) -> str: ...
    @property
    def detail(self) -> str: ...
    def record(self) -> dict[str, Any]: ...


async def best_of(
    question: Question,
    attempt: Callable[[Example, int], Awaitable[tuple[AttemptResult, Made | None]]],
    attempts: int,
    record: Callable[[Made | None], dict[str, Any]],
) -> dict[str, Any]:
    """A question's record, after its attempts.

    Args:
      attempt: makes the attempt of a number, from 0, and returns the demonstration if it is right.
      attempts: most attempts. The first right one is the last, and so is one in which a model or a search failed.
      record: the part of the record that holds the demonstration.
    """
    tried: list[AttemptResult] = []
    demonstration: Made | None = None
    for number in range(attempts):
        result, demonstration = await attempt(question.example, number)
        tried.append(result)
        if demonstration is not None or result.outcome in FAILED:
            break
    return {
        "id": question.example.id,
        "dataset": question.dataset,
        "outcome": tried[-1].outcome,
        "detail": tried[-1].detail,
        "attempts": [result.record() for result in tried],
        **record(demonstration),
    }


def run_demonstrations(
    config: DemonstrationConfig,
    job: Mapping[str, Any],
    prompts: Sequence[str],
    demonstrating: Callable[[], AbstractContextManager[Demonstrate]],
    write: Callable[[Sequence[Record], Sequence[Record], float], Result],
    *,
    overwrite: bool,
    progress: bool,
) -> Result:
    """Has the questions of `config.data` demonstrated, and writes the results. After a kill, the same call continues.

    Args:
      job: `workdir`, `outputs` and `doing` of the `Job`.
      prompts: the prompts of the models. Other wordings in a later version make another job.
      demonstrating: opens models and knowledge bases, and gives a function that makes a question's record (`best_of`).
      write: writes the files and returns the report. Its arguments are all records, the last record of each tried question in
        the order of the questions, and the seconds of this session.

    Raises:
      ValueError: as `Job.run`, or the data can't be used.
    """
    questions = all_questions(config.data, config.seed)

    def write_in_order(records: Sequence[Record], seconds: float) -> Result:
        last = {record["id"]: record for record in records}
        in_order = [last[question.example.id] for question in questions if question.example.id in last]
        return write(records, in_order, seconds)

    return Job(
        items=within(questions, config.questions),
        name=lambda question: question.example.id,
        unit="question",
        identity={
            **config.decisive(),
            "questions": digest_of(question.example for question in questions),
            "prompts": hashlib.sha256(json.dumps(prompts).encode()).hexdigest()[:16],
        },
        concurrency=config.concurrency,
        patience=config.patience,
        **job,
    ).run(demonstrating, write_in_order, overwrite=overwrite, progress=progress)


def load_student(path: str) -> Decoder:
    """A policy with its tokenizer and image processing, without its weights.

    Raises:
      ValueError: there is none at `path`; the message names config.student.
    """
    with naming("config.student"):
        model = load_without_weights(path)
    if not isinstance(model, Decoder) or model.tokenizer is None:
        raise ValueError(f"config.student={path!r} is no policy with a tokenizer")
    return model
