"""Tool calls as JSON in the model's own chat template, the form that instruct models know: how models write a call, the
grammar of calls that search, and the one with closer looks at pictures."""

from __future__ import annotations

import abc
import dataclasses
import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from routerl_jax.agents.grammar import Grammar, between, unshown
from routerl_jax.agents.grammar import one_line as without_tags
from routerl_jax.core.files import check_depth, parse_json
from routerl_jax.core.text import one_line, replace_surrogates, split_thoughts
from routerl_jax.core.tokenizer import Tokenizer
from routerl_jax.core.types import Action, Call, Observation, Passage, Shown, ToolSchema, kb_schema
from routerl_jax.models.regions import RefusedRegion, read_box


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
            value = parse_json(inside)
        except ValueError as error:
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
            check_depth(value)
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


_ANSWER = ("<answer>", "</answer>")
# Tags that only the policy may write, and those that templates write around a tool's text.
TAGS = (*_ANSWER, *(mark for form in FORMS.values() for mark in form.marks))
_ENDS = tuple(f"<|{name}|>" for name in ("im_end", "eot_id", "eom_id", "endoftext", "end_of_text"))
_THOUGHTS = re.compile(r"</?think>|<\|python_tag\|>")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToolCalls(Grammar):
    """Every turn is a message of the model's chat. In it the policy thinks, and then calls one search function or answers in
    `<answer>`. The policy ends its turn with the template's own token. The passages, or an error, come as a tool's message.

    Attributes:
      schemas: the functions, by knowledge base. A knowledge base without one gets `kb_schema(NAME)`.
      form: the form of a call, a name in FORMS. `of` sets it from a tokenizer; "" means "hermes".

    Raises:
      ValueError: two knowledge bases have functions of the same name, or `raw_results` is set, which no paper's code has here.
    """

    schemas: Mapping[str, ToolSchema] = dataclasses.field(default_factory=dict, hash=False)
    form: str = ""

    def __post_init__(self) -> None:
        if self.raw_results:
            raise ValueError(
                f"{type(self).__name__} shows no results with tags in them: leave raw_results out (config.agent)"
            )
        names = [schema.name for schema in self._all_schemas.values()]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(
                f"two knowledge bases are both the function {twice[0]!r} to the model: {', '.join(self.tools)}"
            )

    @property
    def _all_schemas(self) -> dict[str, ToolSchema]:
        return {tool: self.schemas.get(tool) or kb_schema(tool) for tool in self.tools}

    @property
    def _form(self) -> ToolForm:
        return FORMS[self.form or "hermes"]

    # --- the chat ---

    @property
    def functions(self) -> tuple[dict[str, Any], ...]:
        return tuple(schema.json for schema in self._all_schemas.values())

    def of(self, tokenizer: Tokenizer) -> ToolCalls:
        """The grammar in the form of this model's chat template. Raises ValueError if that has none (`form_of`)."""
        name = form_of(tokenizer).name
        return self if name == self.form else dataclasses.replace(self, form=name)

    def with_schemas(self, schemas: Mapping[str, ToolSchema]) -> ToolCalls:
        return dataclasses.replace(self, schemas=dict(schemas))

    # --- what the policy writes ---

    @property
    def stops(self) -> tuple[str, ...]:
        """None: the policy ends its turns itself."""
        return ()

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """The answer's tags. The model's vocabulary has those of calls."""
        return _ANSWER

    @property
    def foreign(self) -> tuple[str, ...]:
        return TAGS

    def parse(self, text: str) -> Action:
        text = without_ends(text)
        said = split_thoughts(text)[1]
        answer = between(said, *_ANSWER)
        try:
            call = self._form.read(said)
        except BadCall as error:
            mark = re.escape(self._form.marks[0])
            begun = self._form.marks[0] not in said or re.search(rf"^[^\S\n]*{mark}|{mark}\s*\{{", said, re.MULTILINE)
            if answer is None or begun:
                return Action(kind="invalid", thought=thought_of(text), error=str(error))
            call = None  # running words name the marks of a call
        if call is None:
            if answer is None:
                return self._words(text)
            return Action(kind="answer", answer=answer, thought=thought_of(text[: said.index(_ANSWER[0])]))
        before = thought_of(text[: len(call.before)])
        if answer is not None:
            return Action(kind="invalid", thought=before, error="there are a tool call and an answer; do one")
        return self._action(call, before)

    def _words(self, text: str) -> Action:
        """The action of a turn without a call and without an answer."""
        error = f"there is neither a tool call nor an answer between {_ANSWER[0]} and {_ANSWER[1]}"
        return Action(kind="invalid", thought=thought_of(text), error=error)

    def _action(self, call: ReadCall, thought: str) -> Action:
        """The action of a call."""
        tools = {schema.name: (tool, schema) for tool, schema in self._all_schemas.items()}
        if call.name not in tools:
            names = ", ".join(function["function"]["name"] for function in self.functions)
            error = f"there is no function {quoted(call.name)}; there are: {names}"
            return Action(kind="invalid", thought=thought, error=error)
        tool, schema = tools[call.name]
        error, query = _argument_fault(call, schema.query), ""
        if schema.query and not error:
            query = call.arguments[schema.query]
            if not isinstance(query, str):
                error = f"the argument {schema.query!r} of {schema.name} must be a string"
            elif not query.strip():
                error = f"the argument {schema.query!r} of {schema.name} is empty"
        if error:
            return Action(kind="invalid", thought=thought, error=error)
        query = " ".join(replace_surrogates(query).split())
        return Action(kind="search", tool=tool, query=query, thought=thought)

    def well_formed(self, text: str) -> bool:
        """True for thoughts and a call, or thoughts and an answer, with nothing behind them and no other tag."""
        text = without_ends(text)
        action = self.parse(text)
        if action.kind in ("search", "region"):
            thoughts, said = split_thoughts(text)
            call = self._form.read(said)
            assert call is not None
            return not call.after.strip() and not has_tags(thoughts + call.before)
        if action.kind == "answer":
            before, _, rest = text.partition(_ANSWER[0])
            answer, _, after = rest.partition(_ANSWER[1])
            return not after.strip() and not has_tags(before + answer)
        return False

    def write_search(self, thought: str, query: str, tool: str) -> str:
        schema = self._all_schemas[tool]
        return self._form.write(thought, schema.name, {schema.query: query} if schema.query else {})

    def query_opening(self, tool: str) -> str:
        """The beginning of a search turn, up to the text of its query."""
        written = self.write_search("", "", tool)
        return written[: written.rindex('""') + 1]

    def write_answer(self, thought: str, answer: str) -> str:
        prefix = f"{thought}\n" if thought else ""
        return f"{prefix}{_ANSWER[0]}{answer}{_ANSWER[1]}"

    # --- what the environment writes ---

    def observation(self, call: Call, passages: Sequence[Passage]) -> Observation:
        """The passages, one a line; marks of calls and answers in them are broken up."""
        lines = [f"({i}) {line_of(passage)}" for i, passage in enumerate(passages, 1)]
        return unshown(call, passages, self.foreign) or "\n".join(lines)

    def reminder(self, error: str) -> str:
        return f"Error: {error}."

    def instructions(self) -> str:
        return (
            "Answer the user's question. Where a fact is missing, look it up: call a function that searches, one call in a "
            "turn, and read what it returns before you go on. You may search several times. As soon as you know enough, give "
            f"the answer alone, in a few words, inside {_ANSWER[0]} and {_ANSWER[1]}, for example "
            f"{_ANSWER[0]}Lake Victoria{_ANSWER[1]}."
        )


def _argument_fault(call: ReadCall, name: str) -> str:
    """Why the arguments of a call are not the one of this name, or none at all if it is ""; "" if they are."""
    if name and name not in call.arguments:
        return f"the argument {name!r} of {call.name} is missing"
    if unknown := sorted(set(call.arguments) - {name}):
        has = f"it has {name!r} alone" if name else "it has none"
        return f"{call.name} has no argument {quoted(unknown[0])}; {has}"
    return ""


def without_ends(text: str) -> str:
    """A turn without the tokens that end it, as chat templates write them."""
    kept = end = len(text)
    while True:
        while end and text[end - 1].isspace():
            end -= 1
        mark = next((mark for mark in _ENDS if text.endswith(mark, 0, end)), "")
        if not mark:
            return text[:kept]
        kept = end = end - len(mark)


def has_tags(text: str) -> bool:
    """Whether a text has marks of calls or answers."""
    return any(tag in text for tag in TAGS)


def line_of(passage: Passage) -> str:
    """A passage on one line, without marks of calls and answers."""
    return tagless(one_line(passage))


def tagless(text: str) -> str:
    """A text from elsewhere on one line, with its marks of calls and answers broken up."""
    return without_tags(text, TAGS)


def thought_of(text: str) -> str:
    """A thought without the tags around it."""
    return _THOUGHTS.sub(" ", text).strip()


LOOK = "look_closer"
_BOX = "box"
_FUNCTION: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": LOOK,
        "description": "Shows a region of the picture that was shown last, enlarged.",
        "parameters": {
            "type": "object",
            "properties": {
                _BOX: {
                    "type": "array",
                    "items": {"type": "number"},
                    "description": "The region's left, top, right and bottom in that picture.",
                }
            },
            "required": [_BOX],
        },
    },
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LookingCalls(ToolCalls):
    """`ToolCalls` with pictures. A search shows passages that have a picture by title and picture, others by their text. A call
    of `look_closer(box)` shows a region of the latest picture, the question's own too.

    The agent's `regions` (config.agent.settings={"regions": ..}) says in which coordinates boxes are.

    Raises:
      ValueError: two functions have the same name.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if tool := next((tool for tool, schema in self._all_schemas.items() if schema.name == LOOK), ""):
            raise ValueError(f"the knowledge base {tool!r} is the function {LOOK!r} to the model, as closer looks are")

    @property
    def functions(self) -> tuple[dict[str, Any], ...]:
        return (*super().functions, dict(_FUNCTION))

    def _action(self, call: ReadCall, thought: str) -> Action:
        if call.name != LOOK:
            return super()._action(call, thought)
        if error := _argument_fault(call, _BOX):
            return Action(kind="invalid", thought=thought, error=error)
        try:
            return Action(kind="region", box=read_box(json.dumps(call.arguments[_BOX])), thought=thought)
        except RefusedRegion as error:
            return Action(kind="invalid", thought=thought, error=str(error))

    def write_look(self, thought: str, box: Sequence[float]) -> str:
        whole = [int(value) if float(value).is_integer() else value for value in box]
        return self._form.write(thought, LOOK, {_BOX: whole})

    def observation(self, call: Call, passages: Sequence[Passage]) -> Observation:
        """The passages, one a line; marks of calls and answers in titles and texts are broken up."""
        if message := unshown(call, passages, self.foreign):
            return message
        pieces: list[str | Shown] = []
        for i, passage in enumerate(passages, 1):
            begins = f"{'' if i == 1 else chr(10)}({i}) "
            if passage.image:
                title = f"{tagless(passage.title)} " if passage.title else ""
                pieces += [begins + title, Shown(passage=passage.id, image=passage.image)]
            else:
                pieces.append(begins + line_of(passage))
        return pieces

    def closer(self, crop: Shown) -> Observation:
        return [crop]

    def instructions(self) -> str:
        return (
            f"{super().instructions()} If something in the picture shown last is too small to be read, call {LOOK} with a box "
            "around it."
        )
