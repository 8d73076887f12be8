"""Observations as a model reads them: a text with a mark for each picture, and the pictures at the marks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

from routerl_jax.core.tokenizer import ReplyRole, Tokenizer
from routerl_jax.core.types import Observation, Shown
from routerl_jax.models.image_tokens import PictureReader
from routerl_jax.models.regions import RegionRule, Size


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rendered:
    """An observation in a model's own form.

    Attributes:
      text: with the model's mark of a picture where each one stands.
      shown: the pictures in their order, those that can't be used with `error`, which have no mark.
    """

    text: str
    shown: tuple[Shown, ...] = ()

    @property
    def images(self) -> list[Any]:
        """What to see at the marks of the text, in order."""
        return [item.image for item in self.shown if not item.error]


@dataclasses.dataclass(frozen=True)
class Reply:
    """An observation that comes as a user's message, or a tool's: it ends the policy's turn and begins its next one
    (Conversation.reply)."""

    observation: Observation
    role: ReplyRole = "user"


@dataclasses.dataclass(frozen=True)
class Spoken:
    """In a demonstration, a whole message of the policy, with the token that ends it, as the model's chat template has it.

    Attributes:
      said: the message in this model's form.
    """

    said: Callable[[Tokenizer], str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Look:
    """In a demonstration, what follows a box: cut from the latest picture shown when it is rendered for a model, since each
    model has a frame of its own.

    Attributes:
      box: as the policy writes it.
      rule: what becomes of it.
      said: the observation with the crop in it.
    """

    box: Sequence[float]
    rule: RegionRule
    said: Callable[[Shown], Observation | Reply]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Marked:
    """In a recorded conversation, a turn with a box on the latest picture shown: written anew in the learning model's frame.

    Attributes:
      box: as it was written.
      frame: (width, height) of the picture as whoever wrote it saw it.
      rule: what becomes of the model's boxes.
      said: the turn with this box in it.
    """

    box: Sequence[float]
    frame: Size
    rule: RegionRule
    said: Callable[[Sequence[float]], str]


def texts(piece: Observation | Reply | Rendered | Look | Marked | Spoken) -> list[str]:
    """The texts of what is said, without pictures.

    Raises:
      ValueError: it depends on a chat template.
    """
    if isinstance(piece, Spoken):
        raise ValueError(
            "the agent speaks in a model's chat template, which a new vocabulary does not have: give config.model.path"
        )
    if isinstance(piece, Marked):
        return [piece.said(piece.box)]
    if isinstance(piece, Look):
        piece = piece.said(Shown())
    said = piece.observation if isinstance(piece, Reply) else piece
    if isinstance(said, Rendered):
        return [said.text]
    return [said] if isinstance(said, str) else [one for one in said if isinstance(one, str)]


def rendered(
    observation: Observation, tokenizer: Tokenizer, images: PictureReader | None, tags: Collection[str] = ()
) -> Rendered:
    """An observation in a model's form. A picture that can't be used is replaced by words that say why.

    Its texts may come from anywhere: marks of turns and pictures in them are broken up (`Tokenizer.plain`), so that no text
    ends a turn or stands for a picture.

    Args:
      images: the model's, None for one that sees none.
      tags: of the agent's protocol, which stay what they are where the tokenizer has them as special tokens.

    Raises:
      ValueError: there are pictures, and the model sees none.
    """
    parts: list[str] = []
    shown: list[Shown] = []
    for piece in [observation] if isinstance(observation, str) else observation:
        if isinstance(piece, str):
            parts.append(tokenizer.plain(piece, keep=tags))
            continue
        if images is None:
            raise ValueError("the policy sees no images, and an observation shows one; use a vision-language model")
        try:
            if piece.error:  # there is none to be shown
                raise ValueError(piece.error)
            digest = images.process(piece.image, "picture").digest
        except ValueError as error:
            parts.append(tokenizer.plain(f"(a picture that can't be shown: {error})"))
            shown.append(dataclasses.replace(piece, error=str(error)))
        else:
            parts.append(tokenizer.decode(images.marker))
            shown.append(dataclasses.replace(piece, digest=digest))
    return Rendered(text="".join(parts), shown=tuple(shown))


def expanded_tokens(images: PictureReader | None, sources: Sequence[Any]) -> int:
    """Tokens that pictures take beyond the one mark that stands for each."""
    return 0 if images is None else sum(images.process(source).tokens - 1 for source in sources)
