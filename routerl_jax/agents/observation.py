"""Observations as a model reads them: a text with a mark for each picture, and the pictures at the marks. Closer looks: regions
of the latest picture in a conversation, cut from the raw picture. And demonstrations as token sequences, in the form that a
rollout records."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from routerl_jax.agents.grammar import inert
from routerl_jax.core.ledger import Ledger
from routerl_jax.core.tokenizer import ReplyRole, Tokenizer
from routerl_jax.core.types import Observation, Shown
from routerl_jax.core.types import Sequence as TokenSequence
from routerl_jax.models.image_tokens import ImageTokens, PictureReader
from routerl_jax.models.images import ImageSource, decode_image, encoded_image
from routerl_jax.models.regions import (
    Pixels,
    RefusedRegion,
    RegionRule,
    Size,
    View,
    framed,
    reframed,
    region,
    released_frame,
    widened,
)


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


Piece = Observation | Reply | Rendered | Look | Marked | Spoken
# The pieces that follow a prompt, in order, each with whether the policy writes it (as text, or a whole message: Spoken).
Pieces = list[tuple[Piece, bool]]


def texts(piece: Piece) -> list[str]:
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
            parts.append(tokenizer.plain(f"(a picture that can't be shown: {inert(str(error), tags)})"))
            shown.append(dataclasses.replace(piece, error=str(error)))
        else:
            parts.append(tokenizer.decode(images.marker))
            shown.append(dataclasses.replace(piece, digest=digest))
    return Rendered(text="".join(parts), shown=tuple(shown))


def expanded_tokens(images: PictureReader | None, sources: Sequence[Any]) -> int:
    """Tokens that pictures take in addition to their marks, one for each picture."""
    return 0 if images is None else sum(images.process(source).tokens - 1 for source in sources)


# --- pictures in a conversation, and closer looks at them ---


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Seen:
    """A picture as it was shown: all of `page`, or the pixels `part` of it, at the size `frame`."""

    page: Shown
    part: Pixels | None
    frame: Size


class Viewer:
    """The pictures that a conversation has shown so far.

    Args:
      images: the model's image reader; None if the model sees no images.
      pictures: the pictures of the prompt, in order.
    """

    def __init__(self, images: PictureReader | None, pictures: Sequence[ImageSource] = ()) -> None:
        self._images = images
        self._pages: dict[str, Shown] = {}  # whole pictures by digest
        self._latest: _Seen | None = None
        self.see(Shown(image=picture) for picture in pictures)

    def copy(self) -> Viewer:
        """One that has seen the same so far."""
        copied = copy.copy(self)
        copied._pages = dict(self._pages)
        return copied

    def see(self, shown: Iterable[Shown]) -> None:
        """Records pictures that have been shown, in order. A crop counts as a crop only if its parent was shown too."""
        for item in shown:
            if self._images is None or item.error or (isinstance(item.image, str) and not item.image):
                continue
            digest, frame = self._images.process(item.image).digest, self._images.frame(item.image)
            if item.box and item.parent in self._pages:
                left, top, right, bottom = map(int, item.box)
                self._latest = _Seen(page=self._pages[item.parent], part=(left, top, right, bottom), frame=frame)
            else:
                page = dataclasses.replace(item, digest=digest)
                self._pages[digest] = page
                self._latest = _Seen(page=page, part=None, frame=frame)

    @property
    def frame(self) -> Size | None:
        """(width, height) at which the model sees the latest picture; None if there is none yet."""
        return None if self._latest is None else self._latest.frame

    def reframed(self, box: Sequence[float], written: Size, rule: RegionRule) -> Sequence[float]:
        """A box on the latest picture (a whole one) that was written in another frame, converted to the model's frame.

        A box that is already valid in the model's frame is returned unchanged.

        Args:
          box: the box as it was written.
          written: (width, height) of the frame in which it was written.
          rule: how the model's boxes are read.

        Raises:
          RefusedRegion: no picture has been shown yet, or the box marks no region of it.
          ValueError: the picture can't be read any more.
        """
        if self._latest is None:
            raise RefusedRegion("no picture has been shown yet to look closer at")
        assert self._latest.part is None, "a box in another frame on a crop"
        if written == self._latest.frame and not rule.box_scale:
            with contextlib.suppress(RefusedRegion):
                region(box, self.view(), rule)
                return box
        return reframed(box, decode_image(self._latest.page.image).size, written, self._latest.frame, rule)

    def region(self, box: Sequence[float], rule: RegionRule) -> Shown:
        """A region of the latest picture as a picture to show: a PNG, with its box on the raw picture.

        The raw picture is the parent, however many crops lie between. If it can't be read any more, the result has `error` and
        no picture.

        Args:
          box: the box as the model writes it.
          rule: how boxes are read.

        Raises:
          RefusedRegion: no picture has been shown yet, or the box marks no region of it.
        """
        seen = self._latest_view
        shown = Shown(passage=seen.page.passage, parent=seen.page.digest)
        try:
            picture = decode_image(seen.page.image)
        except ValueError as error:
            return dataclasses.replace(shown, error=str(error))
        cut = region(box, self._box_view(picture.size, rule), rule)
        content, _ = encoded_image(picture.crop(cut))
        return dataclasses.replace(shown, image=content, box=cut)

    def view(self) -> View:
        """The latest picture: the size of its page, the part of the page that it shows, and its frame.

        Raises:
          RefusedRegion: no picture has been shown yet.
          ValueError: the page can't be read any more.
        """
        seen = self._latest_view
        page = decode_image(seen.page.image).size
        return View(page=page, part=seen.part or (0, 0, *page), frame=seen.frame)

    def written(self, pixels: Sequence[float], rule: RegionRule) -> tuple[int, int, int, int]:
        """The box that the model must write so that `region` shows these pixels of the raw page.

        The pixels are clipped to the latest picture, widened to the smallest region that the rule takes (the released rule
        takes any), and rounded outwards.

        Raises:
          RefusedRegion: the part has no area, or is not in the latest picture.
          ValueError: the page can't be read any more.
        """
        view = self._box_view(self.view().page, rule)
        return framed(widened(pixels, view, 0 if rule.released else rule.least), view, rule.box_scale)

    @property
    def _latest_view(self) -> _Seen:
        if self._latest is None or self._images is None:
            raise RefusedRegion("no picture has been shown yet to look closer at")
        return self._latest

    def _box_view(self, page: Size, rule: RegionRule) -> View:
        """The view to which boxes refer under a rule. Under the released rule it is the whole page, in a frame of its own."""
        seen = self._latest_view
        whole = (0, 0, *page)
        part = seen.part or whole
        if not rule.released:
            return View(page=page, part=part, frame=seen.frame)
        assert self._images is not None
        processor, size = self._images.processor, (part[2] - part[0], part[3] - part[1])
        return View(page=page, part=whole, frame=released_frame(size, processor.min_pixels, processor.max_pixels))


# --- demonstrations ---


def demonstrated(
    prompt: Sequence[int] | Mapping[str, Any],
    pieces: Iterable[tuple[Piece, bool]],
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
