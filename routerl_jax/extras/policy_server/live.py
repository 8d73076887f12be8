"""An agent that answers questions as they arrive. Its attempts share the engine's rows and batches with all other work.

`agents.driver` runs a known list of attempts in a fixed order. Here an attempt begins when it is asked for, and may be
cancelled.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from routerl_jax.agents.agent import LLM, Agent, SearchTool, Tools
from routerl_jax.agents.calls import calls_of_all, settle
from routerl_jax.agents.conversation import Request, Rollout
from routerl_jax.core.time_limit import DEFAULT_SECONDS
from routerl_jax.core.types import Call, Episode, Example, Turn
from routerl_jax.engine.loop import EngineLoop
from routerl_jax.engine.policy import DoesNotFit, Generated, Stream
from routerl_jax.engine.sampling import Sampling

_Waiting = tuple[Request, asyncio.Future[Call]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """How far an attempt is.

    Attributes:
      turns: the finished turns.
      writing: the text of the present turn as far as it is sampled; "" while a tool is asked.
      searching: the request that is waited for; None while the policy writes.
    """

    turns: tuple[Turn, ...]
    writing: str = ""
    searching: Request | None = None


OnProgress = Callable[[Progress], None]


class LiveAgent:
    """Runs an agent's attempts on an engine's thread.

    All searches between two steps of the engine are one batch per knowledge base. They run while the engine decodes.

    Args:
      tools: knowledge bases by the name that the agent uses.
      tool_timeout: seconds after which a tool call counts as failed.
    """

    def __init__(
        self, agent: Agent, loop: EngineLoop, tools: Mapping[str, SearchTool], tool_timeout: float = DEFAULT_SECONDS
    ) -> None:
        self.agent, self._loop, self._tools, self._timeout = agent, loop, tools, tool_timeout
        self._waiting: list[_Waiting] = []
        self._searching: set[asyncio.Task[None]] = set()

    async def attempt(
        self, example: Example, sample: int = 0, sampling: Sampling | None = None, on_progress: OnProgress | None = None
    ) -> Episode:
        """One attempt at a question; for `EngineLoop.submit`. Its episode is that of `driver.run`. If it is cancelled, its rows
        are free.

        Args:
          on_progress: called on the engine's thread after each of its steps in which the policy wrote, and before each search.

        Raises:
          Exception: what the agent or the engine raised.
        """
        rollout = Rollout(
            *(example, sample, self._loop.engine, sampling or Sampling()),
            wait_turn=functools.partial(self._turn, on_progress),
            wait_tool=functools.partial(self._search, on_progress),
            tags=self.agent.special_tokens,
            foreign=self.agent.foreign,
        )
        try:
            return await self.agent.run(example, LLM(rollout), Tools(rollout, list(self._tools)))
        except DoesNotFit:
            return rollout.cut_short()
        finally:
            rollout.close()

    async def _turn(self, on_progress: OnProgress | None, rollout: Rollout, stream: Stream) -> Generated:
        turns, start, tokenizer = tuple(rollout.turns), len(stream.ledger), self._loop.engine.tokenizer

        def grown(_: Generated | None) -> bool:
            if on_progress is not None:
                text = tokenizer.decode(stream.ledger.tokens[start:])
                on_progress(
                    Progress(turns=turns, writing=text.rstrip("\N{REPLACEMENT CHARACTER}"))
                )  # part of a character
            return False

        generated = await self._loop.turn(stream, grown)
        assert generated is not None, "nothing ends a turn early"
        return generated

    async def _search(self, on_progress: OnProgress | None, rollout: Rollout, request: Request) -> Call:
        if on_progress is not None:
            on_progress(Progress(turns=tuple(rollout.turns[:-1]), searching=request))
        return await self.search(request)

    async def search(self, request: Request) -> Call:
        """A request to a tool, in a batch with the others of this moment; for `EngineLoop.submit`, and for the attempts."""
        future: asyncio.Future[Call] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, future))
        if len(self._waiting) == 1:
            self._start(self._search_all())
        return await future

    async def _search_all(self) -> None:
        await asyncio.sleep(0)  # agents whose turns ended in the same step may now send their requests
        waiting, self._waiting = self._waiting, []
        for tool in dict.fromkeys(request.tool for request, _ in waiting):
            self._start(self._ask([entry for entry in waiting if entry[0].tool == tool]))

    async def _ask(self, waiting: Sequence[_Waiting]) -> None:
        try:
            calls = await calls_of_all(self._tools, [request for request, _ in waiting], self._timeout)
        except Exception as error:  # a tool's own fault is raised in the agents that wait for it
            for _, future in waiting:
                settle(future, error)
            return
        for (_, future), call in zip(waiting, calls, strict=True):
            settle(future, call)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._searching.add(task)
        task.add_done_callback(self._searching.discard)
