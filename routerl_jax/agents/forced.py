"""Answers that are begun for a policy which has spent its turns, or its room, without one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from routerl_jax.agents.conversation import Conversation
from routerl_jax.core.types import Action, Episode, Turn


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForcedAnswer:
    """How an answer is begun for the policy.

    Attributes:
      opening, closing: of the answer.
      tokens: room kept for the answer itself.
      think: opening and closing of thoughts, which a policy that thinks before its own actions may write first; () for none.
      thought_tokens: most tokens of these.
    """

    opening: str
    closing: str
    tokens: int
    think: tuple[str, str] | tuple[()] = ()
    thought_tokens: int = 0

    def reserve(self, chat: Conversation) -> int:
        """Tokens that it needs, thoughts apart."""
        return self.tokens + chat.tokens_of(self.opening)

    async def thoughts(self, chat: Conversation, kept: int) -> str:
        """Lets the policy think, with so much room kept for what follows; returns what stands between the two."""
        if not self.think:
            return ""
        opening, closing = self.think
        room = chat.room - kept - chat.tokens_of(f"{opening}{closing}\n")
        if room < 1:
            return ""
        chat.force(opening)
        turn = await chat.generate(stop=(closing,), max_tokens=min(self.thought_tokens, room))
        return "\n" if closing in turn.text else f"{closing}\n"

    async def answer(self, chat: Conversation, parse: Callable[[str], Action], truncated: bool = False) -> Episode:
        """The episode with such an answer, or without one where not even that has room.

        Args:
          parse: reads the turn's text, opening included.
          truncated: a limit of tokens brought it about.
        """
        needed = self.reserve(chat)
        if chat.room < needed:
            return chat.episode(answer=None, truncated=True)
        chat.force(await self.thoughts(chat, needed) + self.opening)
        turn: Turn = await chat.generate(stop=(self.closing,), max_tokens=self.tokens)
        turn.action = parse(turn.forced + turn.text)
        answer = turn.action.answer if turn.action.kind == "answer" else None
        return chat.episode(answer=answer, truncated=truncated or turn.stop_reason == "length")
