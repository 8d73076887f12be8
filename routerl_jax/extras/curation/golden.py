"""Makes golden trajectories of questions (R1-Router, arXiv 2505.22095, appendix A.2).

A language model makes them, and right ones are kept. Or they are made from the gold paths of the data sets.

WORKDIR/construct.json          settings and data of the job
WORKDIR/questions.jsonl         a record per finished question: its attempts, and its trajectory if one was right
WORKDIR/images/                 pictures of the questions of the trajectories
WORKDIR/train.jsonl, validation.jsonl, report.json, report.md    written when the job ends
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from absl import logging

from routerl_jax.agents.agent import SearchTool
from routerl_jax.core.config import Amount, BelowOne, Count, NonNegative, PositiveFraction, Seed, Size, checked
from routerl_jax.core.rows import RowLocation
from routerl_jax.core.types import Example
from routerl_jax.data.gold_paths import gold_path
from routerl_jax.data.readers import in_turns
from routerl_jax.data.trajectories import (
    RouteStep,
    Trajectory,
    summarize_trajectories,
    trajectory_of,
    trajectory_row,
    write_trajectories,
)
from routerl_jax.extras.curation.attempts import Annotations, AttemptConfig, Kind, Teacher, shots
from routerl_jax.extras.curation.job import (
    FAILED,
    Attempt,
    Job,
    JobSettings,
    ModelUse,
    Record,
    Report,
    Services,
    Tally,
    Work,
    by_frequency,
    listed,
    sources_of,
    within_share,
)
from routerl_jax.extras.curation.questions import (
    IMAGES,
    Question,
    all_questions,
    digest,
    digest_of,
    save_picture,
    within,
)
from routerl_jax.recipes.r1_router.steps import StepProtocol
from routerl_jax.services.base import ChatModel, conversation_json
from routerl_jax.services.config import ChatModelConfig
from routerl_jax.training.sections import KnowledgeConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class AmountConfig(JobSettings):
    """How much is made, and how much of it goes into the files. A job may be continued with other values."""

    questions: Amount = -1  # most questions that are tried per data set; -1: all
    per_dataset: Size = 1000  # most trajectories per data set; then no more of its questions are tried
    dataset_ratio: NonNegative = 2.0  # most trajectories of a data set, relative to the smallest one; 0: no limit
    at_least: Count = 100  # a data set keeps so many trajectories, if it has them, whatever the ratio
    pattern_share: PositiveFraction = 1.0  # largest share of a data set's trajectories with one sequence of retrievers
    validation: BelowOne = 0.2  # share of each data set's trajectories that goes to validation.jsonl

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
        by_model = self.teacher == "model"
        return {
            "seed": self.seed,
            **({} if by_model else {"default_kb": self.default_kb}),
            **sources_of(self.llm if by_model else None, self.knowledge),
            "attempt": dataclasses.asdict(self.attempt),
        }


Found = tuple[str, Trajectory]  # data set, trajectory


def pattern_of(trajectory: Trajectory) -> str:
    """The retrievers of a trajectory in order, such as "text retriever > table retriever > none"."""
    return " > ".join("+".join(step.retrievers) for step in trajectory.steps if isinstance(step, RouteStep))


def balanced(trajectories: Sequence[Found], amount: AmountConfig) -> dict[str, list[Trajectory]]:
    """The trajectories that `per_dataset`, `pattern_share` and `dataset_ratio` allow, by data set; the first ones of each.

    What `dataset_ratio` removes is logged as a warning.
    """
    by_dataset: dict[str, list[Trajectory]] = {}
    for dataset, trajectory in trajectories:
        by_dataset.setdefault(dataset, []).append(trajectory)
    by_dataset = {
        name: within_share(items[: amount.per_dataset], amount.pattern_share, pattern_of)
        for name, items in by_dataset.items()
    }
    if amount.dataset_ratio and by_dataset:
        fewest = min(by_dataset, key=lambda name: len(by_dataset[name]))
        limit = max(int(amount.dataset_ratio * len(by_dataset[fewest])), amount.at_least)
        if reduced := [f"{name} {len(items):,}" for name, items in by_dataset.items() if len(items) > limit]:
            logging.warning(
                "of data set %s %d were accepted, so of others only %d each go into the files (%s; "
                "config.amount.dataset_ratio=%g, at_least=%d). The rest stays in questions.jsonl: the same command with a "
                "larger ratio, or --config.amount.dataset_ratio=0 for all, takes it",
                fewest,
                len(by_dataset[fewest]),
                limit,
                ", ".join(reduced),
                amount.dataset_ratio,
                amount.at_least,
            )
        by_dataset = {name: items[:limit] for name, items in by_dataset.items()}
    return by_dataset


def split(items: Sequence[Trajectory], validation: float) -> tuple[list[Trajectory], list[Trajectory]]:
    """(training, validation). The last `validation` share is held out; at least one of the items stays for training."""
    held_out = min(round(validation * len(items)), max(len(items) - 1, 0))
    return list(items[: len(items) - held_out]), list(items[len(items) - held_out :])


@dataclasses.dataclass(frozen=True, kw_only=True)
class DatasetRow:
    """Numbers of a data set's questions and trajectories.

    Attributes:
      questions: all questions of the data set.
      tried: accepted, rejected and failed questions together.
      train, validation: trajectories in the files. Accepted ones that balancing left out are in neither.
      reasons: questions that were not accepted, by the outcome of their last attempt.
      steps: trajectories in the files by their number of steps.
      retrievers: steps in the files by their gold retriever.
      patterns: trajectories in the files by their sequence of retrievers.
    """

    questions: int
    tried: int
    accepted: int
    rejected: int
    failed: int
    train: int
    validation: int
    reasons: Mapping[str, int]
    steps: Mapping[int, int]
    retrievers: Mapping[str, int]
    patterns: Mapping[str, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConstructReport(Report):
    """Trajectories by data set, and their cost.

    Attributes:
      attempts: number of attempts at all questions, by outcome.
      searches: number of searches in all sessions. Like the model's use, it leaves out questions that a kill interrupted.
    """

    datasets: Mapping[str, DatasetRow]
    attempts: Mapping[str, int]
    searches: int

    def __str__(self) -> str:
        columns = ("tried", "accepted", "rejected", "failed", "train", "validation")
        lines = [f"| data set | questions | {' | '.join(columns)} |", "|---|" + "---|" * (len(columns) + 1)]
        for name, row in self.datasets.items():
            lines.append(f"| {name} | {row.questions} | {' | '.join(str(getattr(row, key)) for key in columns)} |")
        counts_of = {
            "not accepted because of": self._total("reasons"),
            "attempts": self.attempts,
            "steps per trajectory": {f"{key} steps": value for key, value in self._total("steps").items()},
            "gold retrievers": self._total("retrievers"),
            "their sequences": self._total("patterns"),
        }
        lines += ["", *(f"- {name}: {listed(counts)}" for name, counts in counts_of.items())]
        left_out = sum(row.accepted - row.train - row.validation for row in self.datasets.values())
        lines += [f"- accepted, but in no file, for balance's sake (config.amount): {left_out:,}"] if left_out else []
        if self.model:
            lines.append(f"- {self.model}: {self.use}")
        lines.append(f"- {self.searches:,} searches; {self.seconds:,.0f} s in this session")
        return "\n".join(lines)

    def _total(self, key: str) -> dict[Any, int]:
        """A field summed over all data sets, the most frequent first."""
        total: collections.Counter[Any] = collections.Counter()
        for row in self.datasets.values():
            total.update(getattr(row, key))
        return dict(total.most_common())


def make_report(
    config: ConstructConfig,
    datasets: Mapping[str, int],
    records: Sequence[Mapping[str, Any]],
    parts: Mapping[str, tuple[list[Trajectory], list[Trajectory]]],
    seconds: float,
) -> ConstructReport:
    """Counts the records of a job.

    Args:
      datasets: number of questions by data set.
      records: records of the journal. If a question was tried again, its last outcome counts, and the cost of all attempts.
      parts: training and validation trajectories by data set.
    """
    outcomes = {record["id"]: (record["dataset"], record["outcome"]) for record in records}
    attempts = [attempt for record in records for attempt in record["attempts"]]
    return ConstructReport(
        model=config.llm.model if config.teacher == "model" else "",
        datasets={
            name: _row(count, [o for dataset, o in outcomes.values() if dataset == name], *parts.get(name, ([], [])))
            for name, count in datasets.items()
        },
        attempts=by_frequency(attempt["outcome"] for attempt in attempts),
        use=ModelUse.counted(attempts, config.amount),
        searches=sum(attempt["searches"] for attempt in attempts),
        seconds=round(seconds, 1),
    )


def _row(questions: int, outcomes: Sequence[str], train: list[Trajectory], validation: list[Trajectory]) -> DatasetRow:
    accepted, failed = outcomes.count("accepted"), sum(outcome in FAILED for outcome in outcomes)
    trajectories = [*train, *validation]
    return DatasetRow(
        questions=questions,
        tried=len(outcomes),
        accepted=accepted,
        rejected=len(outcomes) - accepted - failed,
        failed=failed,
        train=len(train),
        validation=len(validation),
        reasons=by_frequency(outcome for outcome in outcomes if outcome != "accepted"),
        steps=by_frequency(len(trajectory.steps) for trajectory in trajectories),
        retrievers=dict(summarize_trajectories(trajectories).retrievers),
        patterns=by_frequency(map(pattern_of, trajectories)),
    )


_MADE = ("questions.jsonl", "train.jsonl", "validation.jsonl", "report.json", "report.md")

OpenServices = Callable[[], tuple[ChatModel | None, Mapping[str, SearchTool]]]  # the model is None if none is needed


def construct(
    config: ConstructConfig,
    workdir: pathlib.Path,
    open_services: OpenServices,
    *,
    overwrite: bool = False,
    progress: bool = True,
) -> ConstructReport:
    """Makes trajectories of the questions of `config.data`, and writes them. After a kill, the same call continues the job.

    Args:
      open_services: opens the language model and the knowledge bases. It is not called if nothing is left to do.
      overwrite: delete the files of a job with other settings in `workdir`.

    Raises:
      ValueError: `workdir` holds a job with other settings, another process uses it, the data can't be used, or too many
        questions failed in a row.
    """
    questions = all_questions(config.data, config.seed)
    protocol, annotated = StepProtocol(tools=tuple(config.knowledge)), config.teacher == "annotations"
    examples = [question.example for question in questions]

    def decides(example: Example) -> list[Any]:
        path = [dataclasses.astuple(hop) for hop in gold_path(example) or ()] if annotated else []
        return [example.metadata["dataset"], *path]

    @contextlib.contextmanager
    def teaching() -> Iterator[Work[Question]]:
        model, tools = open_services()
        services = Services(model, tools, config.amount.search_timeout)
        parts: dict[str, Any] = {"protocol": protocol, "config": config.attempt, "services": services}
        teacher = Annotations(**parts, default_kbs=config.default_kbs) if annotated else Teacher(**parts)
        yield lambda question: _record(question, teacher, config, workdir / IMAGES)

    return Job(
        items=within(questions, config.amount.questions),
        name=lambda question: question.example.id,
        unit="question",
        workdir=workdir,
        identity={
            **config.decisive(),
            "questions": digest_of(examples, decides),
            "prompts": _prompts(protocol),
        },
        outputs=(*_MADE, IMAGES),
        doing="constructing",
        settings=config.amount,
    ).run(
        teaching,
        functools.partial(_write, config, workdir, questions),
        tally=_Tally(config.amount.per_dataset),
        overwrite=overwrite,
        progress=progress,
    )


class _Tally(Tally[Question]):
    """Also counts trajectories by data set, of which each gets so many, and tokens."""

    def __init__(self, per_dataset: int) -> None:
        super().__init__()
        self._accepted: collections.Counter[str] = collections.Counter()
        self._per_dataset, self._tokens = per_dataset, 0

    def add(self, record: Record) -> None:
        super().add(record)
        self._accepted[record["dataset"]] += record["outcome"] == "accepted"
        self._tokens += sum(attempt["prompt_tokens"] + attempt["tokens"] for attempt in record["attempts"])

    def has_enough(self, item: Question) -> bool:
        return self._accepted[item.dataset] >= self._per_dataset

    def __str__(self) -> str:
        failed, accepted = sum(self.counts[outcome] for outcome in FAILED), self.counts["accepted"]
        rejected = self.counts.total() - accepted - failed
        return f"{accepted} accepted, {rejected} rejected, {failed} failed, {self._tokens:,} tokens"


async def _record(
    question: Question, teacher: Teacher | Annotations, config: ConstructConfig, images: pathlib.Path
) -> dict[str, Any]:
    """A question's record, after its attempts. Pictures of a trajectory are saved in `images`."""
    example, attempts = question.example, list[Attempt]()
    for number in range(config.attempt.attempts if config.teacher == "model" else 1):
        attempts.append(await teacher.attempt(example, number))
        outcome = attempts[-1].outcome
        if outcome in FAILED or (outcome == "accepted" and config.attempt.keep == "first"):
            break
    right = [attempt for attempt in attempts if attempt.outcome == "accepted"]
    best = min(right, key=lambda attempt: attempt.subquestions, default=None)
    trajectory = None
    if best:
        pictures = tuple(save_picture(image, images) for image in example.images)
        trajectory = trajectory_row(
            Trajectory(id=example.id, question=example.question, steps=tuple(best.steps), images=pictures)
        )
    return {
        "id": example.id,
        "dataset": question.dataset,
        "outcome": "accepted" if best else attempts[-1].outcome,
        "attempts": [attempt.record() for attempt in attempts],
        "trajectory": trajectory,
    }


def _write(
    config: ConstructConfig,
    workdir: pathlib.Path,
    questions: Sequence[Question],
    records: Sequence[Record],
    seconds: float,
) -> ConstructReport:
    """Writes the files of accepted trajectories, and the report. Data sets take turns, each in the order of its questions."""
    position = RowLocation(workdir / _MADE[0], "line", 0)
    last_records = {record["id"]: (number, record) for number, record in enumerate(records, 1)}
    accepted = []
    for question in questions:
        number, record = last_records.get(question.example.id, (0, None))
        if record is not None and record["trajectory"] is not None:
            accepted.append((question.dataset, trajectory_of(record["trajectory"], position._replace(number=number))))
    parts = {name: split(items, config.amount.validation) for name, items in balanced(accepted, config.amount).items()}
    for index, name in enumerate(("train", "validation")):
        lists = [part[index] for part in parts.values()]
        items = [lists[dataset][position] for dataset, position in in_turns([*map(len, lists)])]
        write_trajectories(workdir / f"{name}.jsonl", items)
    datasets = collections.Counter(question.dataset for question in questions)
    report = make_report(config, datasets, records, parts, seconds)
    report.write(workdir)
    return report


def _prompts(protocol: StepProtocol) -> str:
    """A digest of the prompts, because a later version may change their wording."""
    kinds: tuple[Kind, ...] = ("route", "answer", "final")
    prompts = (protocol.route("", ()), protocol.answer("", ()), protocol.final("", ()))
    texts = [[prompt.system, prompt.user] for prompt in prompts] + [
        conversation_json(shots(protocol, kind, 99)) for kind in kinds
    ]
    return digest(texts)
