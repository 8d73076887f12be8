"""Written examples as token sequences: what a rollout would have recorded."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as Seq
from typing import Any

from routerl_jax.agents.observation import Rendered, Reply, rendered
from routerl_jax.core.ledger import Ledger
from routerl_jax.core.tokenizer import Tokenizer
from routerl_jax.core.types import Observation, Sequence
from routerl_jax.models.image_tokens import ImageTokens


def demonstrated(
    prompt: Seq[int] | Mapping[str, Any],
    pieces: Iterable[tuple[Observation | Reply | Rendered, bool]],
    tokenizer: Tokenizer,
    images: ImageTokens | None = None,
    tags: Collection[str] = (),
) -> Sequence:
    """A written example as a rollout would have recorded it.

    Args:
      prompt: before the first piece, not learnt: ids, or what `Ledger.feed` takes where there are images among them.
      pieces: in order, and whether the policy is to write them; the others are fed, as observations are. `Rendered` pieces,
        as records have them, are taken as they are.
      images: the model's, None for one that sees none.
      tags: of the agent's protocol (`rendered`).

    Raises:
      ValueError: a piece to be written is no text, a recorded picture can't be used, or there are pictures, and the model sees
        none.
    """
    ledger = Ledger()
    ledger.feed(**(prompt if isinstance(prompt, Mapping) else {"tokens": prompt}))
    for piece, learnt in pieces:
        if learnt:
            if not isinstance(piece, str):
                raise ValueError(f"the policy writes text, and not {type(piece).__name__}")
            ids = tokenizer.encode(piece)
            ledger.sample(ids, [0.0] * len(ids), version=0)
        else:
            ledger.feed(**_fed(piece, ledger, tokenizer, images, tags))
    return ledger.sequence()


def _fed(
    piece: Observation | Reply | Rendered,
    ledger: Ledger,
    tokenizer: Tokenizer,
    images: ImageTokens | None,
    tags: Collection[str],
) -> Mapping[str, Any]:
    """What `Ledger.feed` takes."""
    observation = piece.observation if isinstance(piece, Reply) else piece
    said = observation if isinstance(observation, Rendered) else rendered(observation, tokenizer, images, tags)
    ids = (
        tokenizer.reply(said.text, last=ledger.tokens[-1]) if isinstance(piece, Reply) else tokenizer.encode(said.text)
    )
    if not said.images:
        return {"tokens": ids}
    if images is None:
        raise ValueError("an observation shows a picture, and the policy sees none: give a vision-language model")
    return images.fed(ids, said.images, ledger.next_position)
