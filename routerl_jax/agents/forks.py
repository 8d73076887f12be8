"""Forks: an attempt splits into one branch per choice at a routing decision.

The attempt is forked when the policy has written all that comes before the name of a knowledge base. The attempt itself
continues with the first name. For every other name a new branch starts. A branch runs the agent from the start, but replays
what the policy wrote and what the tools replied before the fork. So an agent needs no code for forks. It only has to act in the
same manner on equal turns and replies, which deterministic runs require anyway. Nothing is computed twice: the engine copies
the conversation's row of the KV cache.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from routerl_jax.agents.conversation import Conversation, Rollout
from routerl_jax.agents.grammar import RouteChoices
from routerl_jax.core.types import Branch, Call
from routerl_jax.engine.policy import Generated, Stream
from routerl_jax.engine.sampling import Sampling


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForkChoice:
    """The decision with which a branch starts.

    Attributes:
      before: the tokens of the turn before the decision.
      source: the conversation that is forked; its row is copied.
      tool: the choice of this branch.
    """

    before: Sequence[int]
    source: Stream
    tool: str


class BranchState:
    """The state of one branch: the events that it still replays, those since then, and how many forks are left.

    Attributes:
      choices: how the policy writes its choices.
      forks: decisions on this branch that may still be forked.
      spawn: starts a further branch of an attempt.
      suffix: suffix of the attempt's name, which seeds its sampling. Each branch has its own.
      branches: the decisions so far.
    """

    def __init__(
        self,
        choices: RouteChoices,
        forks: int,
        spawn: Callable[[Rollout, BranchState], None],
        *,
        past: Sequence[Generated | Call | ForkChoice] = (),
        suffix: str = "",
        branches: Sequence[Branch] = (),
    ) -> None:
        self.choices = choices
        self.forks = forks
        self.spawn = spawn
        self.suffix = suffix
        self.branches = list(branches)
        self._past = collections.deque(past)
        self._record: list[Generated | Call | None] = []  # None: requested, and not there yet

    async def call(self, asked: Coroutine[Any, Any, Call]) -> Call:
        """The reply to a request to a tool. A branch that still replays its past gets the recorded reply."""
        if self._past:
            asked.close()
            call = self._past.popleft()
            assert isinstance(call, Call), (
                "the agent searches where it wrote before: it does not act alike on equal turns"
            )
            self._record.append(call)
            return call
        index = self._begin()
        self._record[index] = call = await asked
        return call

    async def turn(
        self, chat: Conversation, stop: Sequence[str], max_tokens: int | None, sampling: Sampling
    ) -> Generated:
        """The tokens of a turn: sampled, replayed, or both if the branch starts within this turn."""
        settings: dict[str, Any] = {"stops": stop, "max_tokens": max_tokens, "sampling": sampling}
        fork = None
        if self._past:
            event = self._past.popleft()
            if isinstance(event, Generated):
                chat._engine.feed(chat._stream, event.tokens)
                self._record.append(event)
                return event
            assert isinstance(event, ForkChoice), (
                "the agent writes where it searched before: it does not act alike on equal turns"
            )
            fork = event
            chat._engine.feed(chat._stream, fork.before)
            chat._engine.share([(fork.source, chat._stream)])
        index = self._begin()
        if fork is not None:
            written = await self._take(fork.tool, fork.before, chat, settings)
        elif self.forks > 0 and self.choices.stop in stop:
            written = await self._write_and_fork(chat, settings)
        else:
            written = await chat._request(**settings)
        self._record[index] = written
        return written

    def _begin(self) -> int:
        """Reserves an entry in the record for a turn or call that is requested; returns its index."""
        self._record.append(None)
        return len(self._record) - 1

    async def _write_and_fork(self, chat: Conversation, settings: dict[str, Any]) -> Generated:
        """Lets the policy write up to a decision and forks the attempt there. This attempt takes the first choice."""
        choices, tokenizer = self.choices, chat._engine.tokenizer
        stop, max_tokens = settings["stops"], settings["max_tokens"]
        written = await chat._request(**settings | {"stops": (choices.opening, *stop)})
        text = tokenizer.decode(written.tokens)
        if written.stop_reason != "stop" or choices.opening not in text or any(string in text for string in stop):
            return written
        remaining = chat.room if max_tokens is None else min(chat.room, max_tokens - len(written.tokens))
        longest = max(len(tokenizer.encode(name)) for name in choices.names.values())
        decides = text.endswith(choices.opening) and choices.open(chat._forced + text)
        alone = all(event is not None for event in self._record[:-1])  # a replay reaches exactly this point
        if remaining >= longest and decides and alone:
            first, *others = choices.names
            past = [event for event in self._record if event is not None]
            self.forks -= 1
            for tool in others:
                choice = ForkChoice(before=written.tokens, source=chat._stream, tool=tool)
                suffix = f"{self.suffix}@{len(self.branches)}:{tool}"
                state = BranchState(
                    choices, self.forks, self.spawn, suffix=suffix, branches=self.branches, past=[*past, choice]
                )
                self.spawn(chat._rollout, state)
            return await self._take(first, written.tokens, chat, settings)
        if remaining > 0:  # there is no decision to fork here: finish the turn
            return await self._finish(written.tokens, chat, settings)
        return dataclasses.replace(written, stop_reason="length")

    async def _take(self, tool: str, before: Sequence[int], chat: Conversation, settings: dict[str, Any]) -> Generated:
        """Writes one choice at a decision, and lets the policy finish the turn."""
        ledger = chat._stream.ledger
        name, start = chat._engine.tokenizer.encode(self.choices.names[tool]), len(ledger)
        written = await self._finish(before, chat, settings, given=name)
        self.branches.append(
            Branch(
                tool=tool,
                turn=len(chat._rollout.turns),
                sequence=chat._number,
                start=start,
                tokens=len(name),
                logprob=ledger.logprob(start, start + len(name)),
            )
        )
        return written

    @staticmethod
    async def _finish(
        before: Sequence[int], chat: Conversation, settings: dict[str, Any], given: Sequence[int] = ()
    ) -> Generated:
        """The turn that begins with the tokens `before`, and goes on with those that are given."""
        max_tokens = settings["max_tokens"] and settings["max_tokens"] - len(before)
        rest = await chat._request(**settings | {"max_tokens": max_tokens}, given=given, begun=before)
        return dataclasses.replace(rest, tokens=[*before, *rest.tokens])
