"""An event loop on a separate thread, so that synchronous code can have many requests in progress at once."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar, cast

from routerl_jax.core import stopping

S = TypeVar("S")
T = TypeVar("T")


class BackgroundLoop:
    """An asyncio loop on a daemon thread. Coroutines of all callers share it."""

    def __init__(self, name: str = "background") -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True, name=name)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Runs a coroutine and waits for its result. If the caller is interrupted or `timeout` passes, it is cancelled.

        Raises:
          RuntimeError: it is called from the loop's own thread (which would wait for itself), or the call was cancelled.
          TimeoutError: there is no result after `timeout` seconds.
        """
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise RuntimeError("a coroutine of the background loop must await, not wait: use the async method")
        future: concurrent.futures.Future[T] = asyncio.run_coroutine_threadsafe(_contained(coroutine), self.loop)
        try:
            return stopping.result_of(future, timeout)
        except concurrent.futures.CancelledError as error:
            raise RuntimeError("the call was cancelled: its client was closed") from error
        finally:
            future.cancel()

    def close(self) -> None:
        """Stops the loop."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(5)


class PausedLoop:
    """An event loop that rests between two calls of `run`, with its tasks where they are; threads that these wait for go on.

    It works in a notebook, too, whose own loop is running.
    """

    def __init__(self) -> None:
        self._runner = asyncio.Runner()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine, and the tasks that rest, until the coroutine has a result. Returns it."""
        return _where_no_loop_runs(lambda: self._runner.run(coroutine))

    def close(self) -> None:
        """Cancels all tasks."""
        _where_no_loop_runs(self._runner.close)


async def _contained(coroutine: Coroutine[Any, Any, T]) -> T:
    """A coroutine's result. What would end the loop, and so all who share it, is raised as a RuntimeError."""
    try:
        return await coroutine
    except (SystemExit, KeyboardInterrupt) as error:
        raise _ordinary(error) from error


def _ordinary(error: BaseException) -> Exception:
    """An error that a future may hold, and that ends no more than the work in which it was raised."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")


def run_coroutine(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine in a new loop and returns its result. This also works in a notebook."""
    with contextlib.closing(PausedLoop()) as loop:
        return loop.run(coroutine)


def _where_no_loop_runs(work: Callable[[], T]) -> T:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return work()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


async def gather_bounded(work: Callable[[S], Awaitable[T]], items: Iterable[S], most: int) -> list[T]:
    """The results of `work` for all items, in order, at most `most` at once. The first failure is raised and ends the rest."""
    slots = asyncio.Semaphore(most)

    async def bounded(item: S) -> T:
        async with slots:
            return await work(item)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(bounded(item)) for item in items]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


async def in_thread(work: Callable[[], T], name: str) -> T:
    """Runs `work` on a new thread and returns its result. If the wait is cancelled, the thread still runs to its end.

    What is no Exception (SystemExit, of a library that calls `sys.exit`, a panic) is raised as a RuntimeError.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(_ordinary(error))
        else:
            future.set_result(cast(T, result))

    def run() -> None:
        result, failure = None, None
        try:
            result = work()
        except BaseException as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop may be closed
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, daemon=True, name=name).start()
    return await future


_shared: tuple[int, BackgroundLoop] | None = None
_lock = threading.Lock()


def shared_loop() -> BackgroundLoop:
    """The background loop of this process. A forked process gets its own."""
    global _shared
    with _lock:
        if _shared is None or _shared[0] != os.getpid():
            _shared = (os.getpid(), BackgroundLoop("routerl-network"))
        return _shared[1]
