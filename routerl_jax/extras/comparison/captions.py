"""Replaces the pictures of questions by captions, for policies that see no pictures."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from routerl_jax.core.config import Size, checked
from routerl_jax.core.types import Example, Message
from routerl_jax.services.config import ChatModelConfig
from routerl_jax.services.load import CachedModel, chat_model

TASK = (
    "Somebody who can't see this picture has to answer questions about it. Describe what it shows in one paragraph: people, "
    "things, places and what they are known as, text that can be read, numbers, colours, and where each is."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class CaptionConfig(ChatModelConfig):
    """A vision model that describes the questions' pictures. With an empty `model`, pictures are not replaced."""

    max_tokens: Size = 256  # most tokens of a caption


def settings_that_count(config: CaptionConfig) -> Mapping[str, Any]:
    """The settings that captions depend on."""
    names = ("kind", "model", "extra", "max_tokens")
    return {**{name: getattr(config, name) for name in names}, "task": TASK}


def captioned(examples: Sequence[Example], config: CaptionConfig, *, progress: str = "") -> list[Example]:
    """Examples with a caption instead of each picture, before the question: `Picture: ..`.

    Captions are cached, so each picture is described once.

    Raises:
      ValueError: the model can't be reached as the configuration says, or a picture has no caption. The message names the
        first one.
    """
    pictures = [(example, image) for example in examples for image in example.images]
    if not pictures:
        return list(examples)
    model = CachedModel(chat_model(config), progress=progress)
    try:
        requests = [[Message(role="user", content=TASK, images=(image,))] for _, image in pictures]
        replies = model.complete(requests, max_tokens=config.max_tokens)
    finally:
        model.close()
    errors = [reply.error or ("" if reply.text.strip() else "the reply is empty") for reply in replies]
    if failed := [(example.id, error) for (example, _), error in zip(pictures, errors) if error]:
        raise ValueError(
            f"{len(failed)} of {len(pictures)} pictures have no caption; that of question {failed[0][0]!r}: {failed[0][1]}. "
            "The others are kept: start the same command again"
        )
    captions = iter([" ".join(reply.text.split()) for reply in replies])
    return [
        dataclasses.replace(
            example, question=_captioned_question([next(captions) for _ in example.images], example.question), images=()
        )
        for example in examples
    ]


def _captioned_question(captions: Sequence[str], question: str) -> str:
    several = len(captions) > 1
    lines = [f"Picture{f' {i}' if several else ''}: {caption}" for i, caption in enumerate(captions, 1)]
    return "\n".join([*lines, question])
