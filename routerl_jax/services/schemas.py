"""Asks for JSON in the prompt of models that can't be forced to write it, and removes the reasoning around an answer."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from routerl_jax.core.text import split_thoughts
from routerl_jax.core.types import Message


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
