"""Asks for JSON in the prompt of models that can't be forced to write it, and removes the reasoning around an answer."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from routerl_jax.core.types import Message

_THINKING = re.compile(r"<think(?:ing)?>.*?</think(?:ing)?>", re.DOTALL | re.IGNORECASE)
_END = re.compile(r"</think(?:ing)?>", re.IGNORECASE)
_OPEN_THINKING = re.compile(r"<think(?:ing)?>.*\Z", re.DOTALL | re.IGNORECASE)
_CLOSED_THINKING = re.compile(r"\A.*</think(?:ing)?>", re.DOTALL | re.IGNORECASE)


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
    end = max((match.end() for match in _END.finditer(text)), default=0)
    text = _THINKING.sub("", text[:end]) + text[end:]  # no search beyond the last end, where it would be in vain
    text = _CLOSED_THINKING.sub("", text)
    return _OPEN_THINKING.sub("", text).strip()
