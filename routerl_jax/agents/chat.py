"""What agents share on top of a conversation: what fits, answers that are begun for the policy, and turns by tool calls."""

from __future__ import annotations

import abc
import bisect
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol, Self, TypeVar

from routerl_jax.agents.agent import LLM, Agent, Pieces, Tools
from routerl_jax.agents.conversation import Conversation
from routerl_jax.agents.grammar import TOO_LONG
from routerl_jax.agents.observation import Reply, Spoken
from routerl_jax.core.tokenizer import Tokenizer
from routerl_jax.core.tool_schema import ToolSchema
from routerl_jax.core.types import Action, Episode, Example, Observation, Passage, Turn
from routerl_jax.data.rounds import RecordedRounds
from routerl_jax.data.trajectories import Document

T = TypeVar("T", Passage, Document)


def fitting(items: Sequence[T], fits: Callable[[Sequence[T]], bool], *, cut: bool = True) -> tuple[T, ...]:
    """As many whole items as fit, best first; else as many words of the first one as fit, then ` ..`; () if no word fits.

    Args:
      items: the items, best first.
      fits: whether there is room for these items. It must also hold for fewer or shorter items.
      cut: whether the first one may be shown in part.
    """
    for count in range(len(items), 0, -1):
        if fits(items[:count]):
            return tuple(items[:count])
    if not items or not cut:
        return ()
    first = items[0]

    def beginning(words: int) -> T:
        return dataclasses.replace(first, text=" ".join(first.text.split()[:words]) + " ..")

    words = bisect.bisect_left(range(1, len(first.text.split())), True, key=lambda n: not fits([beginning(n)]))
    return (beginning(words),) if words else ()


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


class Form(Protocol):
    """How a policy writes its actions: a grammar, or another object with these members (`Grammar` describes them)."""

    @property
    def functions(self) -> tuple[dict[str, Any], ...]: ...
    def of(self, tokenizer: Tokenizer) -> Any: ...
    def with_schemas(self, schemas: Mapping[str, ToolSchema]) -> Any: ...


class CallingAgent(Agent):
    """An agent whose policy calls functions if the agent's form has some. Then every turn is a message of the model's chat, and
    what follows it comes as a tool's message. Subclasses are dataclasses, and write `_run`.

    Attributes:
      form_field: name of the field with the form (None there: tags of the agent's own).
    """

    form_field: ClassVar[str] = "grammar"

    async def run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        return await self.of(llm.tokenizer)._run(example, llm, tools)

    @abc.abstractmethod
    async def _run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        """`run`, with the agent already in the form of the model."""

    @property
    def _form(self) -> Form | None:
        return getattr(self, self.form_field)

    def _with(self, form: Form) -> Self:
        changed: Any = dataclasses.replace(self, **{self.form_field: form})  # type: ignore[type-var]
        return changed

    def of(self, tokenizer: Tokenizer) -> Self:
        """The agent in the form of this model. Raises ValueError if the model has none."""
        form = None if self._form is None else self._form.of(tokenizer)
        return self if form is None or form is self._form else self._with(form)

    @property
    def functions(self) -> tuple[dict[str, Any], ...]:
        """The form's own."""
        return () if self._form is None else self._form.functions

    def with_schemas(self, schemas: Mapping[str, ToolSchema]) -> Self:
        return self if self._form is None else self._with(self._form.with_schemas(schemas))

    # --- what the policy writes ---

    def check_tags(self, what: str) -> None:
        """Raises ValueError if the policy calls functions. `what` needs the tags of the agent's own protocol."""
        if self.functions:
            raise ValueError(
                f"{what} needs the tags of the agent's own protocol, and the policy calls functions: leave one of them out "
                "(config.agent.grammar)"
            )

    def recorded_pieces(self, recorded: RecordedRounds) -> Pieces:
        self.check_tags("learning from recorded rounds")
        return super().recorded_pieces(recorded)

    def whole(self, turn: Turn) -> bool:
        """Whether a turn ends as the form says. A message ends with the template's own token."""
        return not self.functions or turn.stop_reason == "eos"

    def spoken(self, write: Callable[[Self], str]) -> str | Spoken:
        """A turn for a demonstration, which `write` makes from the agent in a model's form."""
        return Spoken(lambda tokenizer: write(self.of(tokenizer))) if self.functions else write(self)

    # --- what it is shown ---

    def framed(self, observation: Observation) -> Observation | Reply:
        """An observation as the policy gets it: as a tool's message if it calls functions."""
        return Reply(observation, "tool") if self.functions else observation

    def size_of(self, chat: Conversation, observation: Observation) -> int:
        """Number of tokens that an observation takes."""
        framed = self.framed(observation)
        if isinstance(framed, Reply):
            return chat.reply_tokens(framed.observation, role=framed.role)
        return chat.tokens_of(framed)

    def say(self, chat: Conversation, observation: Observation, reserve: int, passages: Sequence[str] = ()) -> bool:
        """Shows an observation to the policy. Returns False and shows nothing if fewer than `reserve` tokens would be left."""
        if self.size_of(chat, observation) > chat.room - reserve:
            return False
        framed = self.framed(observation)
        if isinstance(framed, Reply):
            chat.reply(framed.observation, passages, role=framed.role)
        else:
            chat.observe(framed, passages)
        return True

    async def show_fitting(
        self,
        chat: Conversation,
        passages: Sequence[Passage],
        observation: Callable[[Sequence[Passage]], Observation],
        *,
        most: int,
        reserve: int,
        cut: bool,
    ) -> tuple[Passage, ...] | None:
        """Shows an observation of as many passages as fit (agents/fitting.py).

        Args:
          passages: the passages, best first.
          observation: makes the observation of some of them.
          most: tokens that it may take.
          reserve: tokens that must be left after it.
          cut: whether the first passage may be shown in part.

        Returns:
          The passages that it shows; None, and nothing is shown, if not even an observation of none leaves `reserve` tokens.
        """
        whole = observation(passages)
        await chat.prepare(self.framed(whole))

        def of(subset: Sequence[Passage]) -> Observation:
            return whole if tuple(subset) == tuple(passages) else observation(subset)

        shown = fitting(passages, lambda subset: self.size_of(chat, of(subset)) <= most, cut=cut)
        return shown if self.say(chat, of(shown), reserve, [passage.id for passage in shown]) else None

    def note_tokens(self, chat: Conversation) -> int:
        """Tokens kept for the reply to a turn whose proper reply has no room."""
        return chat.reply_tokens(TOO_LONG, role="tool") if self.functions else 0

    def end_turn(self, chat: Conversation, observation: Observation, reserve: int) -> None:
        """Replies to a turn before an answer is begun for the policy.

        If `observation` would leave fewer than `reserve` tokens, the reply is a note that uses `note_tokens` of them. Without
        functions nothing is shown, because the answer follows in the same text.
        """
        if self.functions and not self.say(chat, observation, reserve):
            chat.reply(TOO_LONG, role="tool")
