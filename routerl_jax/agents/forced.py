"""Forced answers: the agent begins the answer for a policy that has used up its turns or tokens without answering."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from routerl_jax.agents.conversation import Conversation
from routerl_jax.core.types import Action, Episode, Turn


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForcedAnswer:
    """How an answer is begun for the policy.

    Attributes:
      opening, closing: tags of the answer.
      tokens: tokens kept free for the answer itself.
      think: opening and closing tags of thoughts that the policy may write before the answer; () for no thoughts.
      thought_tokens: most tokens of these thoughts.
    """

    opening: str
    closing: str
    tokens: int
    think: tuple[str, str] | tuple[()] = ()
    thought_tokens: int = 0

    def reserve(self, chat: Conversation) -> int:
        """Tokens that the answer needs, without thoughts."""
        return self.tokens + chat.tokens_of(self.opening)

    async def thoughts(self, chat: Conversation, reserve: int) -> str:
        """Lets the policy think, with `reserve` tokens kept for the answer. Returns the text between thoughts and answer."""
        if not self.think:
            return ""
        opening, closing = self.think
        room = chat.room - reserve - chat.tokens_of(f"{opening}{closing}\n")
        if room < 1:
            return ""
        chat.force(opening)
        turn = await chat.generate(stop=(closing,), max_tokens=min(self.thought_tokens, room))
        return "\n" if closing in turn.text else f"{closing}\n"

    async def answer(self, chat: Conversation, parse: Callable[[str], Action], truncated: bool = False) -> Episode:
        """The episode with a forced answer, or without an answer if there is no room for one.

        Args:
          parse: reads the action from the turn's text, opening included.
          truncated: whether a limit of tokens is the reason for forcing the answer.
        """
        needed = self.reserve(chat)
        if chat.room < needed:
            return chat.episode(answer=None, truncated=True)
        chat.force(await self.thoughts(chat, needed) + self.opening)
        turn: Turn = await chat.generate(stop=(self.closing,), max_tokens=self.tokens)
        turn.action = parse(turn.forced + turn.text)
        answer = turn.action.answer if turn.action.kind == "answer" else None
        return chat.episode(answer=answer, truncated=truncated or turn.stop_reason == "length")
