"""What all jobs share: a directory that holds one job, work that is saved item by item, attempts and their cost, kept replies,
searches in batches, reports.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import json
import pathlib
import shutil
import threading
from collections.abc import Awaitable, Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, Generic, Literal, TypeVar

from routerl_jax.agents.agent import SearchTool
from routerl_jax.agents.calls import search_calls
from routerl_jax.core.files import write_atomic
from routerl_jax.core.journal import Journal, check_same
from routerl_jax.core.progress import Bar, waiting
from routerl_jax.core.types import Call, Message, Query
from routerl_jax.data.trajectories import AnswerStep, Step
from routerl_jax.services.background import in_thread
from routerl_jax.services.base import ChatModel, Completion
from routerl_jax.services.cache import Cache, Entry

T = TypeVar("T")
R = TypeVar("R")
_MOST = 256  # most items of a batch
_ROUNDING = 1e-6  # tolerance for the rounding of a share times a number
MADE_OF = "construct.json"


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


async def work_through(
    items: Sequence[T],
    work: Callable[[T], Awaitable[dict[str, Any]]],
    finish: Callable[[dict[str, Any]], str],
    *,
    concurrency: int,
    patience: int,
    unit: str,
    bar: Bar,
    so_far: Callable[[], str],
    skip: Callable[[T], bool] = lambda item: False,
) -> None:
    """Works on `concurrency` items at a time, and saves each as soon as it is finished.

    Args:
      work: returns the record of an item.
      finish: saves a record. Returns the reason if the item failed and is to be tried again, else "".
      patience: the job stops after so many failures in a row.
      unit: the word for an item in messages.
      bar: advances by one per item, with the text `so_far()` behind it.
      skip: whether an item needs no work any more. Called right before its work would start.

    Raises:
      ValueError: too many items failed in a row.
    """
    pending = collections.deque(items)
    running: set[asyncio.Future[dict[str, Any]]] = set()
    failures = 0
    try:
        while pending or running:
            while pending and len(running) < concurrency:
                item = pending.popleft()
                if skip(item):
                    bar.update()
                else:
                    running.add(asyncio.ensure_future(work(item)))
            if not running:
                continue
            with waiting(f"{len(running)} {unit}{'s' if len(running) > 1 else ''} at work"):
                completed, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in completed:
                reason = finish(task.result())
                failures = failures + 1 if reason else 0
                bar.update()
            bar.set_postfix_str(so_far())
            if failures >= patience:
                raise ValueError(
                    f"{failures} {unit}s in a row failed ({reason}). What is finished is kept: mend that and run the same "
                    "command again"
                )
    finally:
        for task in running:
            task.cancel()


async def book_all(
    journal: Journal,
    items: Sequence[T],
    work: Callable[[T], Awaitable[dict[str, Any]]],
    name: Callable[[T], str],
    failed: Collection[str],
    *,
    concurrency: int,
    patience: int,
    doing: str,
    unit: str,
    progress: bool,
) -> None:
    """Calls `work_through` for the items without an outcome in the journal, and adds their records to it.

    A record has the `id` of its item, an `outcome` and a `detail`.

    Args:
      name: gives the id of an item.
      failed: outcomes that say nothing about an item. Such an item is tried again in another session.
      doing: label of the progress bar.
    """
    counts: collections.Counter[str] = collections.Counter(outcomes(journal, failed).values())
    remaining = unfinished(journal, items, name, failed)

    def finish(record: dict[str, Any]) -> str:
        journal.append(record)
        counts[record["outcome"]] += 1
        return f"{record['outcome']}: {record['detail']}" if record["outcome"] in failed else ""

    with Bar(total=len(items), initial=len(items) - len(remaining), desc=doing, unit=unit, disable=not progress) as bar:
        await work_through(
            remaining,
            work,
            finish,
            concurrency=concurrency,
            patience=patience,
            unit=unit,
            bar=bar,
            so_far=lambda: listed(counts),
        )


def outcomes(journal: Journal, failed: Collection[str]) -> dict[str, str]:
    """The last outcome of each finished item, by id."""
    last_outcomes = {record["id"]: record["outcome"] for record in journal.read()}
    return {name: outcome for name, outcome in last_outcomes.items() if outcome not in failed}


def unfinished(journal: Journal, items: Sequence[T], name: Callable[[T], str], failed: Collection[str]) -> list[T]:
    """The items that are left to do."""
    finished = outcomes(journal, failed)
    return [item for item in items if name(item) not in finished]


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
    """A cache for `llms.cached.CachedModel` that is a journal: nothing is ever removed.

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
        """The model's answer. If the model failed, `error` is set."""

        def work() -> Completion:
            assert self._model is not None
            (answer,) = self._model.complete(
                [conversation], max_tokens=max_tokens, temperature=temperature, sample=sample
            )
            return answer

        try:
            return await in_thread(work, "ask")
        except Exception as error:  # a user's own model may raise; ours don't
            return Completion(error=f"{type(error).__name__}: {error}", finish="error")

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
    def counted(cls, rows: Iterable[Mapping[str, Any]], read_price: float, write_price: float) -> ModelUse:
        """The sum over `rows`, each with `calls`, `prompt_tokens` and `tokens`. Prices are per million tokens."""
        calls = read = written = 0
        for row in rows:
            calls, read, written = calls + row["calls"], read + row["prompt_tokens"], written + row["tokens"]
        cost = (read * read_price + written * write_price) / 1e6
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
