"""Turns the token ids of agents into chat messages: a tokenizer that belongs to no model, and the parsing of its ids.

Agents write prompts, observations and forced openings as token ids. A `Transcript` has ids of its own for pieces of text, so
that everything that an agent fed can be read back. It also has ids for the marks of a chat: the beginning of each role's
message, its end, and a picture.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import io
import itertools
import re
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

from PIL import Image

from routerl_jax.core.ledger import Ledger
from routerl_jax.core.tokenizer import ReplyRole, Tokenizer, check_length
from routerl_jax.core.types import Failure, Message, PlacedImage
from routerl_jax.engine.policy import TurnFailed
from routerl_jax.models.images import ImageProcessor, ImageSource, decode_image, image_digest
from routerl_jax.models.regions import Size
from routerl_jax.services import faults
from routerl_jax.services.config import Form

# --- pictures for endpoints --------------------------------------------------------------------------------------------
# Prepares pictures for chat models. They are resized here, so that the size that the model sees is known.

_KEPT = 256  # pictures that are kept, because the same page is often shown again


class UnusablePicture(TurnFailed, ValueError):
    """A picture can't be read. In an observation, words replace it, as for every ValueError of a picture. If it is one of the
    question's pictures, the episode ends."""

    def __str__(self) -> str:
        return self.failure.message


@dataclasses.dataclass(frozen=True)
class SentPicture:
    """A picture as it is sent: a PNG of `frame` (width, height) pixels that counts as `tokens` tokens."""

    content: bytes
    frame: Size
    tokens: int
    digest: str


class SentPictures:
    """A `models.image_tokens.PictureReader` for endpoints.

    A picture gets the size that Qwen2.5-VL's processor gives it. A Qwen2.5-VL model behind the endpoint then resizes nothing,
    and the boxes that it writes are in a frame that we know. Other models may see the picture smaller; their boxes are right
    in relative coordinates only (`RegionRule.box_scale`).

    Args:
      processor: decides the size of a picture and its number of tokens.
      mark: token id that stands for a picture.
    """

    def __init__(self, processor: ImageProcessor, mark: int) -> None:
        self.processor = processor
        self._mark = mark
        self._sent: collections.OrderedDict[str, SentPicture] = collections.OrderedDict()

    @property
    def marker(self) -> list[int]:
        """The one id that stands for a picture."""
        return [self._mark]

    def process(self, source: ImageSource, name: str | None = None) -> SentPicture:
        """The picture as it is sent. Raises UnusablePicture, which names the picture."""
        try:
            key = image_digest(source)
            if key not in self._sent:
                self._sent[key] = self._encoded(source, name)
        except ValueError as error:
            raise UnusablePicture(Failure(kind=faults.PICTURE, message=str(error))) from error
        self._sent.move_to_end(key)
        if len(self._sent) > _KEPT:
            self._sent.popitem(last=False)
        return self._sent[key]

    def frame(self, source: ImageSource, name: str | None = None) -> Size:
        """(width, height) in pixels of the picture as it is sent."""
        return self.process(source, name).frame

    def fed(self, tokens: Sequence[int], images: Sequence[ImageSource]) -> dict[str, Any]:
        """The arguments of `Ledger.feed` for tokens with these pictures at their marks.

        Raises:
          UnusablePicture: a picture can't be read.
          ValueError: the number of marks differs from the number of pictures.
        """
        pictures = [self.process(image) for image in images]
        marks = [i for i, token in enumerate(tokens) if token == self._mark]
        if len(marks) != len(pictures):
            raise ValueError(
                f"{len(marks)} marks stand for {len(pictures)} pictures; put one where each picture belongs"
            )
        fed_tokens: list[int] = []
        starts: list[tuple[int, PlacedImage]] = []
        remaining = iter(pictures)
        for token in tokens:
            if token != self._mark:
                fed_tokens.append(token)
                continue
            picture = next(remaining)
            starts.append((len(fed_tokens), picture))
            fed_tokens += [token] * picture.tokens
        return {"tokens": fed_tokens, "images": starts}

    def _encoded(self, source: ImageSource, name: str | None) -> SentPicture:
        image = decode_image(source, name=name)
        processor = self.processor
        _, rows, columns = processor.grid(image.height, image.width, name=name or "image")
        frame = columns * processor.patch_size, rows * processor.patch_size
        buffer = io.BytesIO()
        resized = image if image.size == frame else image.resize(frame, Image.Resampling.BICUBIC)
        resized.save(buffer, format="PNG", compress_level=1)
        content = buffer.getvalue()
        tokens = processor.tokens(image.height, image.width)
        return SentPicture(content, frame, tokens, hashlib.sha256(content).hexdigest())


# --- the transcript ----------------------------------------------------------------------------------------------------

Role = Literal["system", "user", "assistant"]

_ROLES: tuple[Role, ...] = ("system", "user", "assistant")
_MARKS = (*(f"<|{role}|>" for role in _ROLES), "<|end|>", "<|picture|>")  # a mark's id is its index
_END, PICTURE = 3, 4
# Each piece is about one token of the usual vocabularies: a short word with the space before it, three digits, one or two
# other characters.
_PIECE = re.compile(r" ?[A-Za-z]{1,7}| ?[0-9]{1,3}| ?[^\W\d_]{1,2}| ?[^\w\s]{1,2}|\s{1,8}|.", re.DOTALL)
_MARK = re.compile("|".join(map(re.escape, _MARKS)))

_BEGIN_WITH = "Begin your reply with exactly what follows, and go on from there:\n{begun}"
_GO_ON = "Go on where you stopped."
_NO_TOOLS = (
    "a chat model behind an endpoint has no chat template here, and tool calls are written by one: take another "
    "config.agent.grammar than 'tool_calls', or a model of your own"
)


class Transcript(Tokenizer):
    """A lossless tokenizer for chat models with an unbounded vocabulary. An id is about one token of the usual vocabularies.

    Ids have a meaning only in the process that made them.
    """

    def __init__(self) -> None:
        self._pieces = list(_MARKS)
        self._numbers = {piece: number for number, piece in enumerate(_MARKS)}
        self._lock = threading.Lock()

    def encode(self, text: str) -> list[int]:
        """Ids of a text. Marks in it become the ids of marks. Raises DoesNotFit as any tokenizer."""
        check_length(text)
        ids: list[int] = []
        end = 0
        for match in _MARK.finditer(text):
            ids += self.encode_written(text[end : match.start()])
            ids.append(self._numbers[match[0]])
            end = match.end()
        return ids + self.encode_written(text[end:])

    def exceeds(self, text: str, tokens: int) -> bool:
        """Whether the text has more than this number of tokens."""
        return sum(1 for _ in itertools.islice(_PIECE.finditer(text), max(tokens, 0) + 1)) > tokens

    def prepare(self, texts: Iterable[str]) -> None:
        """Does nothing: its ids are numbered in the order in which texts come."""

    def encode_written(self, text: str) -> list[int]:
        """Ids of text that a model wrote. Marks in it are plain text."""
        return [self._number(piece) for piece in _PIECE.findall(text)]

    def encode_prompt(self, text: str) -> list[int]:
        """The same as `encode`."""
        return self.encode(text)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, including marks."""
        return "".join(self._pieces[i] for i in ids)

    @functools.cached_property
    def marks(self) -> frozenset[str]:
        """The marks of the beginning and end of messages, and of a picture."""
        return frozenset(_MARKS)

    def chat(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = (), continue_final: bool = False
    ) -> list[int]:
        """Ids of messages and of the beginning of the assistant's next message. Raises ValueError if there are tools."""
        if tools:
            raise ValueError(_NO_TOOLS)
        parts = [f"<|{message.role}|>{message.content}<|end|>" for message in messages]
        if continue_final:
            return self.encode("".join(parts))[:-1]
        return self.encode("".join(parts) + "<|assistant|>")

    def render(self, messages: Any, tools: Any = (), **settings: Any) -> str:
        """Always raises ValueError, because there is no chat template."""
        raise ValueError(_NO_TOOLS)

    def reply(self, text: str, last: int | None = None, role: ReplyRole = "user") -> list[int]:
        """Ids of `reply_text`."""
        return self.encode(self.reply_text(text, role))

    def reply_text(self, text: str, role: ReplyRole = "user") -> str:
        """The end of the assistant's message, a user's message, and the beginning of the assistant's next message.
        Raises ValueError if the role is a tool."""
        if role == "tool":
            raise ValueError(_NO_TOOLS)
        return f"<|end|><|user|>{text}<|end|><|assistant|>"

    @property
    def has_chat_template(self) -> bool:
        """Always True."""
        return True

    @functools.cached_property
    def eos_ids(self) -> frozenset[int]:
        """Empty: a reply ends where the endpoint ends it."""
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
class _RolePart:
    """A run of one role's text. In the last one, the forced beginning of the policy's turn starts at character `written`."""

    role: Role
    text: str = ""
    images: list[Any] = dataclasses.field(default_factory=list)
    image_offsets: list[int] = dataclasses.field(default_factory=list)
    written: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatRequest:
    """A request to a chat model.

    Attributes:
      messages: the conversation.
      begun: the forced beginning of the policy's turn, which the reply should continue; "" if there is none.
      continued: the last message is the assistant's own, with `begun` at its end, and the endpoint continues it. Otherwise the
        reply is asked to repeat `begun`.
    """

    messages: list[Message]
    begun: str = ""
    continued: bool = False


def chat_request(
    ledger: Ledger, forced: Collection[tuple[int, int]], transcript: Transcript, form: Form = "turns"
) -> ChatRequest:
    """A conversation as messages.

    Text that the policy wrote, or that was forced in its place, is the assistant's. An observation within the policy's turn
    (between tags) depends on the form. In the form `turns` it is a user's message. In the form `continue` it is part of the
    assistant's message, which the endpoint continues. Endpoints take pictures from users only, so a conversation that shows
    pictures within a turn always takes the form `turns`. A prompt without roles, as agents without `instruct` write it, begins
    with the user's message.

    Args:
      forced: spans of the ledger that were fed in the policy's place.
    """
    if form == "continue":
        parts = _parts_by_role(ledger, forced, transcript, whole=True)
        if not any(part.images for part in parts if part.role == "assistant"):
            continued = bool(parts) and parts[-1].role == "assistant"
            begun = parts[-1].text[parts[-1].written :] if continued else ""
            return ChatRequest(messages=[_message(part) for part in parts], begun=begun, continued=continued)
    parts = _parts_by_role(ledger, forced, transcript, whole=False)
    last = parts[-1] if parts else _RolePart("user")
    if last.role != "assistant":
        return ChatRequest(messages=[_message(part, strip=True) for part in parts])
    begun, last.text = last.text[last.written :], last.text[: last.written]
    request = _BEGIN_WITH.format(begun=begun.strip()) if begun.strip() else _GO_ON
    parts = parts if last.text.strip() else parts[:-1]
    if parts and parts[-1].role == "user":
        parts[-1].text = f"{parts[-1].text.rstrip()}\n\n{request}"
    else:
        parts.append(_RolePart("user", request))
    return ChatRequest(messages=[_message(part, strip=True) for part in parts], begun=begun)


def _parts_by_role(
    ledger: Ledger, forced: Collection[tuple[int, int]], transcript: Transcript, *, whole: bool
) -> list[_RolePart]:
    """The conversation cut by role. `whole`: observations within the assistant's turn count as the assistant's."""
    policy_mask = list(ledger.sampled)
    written_mask = list(policy_mask)
    for start, stop in forced:
        policy_mask[start:stop] = [True] * (stop - start)
    pictures = dict(ledger.images)
    parts: list[_RolePart] = []
    role: Role | None = None
    has_written = False  # the policy has written something in this turn
    i = 0
    while i < len(ledger):
        token = ledger.tokens[i]
        if token < len(_ROLES):
            role, has_written = _ROLES[token], False
        elif token != _END:
            if role == "assistant":
                by_assistant = policy_mask[i] or not has_written or whole
            else:
                by_assistant = role is None and (policy_mask[i] or (whole and has_written))
            speaker: Role = "assistant" if by_assistant else role if role in ("system", "user") else "user"
            has_written = has_written or policy_mask[i]
            if not parts or parts[-1].role != speaker:
                parts.append(_RolePart(speaker))
            if i in pictures:
                picture = pictures[i]
                assert isinstance(picture, SentPicture)
                parts[-1].images.append(picture.content)
                parts[-1].image_offsets.append(len(parts[-1].text))
                i += picture.tokens - 1
            else:
                parts[-1].text += transcript.decode([token])
                if written_mask[i] or (has_written and not policy_mask[i]):
                    parts[-1].written = len(parts[-1].text)
        i += 1
    return [part for part in parts if part.text.strip() or part.images]


def _message(part: _RolePart, strip: bool = False) -> Message:
    text, offsets = part.text, part.image_offsets
    if strip:
        start = len(text) - len(text.lstrip())
        text = text.strip()
        offsets = [min(max(offset - start, 0), len(text)) for offset in offsets]
    return Message(role=part.role, content=text, images=tuple(part.images), image_offsets=tuple(offsets))
