"""Asking for JSON in words, where a model can't be made to write it, and taking an answer out of what surrounds it."""

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
    """The conversation with its last message asking for JSON of this schema."""
    ask = f"\n\nWrite a single JSON value that fits the schema below. Write nothing before or after it.\n{json.dumps(schema)}"
    *before, last = conversation
    return [*before, dataclasses.replace(last, content=last.content + ask)]


def without_thinking(text: str) -> str:
    """An answer without the reasoning that some models write before it, between `<think>` and `</think>`.

    Reasoning that was cut off before its end leaves nothing; one whose beginning was in the prompt ends at `</think>`.
    """
    end = max((match.end() for match in _END.finditer(text)), default=0)
    text = _THINKING.sub("", text[:end]) + text[end:]  # beyond the last end, every beginning would search in vain
    text = _CLOSED_THINKING.sub("", text)
    return _OPEN_THINKING.sub("", text).strip()
