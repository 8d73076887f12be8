"""The interface of a chat model: one answer to each conversation."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from routerl_jax.core.text import split_thoughts
from routerl_jax.core.types import Message
from routerl_jax.models.images import image_digest


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    """A model's answer to one conversation, or the reason why there is none.

    Attributes:
      text: the answer; "" if the request failed.
      error: why it failed, in one line; None if it did not fail.
      finish: "stop" (the model ended its answer), "length" (`max_tokens` cut it off) or "error".
      prompt_tokens, tokens: number of tokens read and written; 0 if unknown.
      cached: the answer came from a cache.
      fault: the kind of the error (`services.faults`); "" if it is unknown.
      stopped_by: the stop string that ended the answer, if the server names it. It is not part of `text`.
      seconds: the time that the answer took; 0 if it was not measured.
      retries: how often the request was sent again, after a failure that may pass or a reply of no use. The tokens of such
        replies are counted, too.
    """

    text: str = ""
    error: str | None = None
    finish: str = "stop"
    prompt_tokens: int = 0
    tokens: int = 0
    cached: bool = False
    fault: str = ""
    stopped_by: str = ""
    seconds: float = 0.0
    retries: int = 0


def conversation_json(conversation: Sequence[Message]) -> list[list[str]]:
    """A conversation as JSON-serialisable data: roles, contents, and the digests and positions of pictures.

    Equal conversations give equal data.

    Raises:
      ValueError: a picture can't be read.
    """
    return [[m.role, m.content, *map(image_digest, m.images), *map(str, m.image_offsets)] for m in conversation]


class ChatModel(Protocol):
    """A model that answers conversations. It is safe to use from several threads."""

    @property
    def name(self) -> str:
        """The model's name in caches and reports."""
        ...

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings on which answers depend, besides the model's name and a call's arguments; JSON-serialisable."""
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
        """One answer per conversation, in order.

        A conversation that fails has `error` set; nothing is raised for it. The caller may set a time limit (core.time_limit):
        conversations that have no answer by then have failed.

        Args:
          schema: a JSON schema that the answer should obey. Some models can't be forced to, so check the answer.
          sample: number of the sample. To ask the same again and get another answer (above temperature 0), count it up.
        """
        ...


# --- JSON by a schema --------------------------------------------------------------------------------------------------
# Asks for JSON in the prompt of models that can't be forced to write it, and removes the reasoning around an answer.


def with_schema(conversation: Sequence[Message], schema: Mapping[str, Any]) -> list[Message]:
    """The conversation, with a request for JSON of this schema at the end of its last message."""
    ask = f"\n\nWrite a single JSON value that fits the schema below. Write nothing before or after it.\n{json.dumps(schema)}"
    *before, last = conversation
    return [*before, dataclasses.replace(last, content=last.content + ask)]


def without_thinking(text: str) -> str:
    """An answer without the reasoning that some models write before it, between `<think>` and `</think>`.

    If reasoning was cut off before its end, nothing of it remains. If its beginning was in the prompt, everything up to
    `</think>` is removed.
    """
    return split_thoughts(text)[1].strip()
