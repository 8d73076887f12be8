"""Observations as a model reads them: a text with a mark for each picture, and the pictures at the marks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from routerl_jax.core.tokenizer import Tokenizer
from routerl_jax.core.types import Observation, Shown
from routerl_jax.models.image_tokens import ImageTokens


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
    """An observation that comes as a user's message: it ends the policy's turn and begins its next one (Conversation.reply)."""

    observation: Observation


def texts(piece: Observation | Reply | Rendered) -> list[str]:
    """The texts of what is said, without pictures."""
    said = piece.observation if isinstance(piece, Reply) else piece
    if isinstance(said, Rendered):
        return [said.text]
    return [said] if isinstance(said, str) else [one for one in said if isinstance(one, str)]


def rendered(observation: Observation, tokenizer: Tokenizer, images: ImageTokens | None) -> Rendered:
    """An observation in a model's form. A picture that can't be used is replaced by words that say why.

    Marks of pictures in its texts, which may come from anywhere, are broken up: no text stands for a picture.

    Args:
      images: the model's, None for one that sees none.

    Raises:
      ValueError: there are pictures, and the model sees none.
    """
    if isinstance(observation, str) and images is None:
        return Rendered(text=observation)
    parts: list[str] = []
    shown: list[Shown] = []
    for piece in [observation] if isinstance(observation, str) else observation:
        if isinstance(piece, str):
            parts.append(piece if images is None else _without_marks(piece, tokenizer, images))
            continue
        if images is None:
            raise ValueError("the policy sees no images, and an observation shows one; use a vision-language model")
        try:
            digest = images.process(piece.image, "picture").digest
        except ValueError as error:
            parts.append(f"(a picture that can't be shown: {error})")
            shown.append(dataclasses.replace(piece, error=str(error)))
        else:
            parts.append(tokenizer.decode(images.marker))
            shown.append(dataclasses.replace(piece, digest=digest))
    return Rendered(text="".join(parts), shown=tuple(shown))


def _without_marks(text: str, tokenizer: Tokenizer, images: ImageTokens) -> str:
    for mark in map(tokenizer.decode, ([token] for token in images.marker)):
        text = text.replace(mark, f"{mark[:1]} {mark[1:]}")
    return text


def expanded_tokens(images: ImageTokens | None, sources: Sequence[Any]) -> int:
    """Tokens that pictures take beyond the one mark that stands for each."""
    return 0 if images is None else sum(images.process(source).tokens - 1 for source in sources)
