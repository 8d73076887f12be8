"""The forms in which models write a tool call as JSON, and which of them a chat template has."""

from __future__ import annotations

import abc
import dataclasses
import functools
import json
import re
from collections.abc import Mapping
from typing import Any

from routerl_jax.core.text import replace_surrogates
from routerl_jax.core.tokenizer import Tokenizer
from routerl_jax.core.types import ToolSchema


class BadCall(ValueError):
    """A tool call can't be read; the message says why."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadCall:
    """A tool call as it was written.

    Attributes:
      before: the text before it, as long as it was written.
      after: the text behind it.
    """

    name: str
    arguments: Mapping[str, Any]
    before: str
    after: str


class ToolForm(abc.ABC):
    """How a tool call is written in a turn.

    Attributes:
      name: of the form.
      key: the JSON key of the arguments.
      marks: strings around a call or a tool's text. Texts from elsewhere must not contain them.
    """

    name: str
    key: str
    marks: tuple[str, ...] = ()

    @abc.abstractmethod
    def read(self, text: str) -> ReadCall | None:
        """The call in a turn; None if there is none.

        Raises:
          BadCall: it is cut off, it is not JSON of this form, or there are several.
        """

    @abc.abstractmethod
    def write(self, thought: str, name: str, arguments: Mapping[str, Any]) -> str:
        """A turn with a call, as chat templates write it."""

    def _written(self, name: str, arguments: Mapping[str, Any]) -> str:
        return f'{{"name": "{name}", "{self.key}": {json.dumps(arguments, ensure_ascii=False)}}}'

    def _checked(self, value: Any, before: str, after: str) -> ReadCall:
        if not isinstance(value, dict):
            raise BadCall(f"the tool call must be a JSON object, and is a {_kind(value)}")
        for key in ("name", self.key):
            if key not in value:
                raise BadCall(f"the tool call has no {key!r}")
        if extra := sorted(set(value) - {"name", self.key}):
            raise BadCall(f"the tool call has an unknown key {quoted(extra[0])}; it has 'name' and {self.key!r} alone")
        name, arguments = value["name"], value[self.key]
        if not isinstance(name, str):
            raise BadCall(f"the tool call's 'name' must be a string, and is a {_kind(name)}")
        if not isinstance(arguments, dict):
            raise BadCall(f"the tool call's {self.key!r} must be an object, and is a {_kind(arguments)}")
        return ReadCall(name=name, arguments=arguments, before=before, after=after)


class Hermes(ToolForm):
    """`<tool_call>` {"name": .., "arguments": {..}} `</tool_call>`, after thoughts if there are any: Hermes, Qwen2.5, Qwen3."""

    name, key = "hermes", "arguments"
    marks = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

    def read(self, text: str) -> ReadCall | None:
        opening, closing = self.marks[:2]
        marks = list(re.finditer(rf"{re.escape(opening)}(\s*\{{)?", text))
        begun = [mark for mark in marks if mark[1]] or marks[-1:]  # others are named, and begin no call
        if not begun:
            return None
        if len(begun) > 1:
            raise BadCall(_several_calls(len(begun)))
        before, rest = text[: begun[0].start()], text[begun[0].start() + len(opening) :]
        inside, mark, after = rest.partition(closing)
        if not mark:
            raise BadCall(f"the tool call is cut off: there is no {closing}")
        try:
            value = json.loads(inside)
        except (ValueError, RecursionError) as error:
            raise BadCall(_no_json(error)) from error
        return self._checked(value, before, after)

    def write(self, thought: str, name: str, arguments: Mapping[str, Any]) -> str:
        opening, closing = self.marks[:2]
        prefix = f"{thought}\n" if thought else ""
        return f"{prefix}{opening}\n{self._written(name, arguments)}\n{closing}"


class Llama(ToolForm):
    """{"name": .., "parameters": {..}} as the whole turn, with or without "type": "function": Llama 3.1 to 3.3.

    Their templates write nothing before a call, so demonstrations have no thoughts there. A policy may write some.
    """

    name, key = "llama", "parameters"
    marks = ("<|python_tag|>",)
    _begins = re.compile(r'\{\s*"(?:name|parameters|type)"\s*:')

    def read(self, text: str) -> ReadCall | None:
        text = text.replace(self.marks[0], " " * len(self.marks[0]))
        match = self._begins.search(text)
        if match is None:
            if text.lstrip().startswith("{"):
                raise BadCall(f"the turn begins as a tool call, which must be a JSON object of 'name' and {self.key!r}")
            return None
        try:
            value, end = json.JSONDecoder().raw_decode(text, match.start())
        except (ValueError, RecursionError) as error:
            raise BadCall(_no_json(error)) from error
        after = text[end:]
        if more := len(self._begins.findall(after)):
            raise BadCall(_several_calls(1 + more))
        if isinstance(value, dict) and value.get("type") == "function":
            del value["type"]
        return self._checked(value, text[: match.start()], after)

    def write(self, thought: str, name: str, arguments: Mapping[str, Any]) -> str:
        return self._written(name, arguments)


FORMS: Mapping[str, ToolForm] = {form.name: form for form in (Hermes(), Llama())}


def quoted(text: str) -> str:
    """A policy's text for an error message: short, and without tags."""
    return repr(replace_surrogates(text[:60])).replace("<", "< ")


def form_of(tokenizer: Tokenizer) -> ToolForm:
    """The form in which a model's chat template writes tool calls.

    A chat with calls is written in two ways: by the template as a whole, and turn by turn, as in a rollout. Both must be equal,
    so that a policy learns what `apply_chat_template` gives elsewhere.

    Raises:
      ValueError: there is no template, it shows no tools, its form is none of FORMS, it changes earlier turns as a chat goes
        on (some strip thoughts), or generation does not end where its turns end.
    """
    return _form_of(tokenizer, str(getattr(getattr(tokenizer, "hf", None), "chat_template", None)))


@functools.lru_cache(16)
def _form_of(tokenizer: Tokenizer, template: str) -> ToolForm:
    """`form_of`. `template` is a part of the key, because a tokenizer's template can be replaced."""
    try:
        return _probed(tokenizer)
    except ValueError:
        raise
    except Exception as error:  # templates raise various errors for chats of a form that they do not support
        raise ValueError(f"this model's chat template takes no tool calls ({error}); {_MEND}") from error


_MEND = "take a model that knows them, or config.model.chat_template='hermes'"
_PROBE = ToolSchema(name="search_probe", description="Searches.")
_ARGUMENTS = {"query": "routerl-query"}
_THINKING = "<think>\nrouterl-thought\n</think>\n\n"


def _probed(tokenizer: Tokenizer) -> ToolForm:
    tools = [_PROBE.json]
    start = [{"role": "system", "content": "routerl-system"}, {"role": "user", "content": "routerl-question"}]
    prompt = tokenizer.render(start, tools)
    if prompt == tokenizer.render(start):
        raise ValueError(f"this model's chat template shows no tools: {_MEND}")
    call = {"type": "function", "function": {"name": _PROBE.name, "arguments": _ARGUMENTS}}
    call_message = {"role": "assistant", "content": "routerl-thought", "tool_calls": [call]}
    whole = tokenizer.render([*start, call_message, {"role": "tool", "content": "routerl-found"}], tools)
    after = tokenizer.decode(tokenizer.reply("routerl-found", role="tool"))
    forms_by_text = {
        prompt + form.write("routerl-thought", _PROBE.name, _ARGUMENTS) + after: form for form in FORMS.values()
    }
    if whole not in forms_by_text:
        written = whole.removeprefix(prompt)[:120]
        raise ValueError(
            f"this model's chat template writes a tool call in a form that is not known here ({written!r}; known: "
            f"{', '.join(FORMS)}): {_MEND}"
        )
    form = forms_by_text[whole]
    _check_stable(tokenizer, form, start, prompt)
    return form


def _check_stable(tokenizer: Tokenizer, form: ToolForm, start: list[dict[str, str]], prompt: str) -> None:
    """Checks that earlier turns, thoughts included, stay the same as a chat goes on."""
    tools, call = [_PROBE.json], form.write("", _PROBE.name, _ARGUMENTS)
    turns = [call, f"{_THINKING}{call}", f"routerl-words\n{call}"]
    ids, messages = tokenizer.begin(prompt), list(start)
    for number, turn in enumerate(turns):
        reply = tokenizer.reply(f"found\n{number}", role="tool")
        if reply[0] not in tokenizer.eos_ids:
            raise ValueError(
                f"this model's chat template ends a turn with {tokenizer.decode(reply[:1])!r}, which is no token at which "
                f"generation ends: {_MEND}"
            )
        ids += [*tokenizer.encode(turn), *reply]
        messages += [{"role": "assistant", "content": turn}, {"role": "tool", "content": f"found\n{number}"}]
    if ids != tokenizer.begin(tokenizer.render(messages, tools)):
        raise ValueError(
            "this model's chat template writes earlier turns anew as a chat goes on (it strips thoughts from them, say): what "
            "the policy reads would not be what it wrote. Take a model whose template leaves turns as they are, or "
            "config.model.chat_template='hermes'"
        )


def _kind(value: Any) -> str:
    kinds = {str: "string", bool: "truth value", int: "number", float: "number", list: "list", dict: "object"}
    return kinds.get(type(value), "null")


def _several_calls(count: int) -> str:
    return f"there are {count} tool calls in one turn; make one, and wait for its result"


def _no_json(error: Exception) -> str:
    reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
    return f"the tool call is no JSON ({reason})"
