"""A language model and knowledge bases for many coroutines at once."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from routerl_jax.agents.agent import SearchTool
from routerl_jax.agents.calls import search_calls
from routerl_jax.core.types import Call, Message, Query
from routerl_jax.llms.base import ChatModel, Completion
from routerl_jax.remote.background import in_thread

_MOST = 256  # queries of a batch


class Services:
    """What attempts call. The model takes everybody's conversations at once; a knowledge base takes one batch at a time, of
    all queries that have come while it was busy.

    Args:
      timeout: seconds after which a search counts as failed.
    """

    def __init__(self, model: ChatModel | None, tools: Mapping[str, SearchTool], timeout: float) -> None:
        self._model, self._tools, self._timeout = model, tools, timeout
        self._waiting: dict[tuple[str, int], list[tuple[Query, asyncio.Future[Call]]]] = {}
        self._busy: set[asyncio.Task[None]] = set()

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
        future: asyncio.Future[Call] = asyncio.get_running_loop().create_future()
        key = (tool, k)
        if key in self._waiting:
            self._waiting[key].append((query, future))
        else:
            self._waiting[key] = [(query, future)]
            task = asyncio.ensure_future(self._serve(key))
            self._busy.add(task)
            task.add_done_callback(self._busy.discard)
        return await future

    async def _serve(self, key: tuple[str, int]) -> None:
        """Searches batch by batch until nobody waits for this knowledge base any more."""
        tool, k = key
        while waiting := self._waiting[key]:
            batch, self._waiting[key] = waiting[:_MOST], waiting[_MOST:]
            try:
                calls = await search_calls(self._tools, tool, [query for query, _ in batch], k, self._timeout)
            except Exception as error:  # a tool that is no tool; whoever waits for it is told
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
                continue
            for (_, future), call in zip(batch, calls):
                if not future.done():  # who waited may be gone
                    future.set_result(call)
        del self._waiting[key]
