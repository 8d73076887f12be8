"""Demonstrations as token sequences, in the form that a rollout records."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as Seq
from typing import Any

from routerl_jax.agents.observation import Look, Marked, Rendered, Reply, Spoken, rendered
from routerl_jax.agents.viewer import Viewer
from routerl_jax.core.ledger import Ledger
from routerl_jax.core.tokenizer import ReplyRole, Tokenizer
from routerl_jax.core.types import Observation, Sequence
from routerl_jax.models.image_tokens import ImageTokens
from routerl_jax.models.images import ImageSource


def demonstrated(
    prompt: Seq[int] | Mapping[str, Any],
    pieces: Iterable[tuple[Observation | Reply | Rendered | Look | Marked | Spoken, bool]],
    tokenizer: Tokenizer,
    images: ImageTokens | None = None,
    tags: Collection[str] = (),
    pictures: Seq[ImageSource] = (),
) -> Sequence:
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
