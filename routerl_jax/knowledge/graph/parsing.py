"""Reads JSON from a language model's answer: the complete value if possible, else its complete parts."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from typing import Any

from routerl_jax.services.base import without_thinking

_FENCE = re.compile(r"```[a-zA-Z]*\s*(.*?)(?:```|\Z)", re.DOTALL)
_INNERMOST = re.compile(r"\[[^\[\]{}]*\]|\{[^\[\]{}]*\}")
_TRAILING_COMMA = re.compile(r",(\s*[\]}])")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_LONGEST = 200_000  # most characters that are parsed


def json_value(text: str, *keys: str) -> Any:
    """The JSON value in a text, even with prose, a code fence or reasoning around it; None if there is none.

    Trailing commas are allowed. A value that was cut off is not completed.

    Args:
      keys: an object with one of these keys is preferred to other values, which prose may contain ("as [1] says").
    """
    first = None
    for part in _candidates(text):
        for attempt in (part, _TRAILING_COMMA.sub(r"\1", part)):
            for value in _values(attempt):
                if not keys or (isinstance(value, dict) and any(key in value for key in keys)):
                    return value
                first = value if first is None else first
    return first


def whole_items(text: str) -> list[Any]:
    """The innermost complete lists and objects of a text, in JSON or Python syntax.

    This is the usable part of an answer that breaks off, has stray brackets, or mixes quotes.
    """
    values = []
    for match in _INNERMOST.finditer(_answer(text)):
        value = _literal(_TRAILING_COMMA.sub(r"\1", match[0]))
        if value is not None:
            values.append(value)
    return values


def whole_strings(text: str, key: str) -> list[str]:
    """The complete strings of the list under `key` in a text that breaks off."""
    _, key_found, rest = _answer(text).partition(f'"{key}"')
    if not key_found:
        return []
    rest = rest.partition("[")[2].partition("]")[0]
    strings = (_literal(match[0]) for match in _STRING.finditer(rest))
    return [value for value in strings if isinstance(value, str)]


def _answer(text: str) -> str:
    return without_thinking(text[:_LONGEST])


def _candidates(text: str) -> Iterator[str]:
    answer = _answer(text).strip()
    yield answer
    for match in _FENCE.finditer(answer):
        yield match[1].strip()


def _values(text: str) -> Iterator[Any]:
    """The lists and objects in the text, one after the other, up to the first incomplete one."""
    decoder = json.JSONDecoder()
    position, tries = 0, 0
    while (
        tries < 64
        and (start := min((p for p in (text.find("{", position), text.find("[", position)) if p >= 0), default=-1)) >= 0
    ):
        try:
            value, position = decoder.raw_decode(text, start)
            tries += 1
            yield value
        except (ValueError, RecursionError):
            # a value inside a broken one is not the intended value, unless the broken one is only prose
            if _opens(text, start):
                return
            position, tries = start + 1, tries + 1


def _opens(text: str, start: int) -> bool:
    return bool(re.match(r'[{\[]\s*["{\[]', text[start:]))


def _literal(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        return None
