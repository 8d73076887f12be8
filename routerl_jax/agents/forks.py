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
from collections.abc import Sequence

from routerl_jax.agents.grammar import RouteChoices
from routerl_jax.core.types import Branch, Call, StopReason
from routerl_jax.engine.streams import Stream


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordedTurn:
    """The tokens of a turn that was written."""

    tokens: tuple[int, ...]
    stop_reason: StopReason


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForkChoice:
    """The decision with which a branch starts.

    Attributes:
      before: the tokens of the turn before the decision.
      source: the conversation that is forked; its row is copied.
      tool: the choice of this branch.
    """

    before: tuple[int, ...]
    source: Stream
    tool: str


Event = RecordedTurn | Call | ForkChoice


class BranchState:
    """The state of one branch: the events that it still replays, those since then, and how many forks are left.

    Attributes:
      choices: how the policy writes its choices; None: nothing is forked.
      forks: decisions on this branch that may still be forked.
      suffix: suffix of the attempt's name, which seeds its sampling. Each branch has its own.
      branches: the decisions so far.
    """

    def __init__(
        self,
        choices: RouteChoices | None = None,
        forks: int = 0,
        *,
        past: Sequence[Event] = (),
        suffix: str = "",
        branches: Sequence[Branch] = (),
    ) -> None:
        self.choices = choices if forks or past else None
        self.forks = forks
        self.suffix = suffix
        self.branches = list(branches)
        self._past = collections.deque(past)
        self._record: list[RecordedTurn | Call | None] = []

    @property
    def replaying(self) -> bool:
        """Whether the agent's next turn or call is replayed from the record."""
        return bool(self._past)

    def replay(self) -> Event:
        """The next recorded turn, call or decision."""
        event = self._past.popleft()
        if not isinstance(event, ForkChoice):
            self._record.append(event)
        return event

    def begin(self) -> int:
        """Reserves an entry in the record for a turn or call that has just been requested; returns its index."""
        self._record.append(None)
        return len(self._record) - 1

    def finish(self, index: int, event: RecordedTurn | Call) -> None:
        """Records the result of the turn or call with this index."""
        self._record[index] = event

    def may_fork(self, stop: Sequence[str]) -> bool:
        """Whether a turn with these stop strings may reach a decision that is forked."""
        return self.choices is not None and self.forks > 0 and self.choices.stop in stop

    def others(self, before: Sequence[int], source: Stream) -> list[BranchState]:
        """The branches for all choices but the first, which this branch takes itself.

        Args:
          before: the tokens of the turn before the decision.
          source: the conversation of the turn.
        """
        assert self.choices is not None
        past = [event for event in self._record if event is not None]
        depth = len(self.branches)
        self.forks -= 1
        return [
            BranchState(
                self.choices,
                self.forks,
                past=[*past, ForkChoice(before=tuple(before), source=source, tool=tool)],
                suffix=f"{self.suffix}@{depth}:{tool}",
                branches=self.branches,
            )
            for tool in list(self.choices.names)[1:]
        ]

    @property
    def alone(self) -> bool:
        """Whether no turn or call but the latest is unfinished, so that a replay reaches exactly this point."""
        return all(event is not None for event in self._record[:-1])
