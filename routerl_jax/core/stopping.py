"""Stopping a long job where it can go on: Ctrl-C and SIGTERM set a flag, and the job looks for it at places of its choice.

An exception out of a signal handler arises anywhere: during an update, whose arrays are lost then, or in a callback of the
garbage collector (JAX has one), whose exceptions Python drops. So a job is stopped by `check`, before a decode call or update,
or by `awaited`, while it waits for tools. After the first signal both have their default effect: the next one ends the process.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import ctypes
import dataclasses
import functools
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

T = TypeVar("T")

LOOK = 0.25  # seconds between two looks at the flag during a wait
_ECHO = 0.2  # seconds in which a signal is a copy of the first one: `timeout` sends it to a process and to its group
_SAID = b"\nstopping at the next decode call or update; once more (Ctrl-C, SIGTERM) ends the process at once\n"


class Interrupted(KeyboardInterrupt):
    """A job stops because a signal asked for it, at a place where it can go on later."""


@dataclasses.dataclass
class _Job:
    """Attributes:
    asked: whether there was a signal.
    held: what is under way must become whole first.
    told: threads that a check has stopped. Their cleaning up is not stopped.
    """

    deferring: bool = False
    asked: bool = False
    held: bool = False
    told: set[int] = dataclasses.field(default_factory=set)


_job = _Job()
_lock = threading.Lock()  # between `hold` and the checks of other threads


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Within it, Ctrl-C and SIGTERM only set the flag. Its end is a `check`. In another thread than the main one, which has the
    signals, nothing sets the flag."""
    if _job.deferring:
        yield
        return
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # as in a script's job that was started with `&`
        for number in (signal.SIGTERM,) if ignored else (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, _ask)
    _job.deferring = True
    try:
        yield
        release()
        check()  # a signal that came after the last one must not be lost
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        _job.deferring = _job.asked = _job.held = False
        _job.told.clear()


def _ask(*_: Any) -> None:
    if _job.asked:
        return
    _job.asked = True
    with contextlib.suppress(OSError):
        os.write(2, _SAID)  # not by `print`, as the signal may have come in the middle of one
    time.sleep(_ECHO)
    for other in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(other) is _ask:
            signal.signal(other, signal.SIG_DFL)


def check() -> None:
    """Stops the job if a signal asked for it on any of its processes (a collective call in a job of several).

    Raises:
      Interrupted: it did. Not between `hold` and `release`.
    """
    with _lock:
        _check()


def _check() -> None:
    from routerl_jax.parallel import multihost  # not with this module: programs without devices would wait for JAX

    if not _job.deferring or _job.held or threading.get_ident() in _job.told:
        return
    if multihost.any_process(_job.asked):
        _job.told.add(threading.get_ident())
        raise Interrupted


def hold() -> None:
    """`check`, and what begins now becomes whole: until `release` no check of any thread stops the job."""
    with _lock:
        _check()
        _job.held = True


def release() -> None:
    """Lets checks stop the job again."""
    _job.held = False


def check_alone() -> None:
    """`check` while this process waits for something alone. It does nothing in a job of several, which stop together."""
    if _job.asked:
        import jax

        if jax.process_count() == 1:
            check()


async def awaited(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled if the job is stopped meanwhile.

    Raises:
      Interrupted: a signal asked for it.
    """
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            await asyncio.wait([task], timeout=LOOK)
            check_alone()
        return task.result()
    finally:
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # it is known: asyncio would write that nobody asked for it


def result_of(future: concurrent.futures.Future[T], timeout: float | None = None) -> T:
    """`future.result(timeout)`, but the main thread stops waiting if the job is stopped.

    Raises:
      Interrupted: a signal asked for it.
    """
    ends = math.inf if timeout is None else time.monotonic() + timeout
    while not future.done() and (left := ends - time.monotonic()) > 0:
        concurrent.futures.wait([future], min(left, LOOK))
        if threading.current_thread() is threading.main_thread():
            check_alone()
    return future.result(0)


@functools.cache
def keep_interrupts() -> None:
    """From now on, a KeyboardInterrupt that Python drops, because it arose in a callback of the garbage collector or in a
    `__del__`, is raised again in the main thread."""
    before = sys.unraisablehook

    def hook(dropped: sys.UnraisableHookArgs) -> None:
        if issubclass(dropped.exc_type, KeyboardInterrupt):
            threading.Timer(LOOK, interrupt_main).start()
        else:
            before(dropped)

    sys.unraisablehook = hook


def interrupt_main() -> None:
    """Raises KeyboardInterrupt in the main thread, whatever SIGINT does now: it may be ignored, or only ask for a stop."""
    main = ctypes.c_ulong(threading.main_thread().ident or 0)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(main, ctypes.py_object(KeyboardInterrupt))
