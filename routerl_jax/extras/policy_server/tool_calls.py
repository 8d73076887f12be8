"""Calls of functions in a served reply, in the forms of agents/tool_calls.py.

A `ToolForm` reads one call, as the protocol of training allows, and refuses others with a reason. A client of the server wants
all of the policy's calls. So any number of calls is read here, in either form, and the rest stays text.
"""

from __future__ import annotations

import json
import re
import uuid
from typing import Any

from routerl_jax.agents.tool_calls import FORMS
from routerl_jax.core.text import replace_surrogates, split_thoughts

_OPENING, _CLOSING = (re.escape(mark) for mark in FORMS["hermes"].marks[:2])
_HERMES = re.compile(rf"{_OPENING}\s*(.*?)\s*(?:{_CLOSING}|$)", re.DOTALL)
(_LLAMA,) = FORMS["llama"].marks
_KEYS = [form.key for form in FORMS.values()]


def read_calls(text: str) -> tuple[str, list[dict[str, Any]]]:
    """The text of a reply without its calls, and the calls as the OpenAI protocol has them, in order.

    Hermes: `<tool_call>{"name": .., "arguments": {..}}</tool_call>`, any number of them among other text. Llama 3: the whole
    reply is `{"name": .., "parameters": {..}}`, perhaps after `<|python_tag|>`, several with `;` between them. Text that has
    neither form stays text, and so do thoughts, whatever they name.
    """
    said = split_thoughts(text)[1]
    if matches := list(_HERMES.finditer(said)):
        calls = [_call(match[1]) for match in matches]
        if all(calls):
            edges = [0, *(edge for match in matches for edge in match.span()), len(text)]
            kept = "".join(text[begin:end] for begin, end in zip(edges[::2], edges[1::2]))
            return kept.strip(), [call for call in calls if call]
        return text, []
    whole = said.strip().removeprefix(_LLAMA).strip()
    if whole.startswith("{"):
        calls = [_call(part) for part in _split(whole)]
        if calls and all(calls):
            before = text[: said.index(whole)].strip().removesuffix(_LLAMA)
            return before.strip(), [call for call in calls if call]
    return text, []


def _split(text: str) -> list[str]:
    """The JSON objects of a text that has `;` between them; the text itself if it has another form."""
    decoder, parts, at = json.JSONDecoder(), [], 0
    while at < len(text):
        try:
            _, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return [text]
        parts.append(text[at:end])
        rest = text[end:].lstrip()
        if rest and not rest.startswith(";"):
            return [text]
        rest = rest.removeprefix(";").lstrip()
        at = len(text) - len(rest)
    return parts


def _call(text: str) -> dict[str, Any] | None:
    """The call of a JSON text; None if it is no call."""
    try:
        parsed = json.loads(text, parse_constant=_no_json)
    except (ValueError, RecursionError):
        return None
    if not isinstance(parsed, dict) or not isinstance(parsed.get("name"), str):
        return None
    arguments = next((parsed[key] for key in _KEYS if key in parsed), None)
    if not isinstance(arguments, dict):
        return None
    function = {"name": parsed["name"], "arguments": json.dumps(arguments, ensure_ascii=False)}
    function = {key: replace_surrogates(value) for key, value in function.items()}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def _no_json(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON, though Python reads it")
