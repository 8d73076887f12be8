"""Resumable jobs: a check that a directory holds the same job, and concurrent work whose results are saved one by one."""

from __future__ import annotations

import asyncio
import collections
import pathlib
import shutil
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from routerl_jax.core.files import Journal, check_same
from routerl_jax.core.progress import Bar, waiting
from routerl_jax.extras.curation.report import listed

T = TypeVar("T")
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
