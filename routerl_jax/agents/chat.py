"""A chat in a protocol: actions come out of it, observations go in, and room is kept for the last turn.

What depends on tags or tool calls, on room in the context, on answers that are begun for the policy, and on cutting what was
found stands here, once, on top of a `Conversation`.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TypeVar

from routerl_jax.agents.conversation import Conversation, Prompt, Rollout
from routerl_jax.agents.grammar import TOO_LONG, Grammar
from routerl_jax.agents.observation import Reply
from routerl_jax.core.text import split_thoughts
from routerl_jax.core.tokenizer import ReplyRole
from routerl_jax.core.types import Action, Call, Episode, Example, Observation, Passage, Turn
from routerl_jax.data.trajectories import Document
from routerl_jax.models.images import ImageSource


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatRules:
    """The rules of a chat.

    Attributes:
      protocol: how actions and observations are written, in the form of the model (`Grammar.of`).
      role: whose messages the observations are; None: they stand in the policy's own text.
      around: text before and after an observation that stands in the policy's own text.
      max_turn_tokens: most tokens of a turn.
      max_observation_tokens: most tokens of what a search found; 0: as many as there is room for.
      answer_tokens: tokens kept free for the last turn.
      opening: text with which the last turn is begun for the policy; "": the policy writes all of it; None: there is no last
        turn, and the episode ends without an answer.
      last_stops: stop strings of the last turn.
      thoughts: opening and closing tags of thoughts that the policy may write before the opening; () for none.
      judges_begun: whether a turn that was begun for the policy can be well-formed.
    """

    protocol: Grammar
    role: ReplyRole | None = None
    around: str = ""
    max_turn_tokens: int
    max_observation_tokens: int = 0
    answer_tokens: int
    opening: str | None
    last_stops: tuple[str, ...]
    thoughts: tuple[str, str] | tuple[()] = ()
    judges_begun: bool = False

    def framed(self, observation: Observation) -> Observation | Reply:
        """An observation as the policy gets it."""
        if self.role is not None:
            return Reply(observation, self.role)
        if not self.around:
            return observation
        return [self.around, *([observation] if isinstance(observation, str) else observation), self.around]


class Chat(Conversation):
    """A conversation in a protocol (`LLM.chat`).

        for _ in range(max_searches):
            action = await chat.act()
            if action is None:  # there is no room for a turn
                break
            if action.kind == "answer":
                return chat.episode(answer=action.answer)
            if action.kind == "search":
                await chat.show(await tools[action.tool].search(action.query, k))
            else:
                chat.remind(action.error)
        return await chat.final_answer()

    Attributes:
      turn: that of the latest action.
      reserve: tokens kept for the last turn and, if turns are messages, for the reply to a turn whose proper reply has no room.
    """

    turn: Turn

    def __init__(self, rollout: Rollout, prompt: Prompt, rules: ChatRules, images: Sequence[ImageSource] = ()) -> None:
        super().__init__(rollout, prompt, images)
        self.rules = rules
        self._last_turn = 0  # tokens that the last turn needs
        if rules.opening is not None:
            self._last_turn = rules.answer_tokens + self.tokens_of(rules.opening)
        note = self.tokens_of(Reply(TOO_LONG, "tool")) if rules.role == "tool" and self._last_turn else 0
        self.reserve = self._last_turn + note
        self._full = False  # a turn or an observation had no room
        self._unanswered = ""  # the reply that the latest turn has yet to get

    @property
    def protocol(self) -> Grammar:
        """How actions and observations are written, in the form of the model."""
        return self.rules.protocol

    @property
    def example(self) -> Example:
        """The question."""
        return self._rollout.example

    @property
    def sample(self) -> int:
        """Index of this rollout among the rollouts of its example."""
        return self._rollout.sample

    async def act(self, allowed: Callable[[Action], Action] | None = None) -> Action | None:
        """The policy's next action; None if there is no room for a turn. The turn itself is `turn`.

        Args:
          allowed: returns an action as it counts: unchanged, or as an invalid one with the reason.
        """
        room = self.room - self.reserve
        if self._full or room < 1:
            self._full = True
            return None
        self.turn = await self.generate(stop=self.protocol.stops, max_tokens=min(self.rules.max_turn_tokens, room))
        return read_turn(self.turn, self.protocol, allowed)

    def tell(self, observation: Observation, passages: Sequence[str] = ()) -> bool:
        """Shows an observation. If fewer than `reserve` tokens would be left, it returns False, shows nothing, and the last
        turn follows.

        Args:
          passages: ids of the passages that it shows as text.
        """
        framed = self.rules.framed(observation)
        if not self.fits(framed, self.room - self.reserve):
            self._full, self._unanswered = True, TOO_LONG
            return False
        self._unanswered = ""
        self.observe(framed, passages)
        return True

    def remind(self, error: str = "") -> bool:
        """Tells the policy why its turn could not be carried out, by default with its action's error; as `tell`."""
        action = self.turn.action
        return self.tell(self.protocol.reminder(error or (action.error if action is not None else "")))

    async def show(
        self,
        call: Call,
        passages: Sequence[Passage] | None = None,
        observation: Callable[[Sequence[Passage]], Observation] | None = None,
        cut: bool | None = None,
    ) -> tuple[Passage, ...] | None:
        """Shows as many of the passages found as fit, best first (`fitting`).

        Args:
          passages: those that may be shown; None: all of the call.
          observation: makes the observation of some of them; None: the protocol's own.
          cut: whether the first passage may be shown in part; None: if there is a limit of tokens.

        Returns:
          The passages shown; None if not even an observation of none has room. The last turn follows then.
        """
        passages = call.passages if passages is None else passages
        observation = observation or functools.partial(self.protocol.observation, call)
        limit, whole = self.rules.max_observation_tokens, observation(passages)
        await self.prepare(self.rules.framed(whole))

        def of(subset: Sequence[Passage]) -> Observation:
            return whole if tuple(subset) == tuple(passages) else observation(subset)

        room = self.room - self.reserve
        most = min(limit or room, room)
        cut = bool(limit) if cut is None else cut
        shown = fitting(passages, lambda subset: self.fits(self.rules.framed(of(subset)), most), cut=cut)
        return shown if self.tell(of(shown), [passage.id for passage in shown]) else None

    async def final_answer(self, reply: str = "", truncated: bool | None = None) -> Episode:
        """The episode after the last turn. It has no answer if there is no room for one, or no last turn (`ChatRules.opening`).

        Args:
          reply: the reply that the latest turn has yet to get. Only in tool calls: elsewhere the answer follows in the same
            text.
          truncated: whether a limit of tokens is the reason for the last turn; None: if something had no room.
        """
        rules, truncated = self.rules, self._full if truncated is None else truncated
        if rules.opening is None:
            return self.episode(answer=None, truncated=truncated)
        if (reply := reply or self._unanswered) and rules.role == "tool" and not self.tell(reply):
            self.reply(TOO_LONG, role="tool")
        if self.room < self._last_turn:
            return self.episode(answer=None, truncated=True)
        self.force(await self.think(self._last_turn) + rules.opening)
        turn = await self.generate(stop=rules.last_stops, max_tokens=rules.answer_tokens)
        action = read_turn(turn, self.protocol, judges_begun=rules.judges_begun)
        answer = action.answer if action.kind == "answer" else None
        return self.episode(answer=answer, truncated=truncated or turn.stop_reason == "length")

    async def think(self, reserve: int) -> str:
        """Lets the policy think before a turn that is begun for it, with `reserve` tokens kept for that turn. Returns the text
        between the thoughts and the turn."""
        if not self.rules.thoughts:
            return ""
        opening, closing = self.rules.thoughts
        room = self.room - reserve - self.tokens_of(f"{opening}{closing}\n")
        if room < 1:
            return ""
        self.force(opening)
        turn = await self.generate(stop=(closing,), max_tokens=min(self.rules.max_turn_tokens, room))
        return "\n" if closing in turn.text else f"{closing}\n"


def read_turn(
    turn: Turn, protocol: Grammar, allowed: Callable[[Action], Action] | None = None, *, judges_begun: bool = False
) -> Action:
    """Reads a turn: sets its action, and whether it is well-formed, and returns the action.

    Args:
      allowed: see `Chat.act`.
      judges_begun: judge turns that were begun for the policy by the policy's part alone (a closed answer, no thought in it),
        because it could not write a thought before. Else they are not well-formed.
    """
    text, end = turn.forced + turn.text, "eos" if protocol.functions else "stop"
    action = protocol.parse(text)
    if not turn.forced:
        # a message ends with the template's own token
        turn.well_formed = protocol.well_formed(text) and (not protocol.functions or turn.stop_reason == end)
    elif judges_begun:
        plain = turn.stop_reason == end and split_thoughts(turn.text)[1] == turn.text
        closed = action.kind == "answer" and protocol.well_formed(protocol.write_answer("", action.answer))
        turn.well_formed = plain and closed
    if allowed is not None:
        action = allowed(action)
        turn.well_formed = turn.well_formed and action.kind != "invalid"
    turn.action = action
    return action


T = TypeVar("T", Passage, Document)


def fitting(items: Sequence[T], fits: Callable[[Sequence[T]], bool], *, cut: bool = True) -> tuple[T, ...]:
    """As many whole items as fit, best first; else as many words of the first one as fit, then ` ..`; () if no word fits.

    Beside all items, what is tried is at most about twice as long as what fits, however long the items are.

    Args:
      items: the items, best first.
      fits: whether there is room for these items. It must also hold for fewer or shorter items.
      cut: whether the first one may be shown in part.
    """
    if not items or fits(items):
        return tuple(items)
    if count := _most(lambda n: fits(items[:n]), len(items) - 1):
        return tuple(items[:count])
    first, words = items[0], items[0].text.split() if cut else []

    def beginning(count: int) -> T:
        return dataclasses.replace(first, text=" ".join(words[:count]) + " ..")

    count = _most(lambda n: fits([beginning(n)]), len(words) - 1)
    return (beginning(count),) if count else ()


def _most(holds: Callable[[int], bool], limit: int) -> int:
    """The largest number from 1 to `limit` for which a condition holds, 0 if there is none. It must hold for smaller ones, too.
    No number is tried that is more than twice the result."""
    end = 1
    while end <= limit and holds(end):
        end *= 2
    start = end // 2 + 1
    return start - 1 + bisect.bisect_left(range(start, min(end, limit + 1)), True, key=lambda n: not holds(n))
