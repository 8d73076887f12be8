"""The forms in which models write a tool call as JSON, and which of them a chat template has."""

from __future__ import annotations

import abc
import dataclasses
import functools
import json
import re
from collections.abc import Mapping
from typing import Any

from routerl_jax.core.text import whole_letters
from routerl_jax.core.tokenizer import Tokenizer
from routerl_jax.core.tool_schema import ToolSchema


class BadCall(ValueError):
    """There is a tool call that can't be read; says why."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadCall:
    """A tool call as it was written.

    Attributes:
      before, after: the text around it.
    """

    name: str
    arguments: Mapping[str, Any]
    before: str
    after: str


class ToolForm(abc.ABC):
    """How a tool call is written in a turn.

    Attributes:
      name: of the form.
      key: what the arguments are called.
      marks: what opens and closes a call or a tool's words; a text from elsewhere must not hold them.
    """

    name: str
    key: str
    marks: tuple[str, ...] = ()

    @abc.abstractmethod
    def read(self, text: str) -> ReadCall | None:
        """The call in a turn, None where there is none. Raises BadCall: it is cut off or no such JSON, or there are several."""

    @abc.abstractmethod
    def write(self, thought: str, name: str, arguments: Mapping[str, Any]) -> str:
        """A turn that calls, as chat templates write it."""

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
    """`<tool_call>` {"name": .., "arguments": {..}} `</tool_call>` after what the model thinks: Hermes, Qwen2.5, Qwen3."""

    name, key = "hermes", "arguments"
    marks = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

    def read(self, text: str) -> ReadCall | None:
        opening, closing = self.marks[:2]
        before, mark, rest = text.partition(opening)
        if not mark:
            return None
        if (count := text.count(opening)) > 1:
            raise BadCall(_several(count))
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
        said = f"{thought}\n" if thought else ""
        return f"{said}{opening}\n{self._written(name, arguments)}\n{closing}"


class Llama(ToolForm):
    """{"name": .., "parameters": {..}} as the whole turn: Llama 3.1 to 3.3. A call that their templates write has nothing
    before it, so demonstrations leave thoughts out; what a policy thinks before its call stays where it is."""

    name, key = "llama", "parameters"
    marks = ("<|python_tag|>",)
    _begins = re.compile(r'\{\s*"(?:name|parameters)"\s*:')

    def read(self, text: str) -> ReadCall | None:
        text = text.replace(self.marks[0], "")
        found = self._begins.search(text)
        if found is None:
            if text.lstrip().startswith("{"):
                raise BadCall(f"the turn begins as a tool call, which must be a JSON object of 'name' and {self.key!r}")
            return None
        try:
            value, end = json.JSONDecoder().raw_decode(text, found.start())
        except (ValueError, RecursionError) as error:
            raise BadCall(_no_json(error)) from error
        after = text[end:]
        if more := len(self._begins.findall(after)):
            raise BadCall(_several(1 + more))
        return self._checked(value, text[: found.start()], after)

    def write(self, thought: str, name: str, arguments: Mapping[str, Any]) -> str:
        return self._written(name, arguments)


FORMS: Mapping[str, ToolForm] = {form.name: form for form in (Hermes(), Llama())}


def quoted(text: str) -> str:
    """What a policy has written, as an error may repeat it: short, and with no tag in it."""
    return repr(whole_letters(text[:60])).replace("<", "< ")


def form_of(tokenizer: Tokenizer) -> ToolForm:
    """The form in which a model's chat template writes tool calls.

    A whole chat with calls is written by the template and, turn after turn, as a rollout has it; both must be equal to the
    letter, so that what is learnt is what others' `apply_chat_template` gives.

    Raises:
      ValueError: there is no template, it shows no tools, its form is none of FORMS, it writes earlier turns anew as a chat
        goes on (as those do that strip thoughts), or generation would not end where its turns end.
    """
    return _form_of(tokenizer, getattr(getattr(tokenizer, "hf", None), "chat_template", None))


@functools.lru_cache(16)
def _form_of(tokenizer: Tokenizer, template: str | None) -> ToolForm:
    try:
        return _probed(tokenizer)
    except ValueError:
        raise
    except Exception as error:  # templates raise what they like for chats that they are not for
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
    made = {"role": "assistant", "content": "routerl-thought", "tool_calls": [call]}
    whole = tokenizer.render([*start, made, {"role": "tool", "content": "routerl-found"}], tools)
    after = tokenizer.decode(tokenizer.reply("routerl-found", role="tool"))
    wanted = {prompt + form.write("routerl-thought", _PROBE.name, _ARGUMENTS) + after: form for form in FORMS.values()}
    if whole not in wanted:
        written = whole.removeprefix(prompt)[:120]
        raise ValueError(
            f"this model's chat template writes a tool call in a form that is not known here ({written!r}; known: "
            f"{', '.join(FORMS)}): {_MEND}"
        )
    form = wanted[whole]
    _check_stable(tokenizer, form, start, prompt)
    return form


def _check_stable(tokenizer: Tokenizer, form: ToolForm, start: list[dict[str, str]], prompt: str) -> None:
    """That what has been said stays as it is when the chat goes on, thoughts included."""
    tools, call = [_PROBE.json], form.write("", _PROBE.name, _ARGUMENTS)
    said = [call, f"{_THINKING}{call}", f"routerl-words\n{call}"]
    ids, messages = tokenizer.encode(prompt), list(start)
    for number, turn in enumerate(said):
        reply = tokenizer.reply(f"found\n{number}", role="tool")
        if reply[0] not in tokenizer.eos_ids:
            raise ValueError(
                f"this model's chat template ends a turn with {tokenizer.decode(reply[:1])!r}, which is no token at which "
                f"generation ends: {_MEND}"
            )
        ids += [*tokenizer.encode(turn), *reply]
        messages += [{"role": "assistant", "content": turn}, {"role": "tool", "content": f"found\n{number}"}]
    if ids != tokenizer.encode(tokenizer.render(messages, tools)):
        raise ValueError(
            "this model's chat template writes earlier turns anew as a chat goes on (it strips thoughts from them, say): what "
            "the policy reads would not be what it wrote. Take a model whose template leaves turns as they are, or "
            "config.model.chat_template='hermes'"
        )


def _kind(value: Any) -> str:
    kinds = {str: "string", bool: "truth value", int: "number", float: "number", list: "list", dict: "object"}
    return kinds.get(type(value), "null")


def _several(count: int) -> str:
    return f"there are {count} tool calls in one turn; make one, and wait for its result"


def _no_json(error: Exception) -> str:
    said = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
    return f"the tool call is no JSON ({said})"
