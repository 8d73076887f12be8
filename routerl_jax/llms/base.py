"""What a language model is to those who want one answer to each prompt."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from routerl_jax.core.types import Message
from routerl_jax.models.images import image_digest


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    """A model's answer to one conversation, or why there is none.

    Attributes:
      text: the answer; "" where it failed.
      error: why it failed, in one line; None if it did not.
      finish: "stop" (it came to its end), "length" (`max_tokens` cut it) or "error".
      prompt_tokens, tokens: read and written; 0 where they are not known.
      kept: it was in a cache.
      fault: of an error, what kind it is (`llms.faults`); "" where that is not known.
      stopped_by: the stop string that ended it, where the server says so; it is not in the text.
      seconds: that it took; 0 where nobody measured.
    """

    text: str = ""
    error: str | None = None
    finish: str = "stop"
    prompt_tokens: int = 0
    tokens: int = 0
    kept: bool = False
    fault: str = ""
    stopped_by: str = ""
    seconds: float = 0.0


def spoken(conversation: Sequence[Message]) -> list[list[str]]:
    """What two equal conversations have in common, JSON-serialisable: roles, contents, digests of pictures.

    Raises:
      ValueError: a picture that can't be read.
    """
    return [[m.role, m.content, *map(image_digest, m.images), *map(str, m.places)] for m in conversation]


class ChatModel(Protocol):
    """A model that answers conversations; safe to use from several threads."""

    @property
    def name(self) -> str:
        """Of the model, as caches and reports know it."""
        ...

    @property
    def settings(self) -> Mapping[str, Any]:
        """What else its answers depend on, beside the arguments of a call; JSON-serialisable."""
        ...

    def complete(
        self,
        conversations: Sequence[Sequence[Message]],
        *,
        max_tokens: int = 1024,
        temperature: float = 0.0,
        schema: Mapping[str, Any] | None = None,
        sample: int = 0,
    ) -> list[Completion]:
        """One answer per conversation, in order. A conversation that fails has `error` set; nothing is raised for it. Where the
        caller has set a time limit (core.patience), what has no answer by then has failed.

        Args:
          schema: a JSON schema that the answer should obey. A model that can't be made to may ignore it: check the answer.
          sample: who asks the same again, and wants another answer above temperature 0, counts up here.
        """
        ...
