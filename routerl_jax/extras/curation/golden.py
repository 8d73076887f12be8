"""Makes golden trajectories of questions (R1-Router, arXiv 2505.22095, appendix A.2).

A language model makes them, and right ones are kept. Or they are made from the gold paths of the data sets.

WORKDIR/construct.json          settings and data of the job
WORKDIR/questions.jsonl         a record per finished question: its attempts, and its trajectory if one was right
WORKDIR/images/                 pictures of the questions of the trajectories
WORKDIR/train.jsonl, validation.jsonl, report.json, report.md    written when the job ends
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from routerl_jax.agents.agent import SearchTool
from routerl_jax.core.files import Journal
from routerl_jax.core.progress import Bar
from routerl_jax.core.rows import RowLocation
from routerl_jax.core.types import Example
from routerl_jax.data.gold_paths import gold_path
from routerl_jax.data.readers import in_turns
from routerl_jax.data.trajectories import (
    Trajectory,
    trajectory_of,
    trajectory_row,
    write_trajectories,
)
from routerl_jax.extras.curation.annotations import Annotations
from routerl_jax.extras.curation.attempts import FAILED, Attempt, Teacher
from routerl_jax.extras.curation.golden_balance import balanced, split
from routerl_jax.extras.curation.golden_config import ConstructConfig
from routerl_jax.extras.curation.golden_report import ConstructReport, make_report
from routerl_jax.extras.curation.job import begin, work_through
from routerl_jax.extras.curation.questions import IMAGES, Question, all_questions, digest_of, save_picture, within
from routerl_jax.extras.curation.services import Services
from routerl_jax.extras.curation.shots import Kind, shots
from routerl_jax.parallel.workdir import directory_lock
from routerl_jax.recipes.r1_router.steps import StepProtocol
from routerl_jax.services.background import shared_loop
from routerl_jax.services.base import ChatModel, conversation_json

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
    with directory_lock(workdir):
        examples = [question.example for question in questions]
        begin(
            {
                **config.decisive(),
                "questions": digest_of(examples, lambda e: [e.metadata["dataset"], *(_gold(e) if annotated else ())]),
                "prompts": _prompts(protocol),
            },
            workdir,
            overwrite,
            (*_MADE, IMAGES),
        )
        journal = Journal(workdir / _MADE[0])
        try:
            job = _Job(config, workdir, journal, within(questions, config.amount.questions))
            if job.remaining:
                model, tools = open_services()
                services = Services(model, tools, config.amount.search_timeout)
                parts: dict[str, Any] = {"protocol": protocol, "config": config.attempt, "services": services}
                teacher = (
                    Teacher(**parts)
                    if config.teacher == "model"
                    else Annotations(**parts, default_kbs=config.default_kbs)
                )
                shared_loop().run(job.run(teacher, progress))
        finally:
            journal.close()
        return _write(config, workdir, questions, _records(journal), job.seconds)


class _Job:
    """The questions that are left, and the outcomes of the others."""

    def __init__(
        self, config: ConstructConfig, workdir: pathlib.Path, journal: Journal, questions: Sequence[Question]
    ) -> None:
        self._config, self._workdir, self._journal = config, workdir, journal
        records = {record["id"]: record for record in _records(journal)}
        finished = {name for name, record in records.items() if record["outcome"] not in FAILED}
        self._counts = collections.Counter(records[name]["outcome"] for name in finished)
        self._accepted = collections.Counter(r["dataset"] for r in records.values() if r["outcome"] == "accepted")
        unfinished_questions = (question for question in questions if question.example.id not in finished)
        self.remaining = [question for question in unfinished_questions if not self._has_enough(question.dataset)]
        self._total = len(questions)
        self._tokens = sum(map(_tokens, records.values()))
        self.seconds = 0.0

    async def run(self, teacher: Teacher | Annotations, progress: bool) -> None:
        """Works on the questions that are left, `config.amount.concurrency` at a time.

        Raises:
          ValueError: too many questions failed in a row.
        """
        started = time.monotonic()
        try:
            with Bar(
                total=self._total,
                initial=self._total - len(self.remaining),
                desc="constructing",
                unit="question",
                disable=not progress,
            ) as bar:
                await work_through(
                    self.remaining,
                    lambda question: self._question(question, teacher),
                    self._finish,
                    concurrency=self._config.amount.concurrency,
                    patience=self._config.amount.patience,
                    unit="question",
                    bar=bar,
                    so_far=self._so_far,
                    skip=lambda question: self._has_enough(question.dataset),
                )
        finally:
            self.seconds = time.monotonic() - started

    def _has_enough(self, dataset: str) -> bool:
        return self._accepted[dataset] >= self._config.amount.per_dataset

    async def _question(self, question: Question, teacher: Teacher | Annotations) -> dict[str, Any]:
        """A question's record, after its attempts."""
        attempts: list[Attempt] = []
        for number in range(self._config.attempt.attempts if self._config.teacher == "model" else 1):
            attempts.append(await teacher.attempt(question.example, number))
            outcome = attempts[-1].outcome
            if outcome in FAILED or (outcome == "accepted" and self._config.attempt.keep == "first"):
                break
        right = [attempt for attempt in attempts if attempt.outcome == "accepted"]
        best = min(right, key=lambda attempt: attempt.subquestions, default=None)
        return {
            "id": question.example.id,
            "dataset": question.dataset,
            "outcome": "accepted" if best else attempts[-1].outcome,
            "attempts": [attempt.record() for attempt in attempts],
            "trajectory": trajectory_row(self._trajectory(question.example, best)) if best else None,
        }

    def _trajectory(self, example: Example, attempt: Attempt) -> Trajectory:
        images = tuple(save_picture(image, self._workdir / IMAGES) for image in example.images)
        return Trajectory(id=example.id, question=example.question, steps=tuple(attempt.steps), images=images)

    def _finish(self, record: Mapping[str, Any]) -> str:
        self._journal.append(record)
        self._counts[record["outcome"]] += 1
        self._tokens += _tokens(record)
        if record["outcome"] == "accepted":
            self._accepted[record["dataset"]] += 1
        failed = record["outcome"] in FAILED
        return f"{record['outcome']}: {record['attempts'][-1]['detail']}" if failed else ""

    def _so_far(self) -> str:
        failed = sum(self._counts[outcome] for outcome in FAILED)
        accepted = self._counts["accepted"]
        rejected = self._counts.total() - accepted - failed
        return f"{accepted} accepted, {rejected} rejected, {failed} failed, {self._tokens:,} tokens"


def _tokens(record: Mapping[str, Any]) -> int:
    return sum(attempt["prompt_tokens"] + attempt["tokens"] for attempt in record["attempts"])


def _records(journal: Journal) -> list[dict[str, Any]]:
    """The journal's records without the models' replies, which would take too much memory."""
    return [
        {**record, "attempts": [{k: v for k, v in attempt.items() if k != "replies"} for attempt in record["attempts"]]}
        for record in journal.read()
    ]


def _write(
    config: ConstructConfig,
    workdir: pathlib.Path,
    questions: Sequence[Question],
    records: Sequence[Mapping[str, Any]],
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


def _gold(example: Example) -> list[Any]:
    """A question's gold path, JSON-serialisable."""
    return [dataclasses.astuple(hop) for hop in gold_path(example) or ()]


def _prompts(protocol: StepProtocol) -> str:
    """A digest of the prompts, because a later version may change their wording."""
    kinds: tuple[Kind, ...] = ("route", "answer", "final")
    prompts = (protocol.route("", ()), protocol.answer("", ()), protocol.final("", ()))
    texts = [[prompt.system, prompt.user] for prompt in prompts] + [
        conversation_json(shots(protocol, kind, 99)) for kind in kinds
    ]
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:16]
