"""Observations as a model reads them: a text with a mark for each picture, and the pictures at the marks. And demonstrations as
token sequences, in the form that a rollout records."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from routerl_jax.agents.viewer import Viewer
from routerl_jax.core.ledger import Ledger
from routerl_jax.core.tokenizer import ReplyRole, Tokenizer
from routerl_jax.core.types import Observation, Shown
from routerl_jax.core.types import Sequence as TokenSequence
from routerl_jax.models.image_tokens import ImageTokens, PictureReader
from routerl_jax.models.images import ImageSource
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


def demonstrated(
    prompt: Sequence[int] | Mapping[str, Any],
    pieces: Iterable[tuple[Observation | Reply | Rendered | Look | Marked | Spoken, bool]],
    tokenizer: Tokenizer,
    images: ImageTokens | None = None,
    tags: Collection[str] = (),
    pictures: Sequence[ImageSource] = (),
) -> TokenSequence:
    """The token sequence of a demonstration, as a rollout would have recorded it.

    Args:
      prompt: the tokens before the first piece, which are not trained on: token ids, or the arguments of `Ledger.feed` if there
        are images among them.
      pieces: the pieces in order, each with whether the policy writes it. The others are fed as observations. `Rendered`
        pieces, which come from records, are used unchanged.
      images: the model's image tokens; None if the model sees no images.
      tags: tags of the agent's protocol (`rendered`).
      pictures: the pictures of the prompt.

    Raises:
      ValueError: a piece that the policy writes is no text, a recorded picture can't be used, a box marks no region, or there
        are pictures and the model sees none.
    """
    ledger, viewer = Ledger(), Viewer(images, pictures)
    ledger.feed(**(prompt if isinstance(prompt, Mapping) else {"tokens": prompt}))
    for piece, learnt in pieces:
        if learnt:
            if isinstance(piece, Marked):
                piece = piece.render(viewer.reframed(piece.box, piece.frame, piece.rule))
            if isinstance(piece, Spoken):
                ids = [*tokenizer.encode(piece.render(tokenizer)), tokenizer.turn_end]
            elif isinstance(piece, str):
                ids = tokenizer.encode(piece)
            else:
                raise ValueError(f"the policy writes text, and not {type(piece).__name__}")
            ledger.sample(ids, [0.0] * len(ids), version=0)
        else:
            assert not isinstance(piece, Marked | Spoken), "a turn is the policy's"
            piece = piece.render(viewer.region(piece.box, piece.rule)) if isinstance(piece, Look) else piece
            observation = piece.observation if isinstance(piece, Reply) else piece
            content = (
                observation if isinstance(observation, Rendered) else rendered(observation, tokenizer, images, tags)
            )
            ledger.feed(
                **_feed_arguments(content, piece.role if isinstance(piece, Reply) else None, ledger, tokenizer, images)
            )
            viewer.see(content.shown)
    return ledger.sequence()


def _feed_arguments(
    content: Rendered, role: ReplyRole | None, ledger: Ledger, tokenizer: Tokenizer, images: ImageTokens | None
) -> Mapping[str, Any]:
    """The arguments of `Ledger.feed` for an observation. `role`: whose message it comes as; None: it is part of a turn."""
    ids = tokenizer.reply(content.text, ledger.tokens[-1], role) if role else tokenizer.encode(content.text)
    if not content.images:
        return {"tokens": ids}
    if images is None:
        raise ValueError("an observation shows a picture, and the policy sees none: give a vision-language model")
    return images.fed(ids, content.images, ledger.next_position)
