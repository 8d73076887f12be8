"""Gives many coroutines access to a language model and knowledge bases, with their searches in batches."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Generic, TypeVar

from routerl_jax.agents.agent import SearchTool
from routerl_jax.agents.calls import search_calls
from routerl_jax.core.types import Call, Message, Query
from routerl_jax.services.background import in_thread
from routerl_jax.services.base import ChatModel, Completion

_MOST = 256  # most items of a batch

T = TypeVar("T")
R = TypeVar("R")


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
