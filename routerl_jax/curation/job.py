"""Jobs that take hours and are killed: what they were made of, and workers that bring finished pieces."""

from __future__ import annotations

import asyncio
import collections
import pathlib
import shutil
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from routerl_jax.core.journal import Journal, check_same
from routerl_jax.core.progress import Bar
from routerl_jax.curation.report import listed

T = TypeVar("T")
MADE_OF = "construct.json"


def begin(made_of: Mapping[str, Any], workdir: pathlib.Path, overwrite: bool, made: Sequence[str]) -> None:
    """Makes sure that the job in `workdir` is this one.

    Args:
      overwrite: throw away what a job of other settings has made.
      made: the names of its files and directories.

    Raises:
      ValueError: there is another job, which must stay.
    """
    path = workdir / MADE_OF
    try:
        check_same(made_of, path, "go on with the same ones, use another --workdir, or give --overwrite")
    except ValueError:
        if not overwrite:
            raise
        for name in made:
            place = workdir / name
            if place.is_dir():
                shutil.rmtree(place, ignore_errors=True)
            else:
                place.unlink(missing_ok=True)
        path.unlink()  # what says that there is a job goes last
        check_same(made_of, path, "")


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
    """Works on items, so many at a time, and books each as soon as it is finished.

    Args:
      work: makes an item's record.
      finish: books it; says why it failed where that says nothing of the item, else "".
      patience: failures in a row after which no more is tried.
      unit: what an item is called.
      bar: moves on by one for each, with `so_far` behind it.
      skip: whether an item needs no work any more when its turn comes.

    Raises:
      ValueError: too many failed in a row.
    """
    waiting = collections.deque(items)
    running: set[asyncio.Future[dict[str, Any]]] = set()
    failures = 0
    try:
        while waiting or running:
            while waiting and len(running) < concurrency:
                item = waiting.popleft()
                if skip(item):
                    bar.update()
                else:
                    running.add(asyncio.ensure_future(work(item)))
            if not running:
                continue
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                why = finish(task.result())
                failures = failures + 1 if why else 0
                bar.update()
            bar.set_postfix_str(so_far())
            if failures >= patience:
                raise ValueError(
                    f"{failures} {unit}s in a row failed ({why}). What is finished is kept: mend that and run the same "
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
    """`work_through` of the items that the journal has no outcome of. A record has the `id` of its item, `outcome`, `detail`.

    Args:
      failed: outcomes that say nothing of an item: it is tried again in another session.
      doing: what the progress bar is called.
    """
    counts: collections.Counter[str] = collections.Counter(outcomes(journal, failed).values())
    left = unfinished(journal, items, name, failed)

    def finish(record: dict[str, Any]) -> str:
        journal.append(record)
        counts[record["outcome"]] += 1
        return f"{record['outcome']}: {record['detail']}" if record["outcome"] in failed else ""

    with Bar(total=len(items), initial=len(items) - len(left), desc=doing, unit=unit, disable=not progress) as bar:
        await work_through(
            left,
            work,
            finish,
            concurrency=concurrency,
            patience=patience,
            unit=unit,
            bar=bar,
            so_far=lambda: listed(counts),
        )


def outcomes(journal: Journal, failed: Collection[str]) -> dict[str, str]:
    """By id the last outcome of what is finished."""
    last = {record["id"]: record["outcome"] for record in journal.read()}
    return {name: outcome for name, outcome in last.items() if outcome not in failed}


def unfinished(journal: Journal, items: Sequence[T], name: Callable[[T], str], failed: Collection[str]) -> list[T]:
    """The items that are left to do."""
    finished = outcomes(journal, failed)
    return [item for item in items if name(item) not in finished]
