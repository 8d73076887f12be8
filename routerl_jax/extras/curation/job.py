"""What all jobs share: settings, a directory that holds one job, work that is saved item by item, attempts and their cost, kept
replies, searches in batches, reports; and jobs that make demonstrations for a policy.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import json
import pathlib
import shutil
import threading
import time
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, Literal, Protocol, TypeVar

from routerl_jax.agents.agent import SearchTool
from routerl_jax.agents.calls import search_calls
from routerl_jax.core.background import in_thread, shared_loop
from routerl_jax.core.config import Amount, Count, NonNegative, Positive, Seed, Size, checked, naming
from routerl_jax.core.files import Journal, check_same, write_atomic
from routerl_jax.core.progress import Bar, waiting
from routerl_jax.core.types import Call, Example, Message, Query
from routerl_jax.data.trajectories import AnswerStep, Step
from routerl_jax.extras.curation.questions import Question, all_questions, digest, digest_of, within
from routerl_jax.models.decoder import Decoder
from routerl_jax.models.huggingface import load_without_weights
from routerl_jax.parallel.workdir import directory_lock
from routerl_jax.recipes.recipe import AgentConfig
from routerl_jax.rewards.metrics import ANSWER_METRICS, NORMALIZERS
from routerl_jax.services import faults
from routerl_jax.services.base import ChatModel, Completion
from routerl_jax.services.cache import Cache, Entry
from routerl_jax.services.config import ChatModelConfig
from routerl_jax.training.sections import KnowledgeConfig

T = TypeVar("T")
R = TypeVar("R")
Result = TypeVar("Result")
Made = TypeVar("Made")  # a demonstration
Record = Mapping[str, Any]  # of an item
Work = Callable[[T], Awaitable[Record]]  # makes the record of an item
_MOST = 256  # most items of a batch
_ROUNDING = 1e-6  # tolerance for the rounding of a share times a number
MADE_OF = "construct.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class JobSettings:
    """How a job asks models and knowledge bases. It may be continued with other values."""

    concurrency: Size = 32  # questions (or concepts) in progress at once
    patience: Size = 20  # the job stops after so many failures in a row
    search_timeout: Positive = 60.0  # seconds after which a search counts as failed
    read_price: NonNegative = 0.0  # price of a million tokens that the model reads, for the report
    write_price: NonNegative = 0.0  # price of a million tokens that the model writes


def sources_of(llm: ChatModelConfig | None, knowledge: Mapping[str, KnowledgeConfig]) -> dict[str, Any]:
    """The parts of a job's identity that say who is asked and where is searched."""
    return {
        **({"llm": model_identity(llm)} if llm else {}),
        "knowledge": {name: dataclasses.asdict(section) for name, section in knowledge.items()},
    }


def model_identity(model: ChatModelConfig) -> dict[str, Any]:
    """The settings of a language model that its replies depend on. URL and speed may differ."""
    return {key: getattr(model, key) for key in ("kind", "model", "extra", "max_length", "dtype")}


def begin(identity: Mapping[str, Any], workdir: pathlib.Path, overwrite: bool, outputs: Sequence[str]) -> None:
    """Makes sure that `workdir` holds this job, or none yet.

    Args:
      identity: the settings and data that identify the job, JSON-serialisable.
      overwrite: delete the files of a job with other settings.
      outputs: names of the job's files and directories.

    Raises:
      ValueError: there is another job, and `overwrite` is False.
    """
    path = workdir / MADE_OF
    try:
        check_same(identity, path, "go on with the same ones, use another --workdir, or give --overwrite")
    except ValueError:
        if not overwrite:
            raise
        for name in outputs:
            output = workdir / name
            if output.is_dir():
                shutil.rmtree(output, ignore_errors=True)
            else:
                output.unlink(missing_ok=True)
        path.unlink()  # last, because this file says that there is a job
        check_same(identity, path, "")


class Tally(Generic[T]):
    """What a job has done so far, for its progress bar."""

    def __init__(self) -> None:
        self.counts: collections.Counter[str] = collections.Counter()  # by outcome

    def add(self, record: Record) -> None:
        """Counts the record of an item."""
        self.counts[record["outcome"]] += 1

    def has_enough(self, item: T) -> bool:
        """Whether an item needs no work any more."""
        return False

    def __str__(self) -> str:
        return listed(self.counts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job(Generic[T]):
    """Work on many items, whose records are saved one by one. After a kill, the same job goes on where it was.

    A record has the `id` of its item, an `outcome`, and a `detail` of its own or of its last attempt. An item whose outcome is
    in `FAILED` is tried again in another session.

    Attributes:
      items: all items. `name` gives the id of one, and `unit` is the word for one in messages.
      identity: the settings and data that identify the job, JSON-serialisable.
      outputs: names of the job's files and directories. The first is the journal of its records.
      doing: label of the progress bar.
    """

    items: Sequence[T]
    name: Callable[[T], str]
    unit: str
    workdir: pathlib.Path
    identity: Mapping[str, Any]
    outputs: Sequence[str]
    doing: str
    settings: JobSettings

    def run(
        self,
        opened: Callable[[], AbstractContextManager[Work[T]]],
        write: Callable[[Sequence[Record], float], Result],
        *,
        tally: Tally[T] | None = None,
        overwrite: bool = False,
        progress: bool = True,
    ) -> Result:
        """Works on the items that are left, and writes the results.

        Args:
          opened: opens models and knowledge bases, and gives what makes the record of an item. It is not called if nothing is
            left to do.
          write: writes the files and returns the report. It gets all records, and the seconds of this session.
          overwrite: delete the files of a job with other settings in `workdir`.

        Raises:
          ValueError: `workdir` holds a job with other settings, another process uses it, or too many items failed in a row.
        """
        started, tally = time.monotonic(), tally or Tally()
        with directory_lock(self.workdir):
            begin(self.identity, self.workdir, overwrite, self.outputs)
            journal = Journal(self.workdir / self.outputs[0])
            try:
                last = {record["id"]: record for record in _records(journal)}
                finished = {name: record for name, record in last.items() if record["outcome"] not in FAILED}
                for record in finished.values():
                    tally.add(record)
                remaining = [
                    item for item in self.items if self.name(item) not in finished and not tally.has_enough(item)
                ]
                if remaining:
                    with opened() as work:
                        shared_loop().run(self._work_through(remaining, work, journal, tally, progress))
            finally:
                journal.close()
            return write(_records(journal), time.monotonic() - started)

    async def _work_through(
        self, remaining: Sequence[T], work: Work[T], journal: Journal, tally: Tally[T], progress: bool
    ) -> None:
        pending = collections.deque(remaining)
        running: set[asyncio.Future[Record]] = set()
        failures, total = 0, len(self.items)
        bar = Bar(total=total, initial=total - len(pending), desc=self.doing, unit=self.unit, disable=not progress)
        try:
            while pending or running:
                while pending and len(running) < self.settings.concurrency:
                    item = pending.popleft()
                    if tally.has_enough(item):
                        bar.update()
                    else:
                        running.add(asyncio.ensure_future(work(item)))
                if not running:
                    continue
                with waiting(f"{len(running)} {self.unit}{'s' if len(running) > 1 else ''} at work"):
                    completed, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                reason = ""
                for task in completed:
                    record = task.result()
                    journal.append(record)
                    tally.add(record)
                    failed = record["outcome"] in FAILED
                    failures = failures + 1 if failed else 0
                    if failed:
                        detail = record["detail"] if "detail" in record else record["attempts"][-1]["detail"]
                        reason = f"{record['outcome']}: {detail}"
                    bar.update()
                bar.set_postfix_str(str(tally))
                if failures >= self.settings.patience:
                    raise ValueError(
                        f"{failures} {self.unit}s in a row failed ({reason}). What is finished is kept: mend that and run the "
                        "same command again"
                    )
        finally:
            bar.close()
            for task in running:
                task.cancel()


def _records(journal: Journal) -> list[Record]:
    """The journal's records without the models' replies, which would take too much memory."""
    return [
        {
            **record,
            "attempts": [
                {key: value for key, value in attempt.items() if key != "replies"}
                for attempt in record.get("attempts", ())
            ],
        }
        for record in journal.read()
    ]


def within_share(items: Sequence[T], share: float, kind: Callable[[T], Hashable]) -> list[T]:
    """The first items such that no kind has more than `share` of them, or an equal part if that is larger."""
    counts = collections.Counter(map(kind, items))
    if len(counts) < 2:
        return list(items)
    share = max(share, 1 / len(counts))
    while (largest := counts.most_common(1)[0])[1] > share * counts.total() + _ROUNDING:
        counts[largest[0]] -= 1
    selected = []
    for item in items:
        if counts[kind(item)] > 0:
            counts[kind(item)] -= 1
            selected.append(item)
    return selected


# --- attempts ---

Outcome = Literal[
    "accepted",
    "wrong answer",
    "unreadable route",
    "unreadable answer",
    "too few searches",
    "no gold path",
    "gold passage not found",
    "model failed",
    "search failed",
    "refused",
    "unreadable turn",
    "out of form",
    "too long",
    "no picture",
    "not shown",
    "unreadable reply",
    "answer without the concept",
    "no question word",
    "given away",
    "not as one would ask",
    "unknown kind",
    "empty reply",
    "no thought",
    "no action",
    "several actions",
    "unreadable box",
    "refused box",
    "look before a page",
    "answer before a search",
    "no answer",
    "too few steps",
    "unreadable verdict",
    "judge failed",
]
# Outcomes that say nothing about the question. It is tried again.
FAILED: tuple[Outcome, ...] = ("model failed", "search failed", "judge failed")


@dataclasses.dataclass(kw_only=True)
class Attempt:
    """The result of an attempt, and its cost.

    Attributes:
      detail: what could not be read or reached, in one line.
      answer: the model's final answer; "" if it gave none.
      steps: the steps of the trajectory. The final one has the accepted answers of the data set.
      replies: the model's reply in each chat.
      prompt_tokens, tokens: number of tokens read and written, if the model's server counts them.
    """

    outcome: Outcome = "accepted"
    detail: str = ""
    answer: str = ""
    steps: list[Step] = dataclasses.field(default_factory=list)
    replies: list[str] = dataclasses.field(default_factory=list)
    searches: int = 0
    prompt_tokens: int = 0
    tokens: int = 0

    def record(self) -> dict[str, Any]:
        """All fields except the steps, and the number of replies; JSON-serialisable."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "steps"}
        return {"calls": len(self.replies), **fields}

    @property
    def subquestions(self) -> int:
        """Number of sub-questions that were answered."""
        return sum(isinstance(step, AnswerStep) for step in self.steps)


class AttemptFailed(Exception):
    """Ends an attempt that can't go on, with its outcome."""

    def __init__(self, outcome: Outcome, detail: str) -> None:
        super().__init__(detail)
        self.outcome: Outcome = outcome


async def model_reply(
    services: Services,
    conversation: Sequence[Message],
    attempt: Attempt,
    *,
    max_tokens: int,
    temperature: float,
    sample: int,
) -> str:
    """The model's reply, which is also added to its attempt. Raises AttemptFailed if the model failed."""
    reply = await services.ask(conversation, max_tokens=max_tokens, temperature=temperature, sample=sample)
    attempt.prompt_tokens += reply.prompt_tokens
    attempt.tokens += reply.tokens
    attempt.replies.append(reply.text)
    if reply.error is not None:
        raise AttemptFailed("model failed", reply.error)
    return reply.text


# --- models and knowledge bases ---


class ReplyFile(Cache):
    """A cache for `services.load.CachedModel` that is a journal: nothing is ever removed.

    After `close`, the file opens again when there is something to write. Values are texts in UTF-8, and all of them are held in
    memory.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self.name = str(path)
        self._path = path
        self._journal: Journal | None = Journal(path)
        self._values = {record["key"]: record["value"] for record in self._journal.read()}
        self._lock = threading.Lock()

    def entries(self, keys: Sequence[str]) -> dict[str, Entry]:
        """The entries of those keys that the file has."""
        with self._lock:
            return {key: Entry(self._values[key].encode(), None) for key in keys if key in self._values}

    def set_many(self, items: Mapping[str, bytes], ttl: float | None = None) -> None:
        """Writes items. Raises ValueError if `ttl` is set, because the file keeps everything."""
        if ttl is not None:
            raise ValueError(f"{self.name} keeps everything for good, so ttl={ttl} can't be")
        with self._lock:
            self._journal = self._journal or Journal(self._path)
            for key, value in items.items():
                self._values[key] = value.decode()
                self._journal.append({"key": key, "value": self._values[key]})

    def close(self) -> None:
        """Closes the file."""
        with self._lock:
            if self._journal is not None:
                self._journal.close()
            self._journal = None


class Batches(Generic[T, R]):
    """Processes items in batches, one batch at a time. Items that arrive while a batch is in progress form the next one.

    Args:
      work: gives a result for each item, in order. If it raises, so does every call that waits for the batch.
    """

    def __init__(self, work: Callable[[Sequence[T]], Awaitable[Sequence[R]]]) -> None:
        self._work = work
        self._waiting: list[tuple[T, asyncio.Future[R]]] = []
        self._busy: asyncio.Task[None] | None = None

    async def __call__(self, item: T) -> R:
        """The item's result."""
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        if self._busy is None:
            self._busy = asyncio.ensure_future(self._serve())
        return await future

    async def _serve(self) -> None:
        """Processes batches until no item waits."""
        while self._waiting:
            batch, self._waiting = self._waiting[:_MOST], self._waiting[_MOST:]
            try:
                pairs = list(zip(batch, await self._work([item for item, _ in batch]), strict=True))
            except Exception as error:
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
                continue
            for (_, future), result in pairs:
                if not future.done():  # the call that waited may have been cancelled
                    future.set_result(result)
        self._busy = None


class Services:
    """The model and the knowledge bases that attempts use.

    The model gets all conversations at once. A knowledge base gets one batch of queries at a time; queries that arrive
    meanwhile form the next batch.

    Args:
      timeout: seconds after which a search counts as failed.
    """

    def __init__(self, model: ChatModel | None, tools: Mapping[str, SearchTool], timeout: float) -> None:
        self._model, self._tools, self._timeout = model, tools, timeout
        self._searches: dict[tuple[str, int], Batches[Query, Call]] = {}

    async def ask(
        self, conversation: Sequence[Message], *, max_tokens: int, temperature: float, sample: int
    ) -> Completion:
        """The model's answer. If the model failed, `error` is set. A reply without text is no failure: attempts ask again."""

        def work() -> Completion:
            assert self._model is not None
            (answer,) = self._model.complete(
                [conversation], max_tokens=max_tokens, temperature=temperature, sample=sample
            )
            return answer

        try:
            answer = await in_thread(work, "ask")
        except Exception as error:  # a user's own model may raise; ours don't
            return Completion(error=f"{type(error).__name__}: {error}", finish="error")
        return dataclasses.replace(answer, error=None, finish="stop") if answer.fault == faults.EMPTY else answer

    async def search(self, tool: str, query: Query, k: int) -> Call:
        """A search. If it failed, `error` is set. Raises what `search_calls` raises."""
        key = (tool, k)
        if key not in self._searches:
            self._searches[key] = Batches(lambda queries: search_calls(self._tools, tool, queries, k, self._timeout))
        return await self._searches[key](query)


# --- reports ---


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelUse:
    """The use of a language model in all sessions of a job.

    Attributes:
      calls: number of replies.
      prompt_tokens, tokens: number of tokens read and written.
      cost: price of these tokens at the configured prices.
    """

    calls: int
    prompt_tokens: int
    tokens: int
    cost: float

    @classmethod
    def counted(cls, rows: Iterable[Mapping[str, Any]], prices: JobSettings = JobSettings()) -> ModelUse:
        """The sum over `rows`, each with `calls`, `prompt_tokens` and `tokens`."""
        calls = read = written = 0
        for row in rows:
            calls, read, written = calls + row["calls"], read + row["prompt_tokens"], written + row["tokens"]
        cost = (read * prices.read_price + written * prices.write_price) / 1e6
        return cls(calls=calls, prompt_tokens=read, tokens=written, cost=cost)

    def __str__(self) -> str:
        text = f"{self.calls:,} replies, {self.prompt_tokens:,} tokens read, {self.tokens:,} written"
        return text + (f", cost {self.cost:,.2f}" if self.cost else "")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """The state of a job. `str(report)` of its subclasses is Markdown for people.

    Attributes:
      model: name of the model; "" if none was asked.
      use: use of the model.
      seconds: length of this session.
    """

    model: str
    use: ModelUse
    seconds: float

    def record(self) -> dict[str, Any]:
        """The report, JSON-serialisable, with the fields of `use` among its own."""
        fields = dataclasses.asdict(self)
        return {**fields.pop("use"), **fields}

    def write(self, workdir: pathlib.Path) -> None:
        """Writes report.json and report.md."""
        write_report(workdir, self.record(), str(self))


def write_report(workdir: pathlib.Path, record: Mapping[str, Any], text: str) -> None:
    """Writes report.json and report.md of a job."""
    write_atomic(workdir / "report.json", json.dumps(record, indent=2) + "\n")
    write_atomic(workdir / "report.md", text + "\n")


def listed(counts: Mapping[Any, int]) -> str:
    """Counts in words: "name 3, other 2"; "none" if there are none."""
    return ", ".join(f"{name} {count:,}" for name, count in counts.items()) or "none"


def by_frequency(items: Iterable[Any]) -> dict[Any, int]:
    """The number of equal items, the most frequent first."""
    return dict(collections.Counter(items).most_common())


# --- jobs in which language models write demonstrations for a policy, question by question ---


Demonstrate = Callable[[Question], Awaitable[dict[str, Any]]]


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class DemonstrationConfig(JobSettings):
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
            **sources_of(None, self.knowledge),
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
            "prompts": digest(prompts),
        },
        settings=config,
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
