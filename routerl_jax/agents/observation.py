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
      text: the text, with the model's image mark where each picture stands.
      shown: the pictures in order. One that can't be used has `error`, and no mark in the text.
    """

    text: str
    shown: tuple[Shown, ...] = ()

    @property
    def images(self) -> list[Any]:
        """The images at the marks of the text, in order."""
        return [item.image for item in self.shown if not item.error]


@dataclasses.dataclass(frozen=True)
class Reply:
    """An observation that comes as a user's message, or a tool's: it ends the policy's turn and begins its next one
    (Conversation.reply)."""

    observation: Observation
    role: ReplyRole = "user"


@dataclasses.dataclass(frozen=True)
class Spoken:
    """In a demonstration, a whole message of the policy. It gets the token that ends it in the model's chat template.

    Attributes:
      render: writes the message in the form of a tokenizer's model.
    """

    render: Callable[[Tokenizer], str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Look:
    """The observation after a box, in a demonstration. The crop is cut from the latest picture when the demonstration is
    rendered for a model, because each model has its own frame.

    Attributes:
      box: the box as the policy writes it.
      rule: how boxes are read.
      render: makes the observation from the crop.
    """

    box: Sequence[float]
    rule: RegionRule
    render: Callable[[Shown], Observation | Reply]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Marked:
    """A turn with a box on the latest picture, in a recorded conversation. The box is written anew in the frame of the model
    that is trained.

    Attributes:
      box: the box as it was recorded.
      frame: (width, height) of the picture as the recorded writer saw it.
      rule: how the trained model's boxes are read.
      render: makes the turn's text from a box.
    """

    box: Sequence[float]
    frame: Size
    rule: RegionRule
    render: Callable[[Sequence[float]], str]


def texts(piece: Observation | Reply | Rendered | Look | Marked | Spoken) -> list[str]:
    """The texts of a piece, without pictures.

    Raises:
      ValueError: they depend on a chat template.
    """
    if isinstance(piece, Spoken):
        raise ValueError(
            "the agent speaks in a model's chat template, which a new vocabulary does not have: give config.model.path"
        )
    if isinstance(piece, Marked):
        return [piece.render(piece.box)]
    if isinstance(piece, Look):
        piece = piece.render(Shown())
    content = piece.observation if isinstance(piece, Reply) else piece
    if isinstance(content, Rendered):
        return [content.text]
    return [content] if isinstance(content, str) else [text for text in content if isinstance(text, str)]


def rendered(
    observation: Observation, tokenizer: Tokenizer, images: PictureReader | None, tags: Collection[str] = ()
) -> Rendered:
    """An observation in a model's form. A picture that can't be used is replaced by words that say why.

    The texts may come from anywhere. Marks of turns and pictures in them are broken up (`Tokenizer.plain`), so that no text
    ends a turn or stands for a picture.

    Args:
      images: the model's image reader; None if the model sees no images.
      tags: tags of the agent's protocol. They stay special tokens if the tokenizer has them as such.

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
            if piece.error:  # the picture could not be read before
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
    """Tokens that pictures take in addition to their marks, one for each picture."""
    return 0 if images is None else sum(images.process(source).tokens - 1 for source in sources)
