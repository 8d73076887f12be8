"""Tool calls as JSON in the model's own chat template, the form that instruct models know."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from routerl_jax.agents.grammar import Grammar, between, unshown
from routerl_jax.agents.grammar import one_line as without_tags
from routerl_jax.agents.tool_forms import FORMS, BadCall, ReadCall, ToolForm, form_of, quoted
from routerl_jax.core.text import one_line, replace_surrogates, split_thoughts
from routerl_jax.core.tokenizer import Tokenizer
from routerl_jax.core.types import Action, Call, Observation, Passage, ToolSchema, kb_schema

_ANSWER = ("<answer>", "</answer>")
# Tags that only the policy may write, and those that templates write around a tool's text.
TAGS = (*_ANSWER, *(mark for form in FORMS.values() for mark in form.marks))
END_OF_TURN = re.compile(r"(?:<\|(?:im_end|eot_id|eom_id|endoftext|end_of_text)\|>\s*)+$")
_THOUGHTS = re.compile(r"</?think>|<\|python_tag\|>")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToolCalls(Grammar):
    """Every turn is a message of the model's chat. In it the policy thinks, and then calls one search function or answers in
    `<answer>`. The policy ends its turn with the template's own token. The passages, or an error, come as a tool's message.

    Attributes:
      schemas: the functions, by knowledge base. A knowledge base without one gets `kb_schema(NAME)`.
      form: the form of a call, a name in tool_forms.FORMS. `of` sets it from a tokenizer; "" means "hermes".

    Raises:
      ValueError: two knowledge bases have functions of the same name.
    """

    schemas: Mapping[str, ToolSchema] = dataclasses.field(default_factory=dict, hash=False)
    form: str = ""

    def __post_init__(self) -> None:
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

    def parse(self, text: str) -> Action:
        text = END_OF_TURN.sub("", text)
        said = split_thoughts(text)[1]
        answer = between(said, *_ANSWER)
        try:
            call = self._form.read(said)
        except BadCall as error:
            mark = re.escape(self._form.marks[0])
            begun = self._form.marks[0] not in said or re.search(rf"^\s*{mark}|{mark}\s*\{{", said, re.MULTILINE)
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
        arguments = call.arguments
        tools = {schema.name: (tool, schema) for tool, schema in self._all_schemas.items()}
        if call.name not in tools:
            names = ", ".join(function["function"]["name"] for function in self.functions)
            error = f"there is no function {quoted(call.name)}; there are: {names}"
            return Action(kind="invalid", thought=thought, error=error)
        tool, schema = tools[call.name]
        if error := _argument_fault(schema, arguments):
            return Action(kind="invalid", thought=thought, error=error)
        query = " ".join(replace_surrogates(arguments[schema.query]).split()) if schema.query else ""
        return Action(kind="search", tool=tool, query=query, thought=thought)

    def well_formed(self, text: str) -> bool:
        """True for thoughts and a call, or thoughts and an answer, with nothing behind them and no other tag."""
        text = END_OF_TURN.sub("", text)
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

    @property
    def answer_opening(self) -> str:
        return _ANSWER[0]

    # --- what the environment writes ---

    def observation(self, call: Call, passages: Sequence[Passage]) -> Observation:
        """The passages, one a line; marks of calls and answers in them are broken up."""
        lines = [f"({i}) {line_of(passage)}" for i, passage in enumerate(passages, 1)]
        return unshown(call, passages) or "\n".join(lines)

    def reminder(self, error: str) -> str:
        return f"Error: {error}."

    def instructions(self) -> str:
        return (
            "Answer the user's question. Where a fact is missing, look it up: call a function that searches, one call in a "
            "turn, and read what it returns before you go on. You may search several times. As soon as you know enough, give "
            f"the answer alone, in a few words, inside {_ANSWER[0]} and {_ANSWER[1]}, for example "
            f"{_ANSWER[0]}Lake Victoria{_ANSWER[1]}."
        )


def _argument_fault(schema: ToolSchema, arguments: Mapping[str, Any]) -> str:
    """The fault of a call's arguments; "" if there is none."""
    if schema.query and schema.query not in arguments:
        return f"the argument {schema.query!r} of {schema.name} is missing"
    if unknown := sorted(set(arguments) - {schema.query}):
        has = f"it has {schema.query!r} alone" if schema.query else "it has none"
        return f"{schema.name} has no argument {quoted(unknown[0])}; {has}"
    if not schema.query:
        return ""
    if not isinstance(query := arguments[schema.query], str):
        return f"the argument {schema.query!r} of {schema.name} must be a string"
    return "" if query.strip() else f"the argument {schema.query!r} of {schema.name} is empty"


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
