"""A language model and knowledge bases for many coroutines at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Generic, TypeVar

from routerl_jax.agents.agent import SearchTool
from routerl_jax.agents.calls import search_calls
from routerl_jax.core.types import Call, Message, Query
from routerl_jax.llms.base import ChatModel, Completion
from routerl_jax.remote.background import in_thread

_MOST = 256  # queries of a batch

T = TypeVar("T")
R = TypeVar("R")


class Batches(Generic[T, R]):
    """One batch at a time, of all that has come while the one before was under way.

    Args:
      work: gives a result for each item, in order. What it raises, whoever waits for the batch is told.
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
        """Batch by batch, until nobody waits any more."""
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
                if not future.done():  # who waited may be gone
                    future.set_result(result)
        self._busy = None


class Services:
    """What attempts call. The model takes everybody's conversations at once; a knowledge base takes one batch at a time, of
    all queries that have come while it was busy.

    Args:
      timeout: seconds after which a search counts as failed.
    """

    def __init__(self, model: ChatModel | None, tools: Mapping[str, SearchTool], timeout: float) -> None:
        self._model, self._tools, self._timeout = model, tools, timeout
        self._searches: dict[tuple[str, int], Batches[Query, Call]] = {}

    async def ask(
        self, conversation: Sequence[Message], *, max_tokens: int, temperature: float, sample: int
    ) -> Completion:
        """The model's answer; a failure has `error` set."""

        def work() -> Completion:
            assert self._model is not None
            (answer,) = self._model.complete(
                [conversation], max_tokens=max_tokens, temperature=temperature, sample=sample
            )
            return answer

        try:
            return await in_thread(work, "ask")
        except Exception as error:  # a model of somebody else's; ours raise nothing
            return Completion(error=f"{type(error).__name__}: {error}", finish="error")

    async def search(self, tool: str, query: Query, k: int) -> Call:
        """A search; a failure has `error` set. Raises what `search_calls` does."""
        key = (tool, k)
        if key not in self._searches:
            self._searches[key] = Batches(lambda queries: search_calls(self._tools, tool, queries, k, self._timeout))
        return await self._searches[key](query)
