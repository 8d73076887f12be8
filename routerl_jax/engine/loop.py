"""A thread that owns an engine: the coroutines of many callers run on it and share the engine's batches."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from absl import logging

from routerl_jax.core.background import BackgroundLoop
from routerl_jax.engine.engine import Engine
from routerl_jax.engine.policy import Generated, Stream

T = TypeVar("T")
# Passes of the event loop between two steps, so that work that arrived during a step requests its turn before the next step.
_PASSES = 4


class EngineLoop:
    """An event loop on a thread of its own. Only its coroutines use the engine, so the engine needs no lock.

    `submit` a coroutine that opens a stream, requests a turn, awaits `turn` and closes the stream. While any turn is awaited
    the engine steps; between two steps all coroutines run. So a conversation joins the batch as soon as a row is free, and a
    coroutine that is cancelled frees its row before the next step.
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
        """Starts a coroutine on the engine's thread, from any thread. Cancelling the future cancels the coroutine."""
        with self._lock:
            if self._thread is None:
                self._thread = BackgroundLoop(self._name)
            future = asyncio.run_coroutine_threadsafe(work, self._thread.loop)
            self._submitted.add(future)
        future.add_done_callback(self._submitted.discard)
        return future

    async def turn(
        self, stream: Stream, on_tokens: Callable[[Generated | None], bool] | None = None
    ) -> Generated | None:
        """The turn that has been requested of a stream.

        Args:
          on_tokens: called after each step that added tokens, with the turn if it is over. If it returns True, the turn is not
            awaited any longer; the stream can only be closed then.

        Returns:
          The turn; None if `on_tokens` returned True before its end.

        Raises:
          Exception: what the engine raised in a step, which ends all turns that are awaited; or what `on_tokens` raised.
        """
        future: asyncio.Future[Generated | None] = asyncio.get_running_loop().create_future()
        self._awaited[id(stream)] = _Awaited(
            stream=stream, future=future, on_tokens=on_tokens, length=len(stream.ledger)
        )
        if self._stepping is None:
            self._stepping = asyncio.get_running_loop().create_task(self._step_on())
        try:
            return await future
        finally:
            self._awaited.pop(id(stream), None)

    def close(self) -> None:
        """Ends the thread when all coroutines are done. A later `submit` starts another thread."""
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
        except Exception as error:  # out of memory, a lost device: the turns under way fail, not the process
            logging.exception("the engine failed; %d conversations end with an error", len(self._awaited))
            for awaited in self._awaited.values():
                awaited.fail(error)
            return
        for key, awaited in self._awaited.items():
            awaited.notify(finished.get(key))


@dataclasses.dataclass(kw_only=True)
class _Awaited:
    stream: Stream
    future: asyncio.Future[Generated | None]
    on_tokens: Callable[[Generated | None], bool] | None
    length: int  # tokens of the ledger at the last call of on_tokens

    def notify(self, generated: Generated | None) -> None:
        if self.future.done():  # cancelled
            return
        enough = False
        if self.on_tokens is not None and (generated is not None or len(self.stream.ledger) > self.length):
            self.length = len(self.stream.ledger)
            try:
                enough = self.on_tokens(generated)
            except Exception as error:
                self.fail(error)
                return
        if generated is not None or enough:
            self.future.set_result(generated)

    def fail(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)
