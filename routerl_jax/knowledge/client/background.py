"""One event loop in a thread of its own, for clients whose callers are threads."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_process = 0


def background_loop() -> asyncio.AbstractEventLoop:
    """The loop, started at first use (again in a forked process)."""
    global _loop, _process
    with _lock:
        if _loop is None or _process != os.getpid():
            loop = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, daemon=True, name="http-client").start()
            _loop, _process = loop, os.getpid()
        return _loop


def run(work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine on the background loop and waits for it. An interrupted wait cancels it."""
    future = asyncio.run_coroutine_threadsafe(work, background_loop())
    try:
        return future.result()
    except concurrent.futures.CancelledError as error:
        raise RuntimeError("the call was cancelled: its client was closed") from error
    finally:
        future.cancel()
