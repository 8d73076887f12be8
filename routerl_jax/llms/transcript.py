"""Conversations of agents as messages of a chat: a tokenizer that belongs to no model, and what its ids say.

Agents write prompts, observations and forced openings as token ids. Those of a `Transcript` are numbers of its own for pieces
of text, so that whatever an agent fed can be read back, and for the marks of a chat: whose words begin, where they end, where
a picture stands.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

from routerl_jax.core.ledger import Ledger
from routerl_jax.core.tokenizer import ReplyRole, Tokenizer
from routerl_jax.core.types import Message
from routerl_jax.llms.config import Form
from routerl_jax.llms.sent_pictures import SentPicture

Role = Literal["system", "user", "assistant"]

_ROLES: tuple[Role, ...] = ("system", "user", "assistant")
_MARKS = (*(f"<|{role}|>" for role in _ROLES), "<|end|>", "<|picture|>")  # their ids are their places
_END, PICTURE = 3, 4
# About a token each, by the usual vocabularies: short words with the space before them, three digits, one or two other signs.
_PIECE = re.compile(r" ?[A-Za-z]{1,7}| ?[0-9]{1,3}| ?[^\W\d_]{1,2}| ?[^\w\s]{1,2}|\s{1,8}|.", re.DOTALL)
_MARK = re.compile("|".join(map(re.escape, _MARKS)))

_BEGIN_WITH = "Begin your reply with exactly what follows, and go on from there:\n{begun}"
_GO_ON = "Go on where you stopped."
_NO_TOOLS = (
    "a chat model behind an endpoint has no chat template here, and tool calls are written by one: take another "
    "config.agent.grammar than 'tool_calls', or a model of your own"
)


class Transcript(Tokenizer):
    """A tokenizer for what goes to a chat model: lossless, of an unbounded vocabulary, about a token of the usual ones per id.

    An id means a piece of text to the process that made it, and nothing to anybody else.
    """

    def __init__(self) -> None:
        self._pieces = list(_MARKS)
        self._numbers = {piece: number for number, piece in enumerate(_MARKS)}
        self._lock = threading.Lock()

    def encode(self, text: str) -> list[int]:
        """Ids of a text; marks in it are marks."""
        ids: list[int] = []
        done = 0
        for found in _MARK.finditer(text):
            ids += self.encode_written(text[done : found.start()])
            ids.append(self._numbers[found[0]])
            done = found.end()
        return ids + self.encode_written(text[done:])

    def encode_written(self, text: str) -> list[int]:
        """Ids of what a model wrote, in which nothing is a mark."""
        return [self._number(piece) for piece in _PIECE.findall(text)]

    def encode_prompt(self, text: str) -> list[int]:
        """As `encode`."""
        return self.encode(text)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, marks included."""
        return "".join(self._pieces[i] for i in ids)

    @functools.cached_property
    def marks(self) -> frozenset[str]:
        """Of whose words begin and end, and of a picture."""
        return frozenset(_MARKS)

    def chat(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = (), continue_final: bool = False
    ) -> list[int]:
        """Ids of messages, and of the beginning of the assistant's next one. Raises ValueError if there are tools."""
        if tools:
            raise ValueError(_NO_TOOLS)
        parts = [f"<|{message.role}|>{message.content}<|end|>" for message in messages]
        if continue_final:
            return self.encode("".join(parts))[:-1]
        return self.encode("".join(parts) + "<|assistant|>")

    def render(self, messages: Any, tools: Any = (), **settings: Any) -> str:
        """Raises ValueError: there is no template."""
        raise ValueError(_NO_TOOLS)

    def reply(self, text: str, last: int | None = None, role: ReplyRole = "user") -> list[int]:
        """Ids of the end of the assistant's words, a user's message, and the beginning of the assistant's next words. Raises
        ValueError where a tool is to speak."""
        if role == "tool":
            raise ValueError(_NO_TOOLS)
        return self.encode(f"<|end|><|user|>{text}<|end|><|assistant|>")

    @property
    def has_chat_template(self) -> bool:
        """True."""
        return True

    @functools.cached_property
    def eos_ids(self) -> frozenset[int]:
        """None: a reply ends where the endpoint ends it."""
        return frozenset()

    def __len__(self) -> int:
        return len(self._pieces)

    def _number(self, piece: str) -> int:
        number = self._numbers.get(piece)
        if number is None:
            with self._lock:
                number = self._numbers.setdefault(piece, len(self._pieces))
                if number == len(self._pieces):
                    self._pieces.append(piece)
        return number


@dataclasses.dataclass
class _Said:
    """A stretch of one role's words. `written`: where, in its text, what was begun for the policy begins, if it is the last."""

    role: Role
    text: str = ""
    images: list[Any] = dataclasses.field(default_factory=list)
    places: list[int] = dataclasses.field(default_factory=list)
    written: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """What a chat model is asked.

    Attributes:
      messages: the conversation.
      begun: what the reply should go on from: the forced beginning of the policy's turn; "" where there is none.
      continued: the last message is the assistant's own, `begun` at its end, and is to be gone on with as it is. Else the reply
        is asked to repeat `begun`.
    """

    messages: list[Message]
    begun: str = ""
    continued: bool = False


def asked(ledger: Ledger, forced: Collection[tuple[int, int]], transcript: Transcript, form: Form = "turns") -> Asked:
    """A conversation as messages.

    What the policy wrote, or was written in its place, are the assistant's words. What its surroundings said within its turn
    (an observation between tags) is a user's message in the form `turns`. In the form `continue` it is a part of the
    assistant's own, and the endpoint goes on with what the assistant has said so far; a conversation that shows pictures within
    a turn takes the form `turns`, as endpoints take pictures from users alone. A text without roles, as agents write that don't
    `instruct`, begins with the user's words.

    Args:
      forced: stretches of the ledger that were fed in the policy's place.
    """
    if form == "continue":
        said = _said(ledger, forced, transcript, whole=True)
        if not any(one.images for one in said if one.role == "assistant"):
            continued = bool(said) and said[-1].role == "assistant"
            begun = said[-1].text[said[-1].written :] if continued else ""
            return Asked(messages=[_message(one) for one in said], begun=begun, continued=continued)
    said = _said(ledger, forced, transcript, whole=False)
    last = said[-1] if said else _Said("user")
    if last.role != "assistant":
        return Asked(messages=[_message(one, strip=True) for one in said])
    begun, last.text = last.text[last.written :], last.text[: last.written]
    say = _BEGIN_WITH.format(begun=begun.strip()) if begun.strip() else _GO_ON
    said = said if last.text.strip() else said[:-1]
    if said and said[-1].role == "user":
        said[-1].text = f"{said[-1].text.rstrip()}\n\n{say}"
    else:
        said.append(_Said("user", say))
    return Asked(messages=[_message(one, strip=True) for one in said], begun=begun)


def _said(ledger: Ledger, forced: Collection[tuple[int, int]], transcript: Transcript, *, whole: bool) -> list[_Said]:
    """Stretches by who says them. `whole`: all of the assistant's turn is its own."""
    policy = list(ledger.sampled)
    written = list(policy)
    for start, stop in forced:
        policy[start:stop] = [True] * (stop - start)
    pictures = dict(ledger.images)
    said: list[_Said] = []
    role: Role | None = None
    own = False  # the policy has written in this turn
    i = 0
    while i < len(ledger):
        token = ledger.tokens[i]
        if token < len(_ROLES):
            role, own = _ROLES[token], False
        elif token != _END:
            if role == "assistant":
                mine = policy[i] or not own or whole
            else:
                mine = role is None and (policy[i] or (whole and own))
            who: Role = "assistant" if mine else role if role in ("system", "user") else "user"
            own = own or policy[i]
            if not said or said[-1].role != who:
                said.append(_Said(who))
            if i in pictures:
                picture = pictures[i]
                assert isinstance(picture, SentPicture)
                said[-1].images.append(picture.content)
                said[-1].places.append(len(said[-1].text))
                i += picture.tokens - 1
            else:
                said[-1].text += transcript.decode([token])
                if written[i] or (own and not policy[i]):
                    said[-1].written = len(said[-1].text)
        i += 1
    return [one for one in said if one.text.strip() or one.images]


def _message(said: _Said, strip: bool = False) -> Message:
    text, places = said.text, said.places
    if strip:
        start = len(text) - len(text.lstrip())
        text = text.strip()
        places = [min(max(place - start, 0), len(text)) for place in places]
    return Message(role=said.role, content=text, images=tuple(said.images), places=tuple(places))
