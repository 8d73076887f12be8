"""One thread that owns an engine: coroutines of many callers hold conversations with it, and share its batches."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from absl import logging

from routerl_jax.generation.engine import Engine
from routerl_jax.generation.streams import Generated, Stream
from routerl_jax.remote.background import BackgroundLoop

T = TypeVar("T")
# Passes of the event loop between two steps: work that arrived during a step opens its conversation and asks for a turn
# before the next one.
_PASSES = 4


class EngineLoop:
    """An event loop on a thread, whose coroutines alone use the engine from now on; nothing of it needs a lock.

    `submit` a coroutine that opens a stream, requests a turn, awaits `turn` and closes the stream. While any turn is awaited
    the engine steps; between two steps all coroutines go on. So conversations join those that are being decoded as soon as a
    row is free, and one that is cancelled gives its row back before the next step.
    """

    def __init__(self, engine: Engine, name: str = "engine") -> None:
        self.engine = engine
        self._name = name
        self._lock = threading.Lock()
        self._thread: BackgroundLoop | None = None
        self._submitted: set[concurrent.futures.Future[Any]] = set()
        self._awaited: dict[int, _Awaited] = {}
        self._stepping: asyncio.Task[None] | None = None

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Starts a coroutine on the engine's thread, from any thread. To cancel the future is to cancel the coroutine."""
        with self._lock:
            if self._thread is None:
                self._thread = BackgroundLoop(self._name)
            future = asyncio.run_coroutine_threadsafe(work, self._thread.loop)
            self._submitted.add(future)
        future.add_done_callback(self._submitted.discard)
        return future

    async def turn(self, stream: Stream, told: Callable[[Generated | None], bool] | None = None) -> Generated | None:
        """The turn that has been requested of a stream.

        Args:
          told: called after each step in which the stream has grown, with the turn if it is over. True: what there is is
            enough, and the turn is not waited for; the stream can only be closed then.

        Returns:
          The turn; None where `told` had enough before its end.

        Raises:
          Exception: what the engine raised in a step; all turns that are awaited end with it. Or what `told` raised.
        """
        future: asyncio.Future[Generated | None] = asyncio.get_running_loop().create_future()
        self._awaited[id(stream)] = _Awaited(stream=stream, future=future, told=told, length=len(stream.ledger))
        if self._stepping is None:
            self._stepping = asyncio.get_running_loop().create_task(self._step_on())
        try:
            return await future
        finally:
            self._awaited.pop(id(stream), None)

    def close(self) -> None:
        """Ends the thread, after what has been submitted. What is submitted later starts another."""
        with self._lock:
            if self._thread is not None:
                concurrent.futures.wait(list(self._submitted))
                self._thread.run(self._stepped())
                self._thread.close()
                self._thread = None

    async def _stepped(self) -> None:
        if self._stepping is not None:
            await self._stepping

    async def _step_on(self) -> None:
        try:
            while self._awaited:
                self._step()
                for _ in range(_PASSES):
                    await asyncio.sleep(0)
        finally:
            self._stepping = None

    def _step(self) -> None:
        try:
            finished = {id(stream): generated for stream, generated in self.engine.step()}
        except Exception as error:  # out of memory, a device that is gone: fails what is under way, not the process
            logging.exception("the engine failed; %d conversations end with an error", len(self._awaited))
            for one in self._awaited.values():
                one.fail(error)
            return
        for key, one in self._awaited.items():
            one.tell(finished.get(key))


@dataclasses.dataclass(kw_only=True)
class _Awaited:
    stream: Stream
    future: asyncio.Future[Generated | None]
    told: Callable[[Generated | None], bool] | None
    length: int  # of the ledger, as far as it was told

    def tell(self, generated: Generated | None) -> None:
        if self.future.done():  # cancelled
            return
        enough = False
        if self.told is not None and (generated is not None or len(self.stream.ledger) > self.length):
            self.length = len(self.stream.ledger)
            try:
                enough = self.told(generated)
            except Exception as error:
                self.fail(error)
                return
        if generated is not None or enough:
            self.future.set_result(generated)

    def fail(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)
