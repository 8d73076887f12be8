"""Golden trajectories from questions (R1-Router, arXiv 2505.22095, appendix A.2): made by a language model and kept if right,
or taken from what data sets say of their questions.

WORKDIR/construct.json          what the job is made of
WORKDIR/questions.jsonl         a record per finished question: its attempts, and its trajectory if one was right
WORKDIR/images/                 pictures of the trajectories' questions
WORKDIR/train.jsonl, validation.jsonl, report.json, report.md    written when the job ends
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import hashlib
import json
import pathlib
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from routerl_jax.agents.agent import SearchTool
from routerl_jax.core.files import write_whole
from routerl_jax.core.rows import Place
from routerl_jax.core.types import Example
from routerl_jax.curation.annotations import Annotations
from routerl_jax.curation.attempts import FAILED, Attempt, Teacher
from routerl_jax.curation.balance import balanced, split
from routerl_jax.curation.golden_config import ConstructConfig
from routerl_jax.curation.golden_report import ConstructReport, make_report
from routerl_jax.curation.job import Journal, check_same
from routerl_jax.curation.services import Services
from routerl_jax.curation.shots import Kind, shots
from routerl_jax.data.gold_paths import gold_path
from routerl_jax.data.readers import ExampleSource, in_turns, open_dataset, short_names
from routerl_jax.data.trajectories import (
    Trajectory,
    golden_step,
    trajectory_of,
    trajectory_row,
    write_trajectories,
)
from routerl_jax.llms.base import ChatModel, spoken
from routerl_jax.models.images import encoded_image, image_digest
from routerl_jax.parallel.workdir import alone
from routerl_jax.recipes.r1_router.steps import StepProtocol
from routerl_jax.remote.background import shared_loop

IMAGES = "images"
_MADE = ("construct.json", "questions.jsonl", "train.jsonl", "validation.jsonl", "report.json", "report.md")

OpenServices = Callable[[], tuple[ChatModel | None, Mapping[str, SearchTool]]]  # no model where none is asked


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """A question and the data set that it counts for."""

    dataset: str
    example: Example


def construct(
    config: ConstructConfig,
    workdir: pathlib.Path,
    open_services: OpenServices,
    *,
    overwrite: bool = False,
    progress: bool = True,
) -> ConstructReport:
    """Tries the questions of `config.data` and writes what came of them. Run again after a kill, it goes on where it was.

    Args:
      open_services: gives the language model and the knowledge bases; not called where nothing is left to do.
      overwrite: throw away what a job of other settings has made in `workdir`.

    Raises:
      ValueError: `workdir` holds a job of other settings or another process is at it, the data can't be used, or too many
        questions failed in a row.
    """
    questions = all_questions(open_dataset(config.data), config)
    protocol = StepProtocol(tools=tuple(config.knowledge))
    with alone(workdir):
        _begin(
            {
                **config.decisive(),
                "questions": _digest(questions, config.teacher == "annotations"),
                "prompts": _prompts(protocol),
            },
            workdir,
            overwrite,
        )
        journal = Journal(workdir / _MADE[1])
        try:
            job = _Job(config, workdir, journal, _within(questions, config.amount.questions))
            if job.left:
                model, tools = open_services()
                services = Services(model, tools, config.amount.search_timeout)
                given: dict[str, Any] = {"protocol": protocol, "config": config.attempt, "services": services}
                teacher = Teacher(**given) if config.teacher == "model" else Annotations(**given, homes=config.home_of)
                shared_loop().run(job.run(teacher, progress))
        finally:
            journal.close()
        return _write(config, workdir, questions, _records(journal), job.seconds)


def all_questions(source: ExampleSource, config: ConstructConfig) -> list[Question]:
    """All questions: one of each data set in turn, those of a data set shuffled by `config.seed`.

    Raises:
      ValueError: there are golden steps among them.
    """
    names = short_names([part.strip() for part in config.data.split(",")])
    by_dataset: dict[str, list[Question]] = {}
    for example in (source[i] for i in range(len(source))):
        if golden_step(example) is not None:
            raise ValueError(f"config.data={config.data!r}: these are trajectories already; name questions")
        dataset = str(example.metadata.get("dataset") or example.metadata.get("data_source") or names[0])
        example = dataclasses.replace(example, metadata={**example.metadata, "dataset": dataset})
        by_dataset.setdefault(dataset, []).append(Question(dataset=dataset, example=example))
    shuffled = []
    for number, items in enumerate(by_dataset.values()):
        order = np.random.default_rng([config.seed, number]).permutation(len(items))
        shuffled.append([items[i] for i in order])
    return [shuffled[number][item] for number, item in in_turns([len(items) for items in shuffled]).tolist()]


def _within(questions: Sequence[Question], most: int) -> list[Question]:
    """Those among the first `most` of their data set; 0: all."""
    seen: collections.Counter[str] = collections.Counter()
    kept = []
    for question in questions:
        seen[question.dataset] += 1
        if not most or seen[question.dataset] <= most:
            kept.append(question)
    return kept


class _Job:
    """The questions that are left, and what became of the others."""

    def __init__(
        self, config: ConstructConfig, workdir: pathlib.Path, journal: Journal, questions: Sequence[Question]
    ) -> None:
        self._config, self._workdir, self._journal = config, workdir, journal
        records = {record["id"]: record for record in _records(journal)}
        finished = {name for name, record in records.items() if record["outcome"] not in FAILED}
        self._counts = collections.Counter(records[name]["outcome"] for name in finished)
        self._accepted = collections.Counter(r["dataset"] for r in records.values() if r["outcome"] == "accepted")
        open_ = (question for question in questions if question.example.id not in finished)
        self.left = [question for question in open_ if not self._enough(question.dataset)]
        self._total = len(questions)
        self._failures, self._failure = 0, ""  # in a row, and the last one
        self._tokens = sum(map(_tokens, records.values()))
        self.seconds = 0.0

    async def run(self, teacher: Teacher | Annotations, progress: bool) -> None:
        """Works on what is left, so many at a time.

        Raises:
          ValueError: too many questions failed in a row.
        """
        started = time.monotonic()
        waiting = collections.deque(self.left)
        running: set[asyncio.Task[dict[str, Any]]] = set()
        bar = tqdm(
            total=self._total,
            initial=self._total - len(waiting),
            desc="constructing",
            unit="question",
            disable=not progress,
        )
        try:
            while waiting or running:
                while waiting and len(running) < self._config.amount.concurrency:
                    question = waiting.popleft()
                    if self._enough(question.dataset):
                        bar.update()
                    else:
                        running.add(asyncio.ensure_future(self._question(question, teacher)))
                if running:
                    done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        self._finish(task.result())
                        bar.update()
                    bar.set_postfix_str(self._so_far())
                    self._check_failures()
        finally:
            for task in running:
                task.cancel()
            bar.close()
            self.seconds = time.monotonic() - started

    def _enough(self, dataset: str) -> bool:
        return self._accepted[dataset] >= self._config.amount.per_dataset

    async def _question(self, question: Question, teacher: Teacher | Annotations) -> dict[str, Any]:
        """A question's record, after as many attempts as it takes."""
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

    def _finish(self, record: Mapping[str, Any]) -> None:
        self._journal.append(record)
        self._counts[record["outcome"]] += 1
        self._tokens += _tokens(record)
        if record["outcome"] == "accepted":
            self._accepted[record["dataset"]] += 1
        failed = record["outcome"] in FAILED
        self._failures = self._failures + 1 if failed else 0
        self._failure = f"{record['outcome']}: {record['attempts'][-1]['detail']}" if failed else ""

    def _check_failures(self) -> None:
        if self._failures >= self._config.amount.patience:
            raise ValueError(
                f"{self._failures} questions in a row failed ({self._failure}). What is finished is kept: mend that and run "
                "the same command again"
            )

    def _so_far(self) -> str:
        failed = sum(self._counts[outcome] for outcome in FAILED)
        accepted = self._counts["accepted"]
        rejected = self._counts.total() - accepted - failed
        return f"{accepted} accepted, {rejected} rejected, {failed} failed, {self._tokens:,} tokens"


def _tokens(record: Mapping[str, Any]) -> int:
    return sum(attempt["prompt_tokens"] + attempt["tokens"] for attempt in record["attempts"])


def _records(journal: Journal) -> list[dict[str, Any]]:
    """The journal's records without replies, which would fill the memory."""
    return [
        {**record, "attempts": [{k: v for k, v in attempt.items() if k != "replies"} for attempt in record["attempts"]]}
        for record in journal.read()
    ]


def save_picture(image: Any, directory: pathlib.Path) -> str:
    """Puts a picture into a directory, under its own name where it has one and that is free; the name there."""
    content, form = encoded_image(image)
    digest = hashlib.sha256(content).hexdigest()[:16]
    path = directory / f"{digest}.{form}"
    if isinstance(image, pathlib.Path) or (isinstance(image, str) and not image.startswith("data:")):
        path = directory / pathlib.Path(image).name
        path = path.with_suffix(".png") if form == "png" else path  # it may have been converted
    if path.is_file() and path.read_bytes() != content:
        path = directory / f"{path.stem}-{digest}{path.suffix}"
    if not path.is_file():
        write_whole(path, content)
    return path.name


def _write(
    config: ConstructConfig,
    workdir: pathlib.Path,
    questions: Sequence[Question],
    records: Sequence[Mapping[str, Any]],
    seconds: float,
) -> ConstructReport:
    """Files of what was accepted, data sets in turns, each in the order in which its questions are tried; and the report."""
    place = Place(workdir / _MADE[1], "line", 0)
    last = {record["id"]: (number, record) for number, record in enumerate(records, 1)}
    found = []
    for question in questions:
        number, record = last.get(question.example.id, (0, None))
        if record is not None and record["trajectory"] is not None:
            found.append((question.dataset, trajectory_of(record["trajectory"], place._replace(number=number))))
    parts = {name: split(items, config.amount.validation) for name, items in balanced(found, config.amount).items()}
    for index, name in enumerate(("train", "validation")):
        lists = [part[index] for part in parts.values()]
        items = [lists[which][place] for which, place in in_turns([*map(len, lists)])]
        write_trajectories(workdir / f"{name}.jsonl", items)
    datasets = collections.Counter(question.dataset for question in questions)
    report = make_report(config, datasets, records, parts, seconds)
    for name, text in (("report.json", json.dumps(report.record(), indent=2)), ("report.md", str(report))):
        write_whole(workdir / name, text + "\n")
    return report


def _begin(made_of: Mapping[str, Any], workdir: pathlib.Path, overwrite: bool) -> None:
    """Makes sure that the job in `workdir` is this one. Raises ValueError if it is another that must stay."""
    path = workdir / _MADE[0]
    try:
        check_same(made_of, path, "go on with the same ones, use another --workdir, or give --overwrite")
    except ValueError:
        if not overwrite:
            raise
        _clear(workdir)
        check_same(made_of, path, "")


def _clear(workdir: pathlib.Path) -> None:
    """Removes what a job has made."""
    for name in reversed(_MADE):  # what says that there is a job goes last
        (workdir / name).unlink(missing_ok=True)
        if name == "questions.jsonl":
            shutil.rmtree(workdir / IMAGES, ignore_errors=True)


def _digest(questions: Sequence[Question], annotated: bool) -> str:
    """Of what is asked, shown and right, and, where trajectories are made of it, of the gold paths."""
    rows = [
        [
            *(q.dataset, q.example.id, q.example.question, q.example.answers),
            [image_digest(image) for image in q.example.images],
            [dataclasses.astuple(hop) for hop in gold_path(q.example) or ()] if annotated else [],
        ]
        for q in questions
    ]
    return f"{len(rows)} questions, {hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]}"


def _prompts(protocol: StepProtocol) -> str:
    """Of what is said to the model, which a later version may word anew."""
    kinds: tuple[Kind, ...] = ("route", "answer", "final")
    said = (protocol.route("", ()), protocol.answer("", ()), protocol.final("", ()))
    texts = [[part.system, part.user] for part in said] + [spoken(shots(protocol, kind, 99)) for kind in kinds]
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:16]
