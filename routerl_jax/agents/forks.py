"""Going every way at a routing decision: what must be known to fork an attempt, and an attempt's course through its forks.

When the policy has written all that comes before the name of a knowledge base, the attempt is forked. The attempt itself goes
on with the first name; for every other name a new attempt begins. That one runs the agent from the start, but what the policy
wrote and the tools replied until the fork is replayed from the record, so that an agent needs no code for being forked. It must
only act alike on equal turns and replies, which deterministic runs take anyway. Nothing is computed again: the engine copies
the conversation's row.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

from routerl_jax.agents.grammar import RouteChoices
from routerl_jax.core.types import Branch, Call, StopReason
from routerl_jax.generation.streams import Stream


@dataclasses.dataclass(frozen=True, kw_only=True)
class Written:
    """A turn as it was written once."""

    tokens: tuple[int, ...]
    stop_reason: StopReason


@dataclasses.dataclass(frozen=True, kw_only=True)
class Taken:
    """A decision to be taken: what the turn holds before it, the conversation that has come so far, and which way to go."""

    before: tuple[int, ...]
    source: Stream
    tool: str


Event = Written | Call | Taken


class Course:
    """An attempt's way through its decisions: what is replayed, what has been done since, and how many may still be forked.

    Attributes:
      choices: how the policy writes them; None: nothing is forked.
      forks: decisions on the way that may still be forked.
      suffix: of the attempt's name, from which its randomness is drawn; other ways have other ones.
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
        self._done: list[Written | Call | None] = []

    @property
    def replaying(self) -> bool:
        """Whether what the agent does now has been done before."""
        return bool(self._past)

    def replay(self) -> Event:
        """What the next turn or call was."""
        event = self._past.popleft()
        if not isinstance(event, Taken):
            self._done.append(event)
        return event

    def begin(self) -> int:
        """Keeps a place in the record for what has just been asked for."""
        self._done.append(None)
        return len(self._done) - 1

    def finish(self, place: int, event: Written | Call) -> None:
        """Records what came of it."""
        self._done[place] = event

    def may_fork(self, stop: Sequence[str]) -> bool:
        """Whether a turn with these stop strings may come to a decision that is to be forked."""
        return self.choices is not None and self.forks > 0 and self.choices.stop in stop

    def others(self, before: Sequence[int], source: Stream) -> list[Course]:
        """The courses of the other ways at a decision; this one takes the first.

        Args:
          before: what the turn holds before the decision.
          source: its conversation.
        """
        assert self.choices is not None
        past = [event for event in self._done if event is not None]
        depth = len(self.branches)
        self.forks -= 1
        return [
            Course(
                self.choices,
                self.forks,
                past=[*past, Taken(before=tuple(before), source=source, tool=tool)],
                suffix=f"{self.suffix}@{depth}:{tool}",
                branches=self.branches,
            )
            for tool in list(self.choices.names)[1:]
        ]

    @property
    def alone(self) -> bool:
        """Whether at most the latest turn or call is still under way, so that a replay can come to this very point."""
        return all(event is not None for event in self._done[:-1])
