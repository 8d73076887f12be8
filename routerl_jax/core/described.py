"""Descriptions of the fields of a configuration, read from the source of its dataclasses.

A field's description is the comment lines right above it and the comment at its end, or its entry under `Attributes:` in the
docstring of its class.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import io
import math
import re
import textwrap
import tokenize
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from routerl_jax.core.checked import Range

MISSING = dataclasses.MISSING


@dataclasses.dataclass(frozen=True, kw_only=True)
class Field:
    """One field of a dataclass.

    Attributes:
      name: name of the field.
      type: its values in words, such as "int >= 1".
      default: its default value; MISSING if it must be set.
      description: its meaning; "" if the source does not say.
      section: the dataclass of its value, or of a mapping's values; None for other types.
      named: whether it is a mapping of names to sections.
    """

    name: str
    type: str
    default: Any
    description: str
    section: type | None = None
    named: bool = False


def fields_of(cls: type) -> list[Field]:
    """The fields of a dataclass, in order. The description of an inherited field is from the class that declares it."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return [_field(cls, field, hints[field.name]) for field in dataclasses.fields(cls)]


def summary(cls: type) -> str:
    """A dataclass's docstring up to `Attributes:`, on one line."""
    text = inspect.cleandoc(cls.__dict__.get("__doc__") or "")
    return " ".join(re.split(r"\n(?:Attributes|Args|Raises):\n", text)[0].split())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """A part of a configuration.

    Attributes:
      path: its key, such as "config.learner"; NAME means any name in a mapping of sections.
      schema: its dataclass.
      description: the description of the field that holds it.
      fields: its fields with values. Its sections are listed on their own.
      like: path of an earlier section of the same dataclass. `fields` are then only those with another default, and its own
        sections are not listed again.
    """

    path: str
    schema: type
    description: str
    fields: list[Field]
    like: str = ""


Seen = dict[type, tuple[str, dict[str, Any]]]  # path and defaults of a dataclass's first section


def sections(schema: type, path: str = "config", seen: Seen | None = None) -> list[Section]:
    """All sections of a configuration, outer ones first, mappings of sections last.

    Args:
      schema: the configuration's dataclass.
      path: its key.
      seen: an empty dict, shared by several configurations if later ones are to refer to sections of earlier ones.
    """
    return list(_sections(schema, path, "", MISSING, {} if seen is None else seen))


def _sections(schema: type, path: str, description: str, default: Any, seen: Seen) -> Iterator[Section]:
    """`default` is an instance whose values are the defaults; MISSING: the defaults of the class."""
    fields = fields_of(schema)
    if default is not MISSING:
        fields = [dataclasses.replace(field, default=getattr(default, field.name)) for field in fields]
    listed = [field for field in fields if field.section is None or field.named]
    if schema in seen:
        like, defaults = seen[schema]
        changed = [field for field in listed if field.default != defaults[field.name]]
        yield Section(path=path, schema=schema, description=description, fields=changed, like=like)
        fields = [field for field in fields if not field.named and field.default != defaults[field.name]]
    else:
        seen[schema] = path, {field.name: field.default for field in fields}
        yield Section(path=path, schema=schema, description=description, fields=listed)
    for field in sorted(fields, key=lambda field: field.named):
        if field.section:
            key = f"{path}.{field.name}{'.NAME' if field.named else ''}"
            inner = MISSING if field.named else field.default
            yield from _sections(field.section, key, "" if field.named else field.description, inner, seen)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """One value of a configuration.

    Attributes:
      key: with its sections, such as "config.learner.loss.kl".
      value: that it has.
      default: that it has without a setting; MISSING where it must be set, or is not there.
      section: it is a name of a mapping of sections, and `value` the section.
    """

    key: str
    value: Any
    default: Any
    section: bool = False

    @property
    def differs(self) -> bool:
        """Whether it is another than the default."""
        return self.default is MISSING or self.value != self.default


def settings(config: Any, path: str = "config", default: Any = MISSING) -> Iterator[Setting]:
    """All values of a configuration, in the order of its fields.

    A section of a mapping that does not exist by default is a setting of its own. Its values are compared with the defaults of
    its class.

    Args:
      config: an instance of a dataclass.
      path: its key.
      default: the instance to compare it with; by default, the defaults of its class.
    """
    for field in fields_of(type(config)):
        key, value = f"{path}.{field.name}", getattr(config, field.name)
        default_value = field.default if default is MISSING else getattr(default, field.name)
        if field.named and value:
            default_entries = {} if default_value is MISSING else default_value
            for name, entry in value.items():
                if name not in default_entries:
                    yield Setting(key=f"{key}.{name}", value=entry, default=MISSING, section=True)
                yield from settings(entry, f"{key}.{name}", default_entries.get(name, MISSING))
        elif field.section and not field.named:
            yield from settings(value, key, default_value)
        else:
            yield Setting(key=key, value=value, default=default_value)


def _field(cls: type, field: dataclasses.Field[Any], hint: Any) -> Field:
    default = field.default if field.default_factory is MISSING else field.default_factory()
    arguments = typing.get_args(hint)
    named = _is_mapping(hint) and bool(arguments) and dataclasses.is_dataclass(arguments[-1])
    section = arguments[-1] if named else hint if dataclasses.is_dataclass(hint) else None
    return Field(
        name=field.name,
        type=type_in_words(hint),
        default=default,
        description=_description(cls, field.name),
        section=typing.cast("type | None", section),
        named=named,
    )


def _is_mapping(hint: Any) -> bool:
    origin = typing.get_origin(hint)
    return isinstance(origin, type) and issubclass(origin, Mapping)


def type_in_words(hint: Any) -> str:
    """A type of a configuration in words: "int >= 1", '"rl" or "sft"', "list of str"."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hasattr(hint, "__metadata__"):
        ranges = [item for item in hint.__metadata__ if isinstance(item, Range)]
        return " ".join([type_in_words(arguments[0]), *map(_range, ranges)])
    if origin is typing.Literal:
        return " or ".join(f'"{value}"' if isinstance(value, str) else repr(value) for value in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_in_words(option) for option in arguments)
    if origin in (tuple, list):
        return f"list of {type_in_words(arguments[0])}"
    if _is_mapping(hint):
        return f"names with {type_in_words(arguments[1])}"
    if hint is type(None):
        return "None"
    return "anything" if hint is Any else getattr(hint, "__name__", str(hint))


def _range(bounds: Range) -> str:
    also = "".join(f" or {value}" for value in bounds.also)
    if bounds.most < math.inf:
        left, right = ("(" if bounds.least in bounds.open else "["), (")" if bounds.most in bounds.open else "]")
        return f"in {left}{bounds.least}, {bounds.most}{right}{also}"
    return f"{'>' if bounds.least in bounds.open else '>='} {bounds.least}{also}"


def default_in_words(value: Any) -> str:
    """A default in Python's notation; "(must be set)" for MISSING."""
    if value is MISSING:
        return "(must be set)"
    if isinstance(value, Mapping) and any(dataclasses.is_dataclass(item) for item in value.values()):
        return f"{{{', '.join(f'{name!r}: ..' for name in value)}}}"
    return repr(dict(value)) if isinstance(value, Mapping) else repr(value)


def _description(cls: type, name: str) -> str:
    """A field's description, from the nearest class that has one for it."""
    for owner in cls.__mro__:
        if name in inspect.get_annotations(owner):
            comments, entries = _in_source(owner)
            if comment := comments.get(name) or entries.get(name):
                return comment
    return ""


@functools.cache
def _in_source(cls: type) -> tuple[dict[str, str], dict[str, str]]:
    """The comments of a class's own fields, and its docstring's entries, by field."""
    try:
        source = textwrap.dedent(inspect.getsource(cls))
    except (OSError, TypeError):  # a class that was made without a file
        return {}, _entries(cls)
    comments = {
        token.start[0]: (token.string.lstrip("#").strip(), not token.line[: token.start[1]].strip())
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    by_name = {}
    (body,) = ast.parse(source).body
    for node in typing.cast(ast.ClassDef, body).body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        above, line = [], node.lineno - 1
        while line in comments and comments[line][1]:
            above.insert(0, comments[line][0])
            line -= 1
        end = node.end_lineno or node.lineno
        at_end = [comments[end][0]] if end in comments else []
        by_name[node.target.id] = " ".join([*above, *at_end])
    return by_name, _entries(cls)


def _entries(cls: type) -> dict[str, str]:
    """`Attributes:` of a docstring; an entry may be of several names, with commas between."""
    text = inspect.cleandoc(cls.__dict__.get("__doc__") or "")
    listed = re.search(r"^Attributes:\n((?:[ ]+.*\n?|\n)+)", text, re.MULTILINE)
    entries = {}
    for entry in re.split(r"\n(?=\S)", textwrap.dedent(listed[1])) if listed else ():
        names, colon, meaning = entry.partition(":")
        if colon and re.fullmatch(r"\w+(, \w+)*", names):
            entries |= dict.fromkeys(names.split(", "), " ".join(meaning.split()))
    return entries
