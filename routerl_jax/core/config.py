"""Typed configuration: dataclasses are the schema, ml_collections carries overrides, and no key is ever ignored.

A config file returns a `ConfigDict`, made by `to_config_dict` from dataclass defaults. `--config.a.b=v` changes it. Then
`from_config_dict` turns it back into frozen dataclasses, and rejects every key that the schema does not have.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import difflib
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
from typing import Annotated, Any, Literal, TypeVar

import ml_collections
from ml_collections import config_dict

from routerl_jax.core.secrets import suspicion

# --- settings with a declared range ------------------------------------------------------------------------------------
# The type of a field says which numbers or texts are allowed.
#
#     @dataclasses.dataclass(frozen=True, kw_only=True)
#     @checked
#     class OptimizerConfig:
#         lr: NonNegative = 1e-6
#         b2: BelowOne = 0.95
#
# `OptimizerConfig(b2=1.5)` raises `OutOfRange`. So does a number that is not finite, in any field, and a text that its
# `Literal` does not list. `core.config` puts the section before the field: `config.learner.optimizer.b2=1.5 must be in
# [0, 1)`.

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Range:
    """The numbers from `least` to `most`, and those in `also`. An end that is in `open` does not belong to the range. `all` is
    the one among `also` that stands for all."""

    least: float = -math.inf
    most: float = math.inf
    open: tuple[float, ...] = ()
    also: tuple[float, ...] = ()
    all: float | None = None

    def __contains__(self, value: float) -> bool:
        return value in self.also or (self.least <= value <= self.most and value not in self.open)

    def __str__(self) -> str:
        others = "".join(f", or {value}{' for all' if value == self.all else ''}" for value in self.also)
        if self.most < math.inf:
            brackets = ["(" if self.least in self.open else "[", ")" if self.most in self.open else "]"]
            return f"be in {brackets[0]}{self.least}, {self.most}{brackets[1]}{others}"
        if self.least in self.open:
            return f"be above {self.least}{others}"
        return f"not be negative{others}" if self.least == 0 else f"be at least {self.least}{others}"


Count = Annotated[int, Range(least=0)]
Size = Annotated[int, Range(least=1)]
Amount = Annotated[int, Range(least=1, also=(-1,), all=-1)]  # so many of what there is; -1: all
Seed = Annotated[int, Range(least=0, most=2**31 - 1)]
NonNegative = Annotated[float, Range(least=0)]
Positive = Annotated[float, Range(least=0, open=(0,))]
Fraction = Annotated[float, Range(least=0, most=1)]
BelowOne = Annotated[float, Range(least=0, most=1, open=(1,))]
PositiveFraction = Annotated[float, Range(least=0, most=1, open=(0,))]


class OutOfRange(ValueError):
    """A setting is outside its range.

    Attributes:
      key: key of the setting, beginning with the innermost section known so far.
      complete: whether `key` begins with the outermost section.
    """

    def __init__(self, key: str, value: float | str, range_: str, complete: bool = False) -> None:
        super().__init__(f"{key}={value!r} must {range_}")
        self.key, self.value, self.range, self.complete = key, value, range_, complete

    def within(self, path: str) -> OutOfRange:
        """The same error with the section's path before the key."""
        return self if self.complete else OutOfRange(f"{path}.{self.key}", self.value, self.range, complete=True)


class SecretSetting(OutOfRange):
    """A setting looks like a secret (core.secrets), and would be written to config.json, model cards and loggers."""

    def __init__(self, key: str, why: str, complete: bool = False) -> None:
        ValueError.__init__(
            self,
            f"{key} looks like a secret ({why}), and configurations are written down and passed on: put it into an environment "
            "variable, or into a file that NAME_FILE names, and write '$NAME' in settings and sources of knowledge bases, or "
            "the variable's name in a setting that ends in _env",
        )
        self.key, self.why, self.complete = key, why, complete

    def within(self, path: str) -> OutOfRange:
        return self if self.complete else SecretSetting(f"{path}.{self.key}", self.why, complete=True)


def checked(cls: type[T]) -> type[T]:
    """Class decorator, below `dataclasses.dataclass`: settings are checked before the class's `__post_init__`, if it has or
    inherits one."""
    inherited = getattr(cls, "__post_init__", None)

    def __post_init__(self: Any) -> None:
        check(self)
        if inherited:
            inherited(self)

    setattr(cls, "__post_init__", __post_init__)  # noqa: B010 (pyright knows no such attribute of a type)
    return cls


def check(settings: Any) -> None:
    """Raises OutOfRange for the first value of a dataclass that its type does not allow: a number that is not finite or out of
    range, a text that is not listed, or one that looks like a secret."""
    for name, hint in _hints(type(settings)).items():
        for key, value, declared in _values(name, getattr(settings, name), hint):
            if isinstance(value, str) and (why := suspicion(key, value)):
                raise SecretSetting(key, why)
            if complaint := _complaint(value, declared):
                raise OutOfRange(key, value, complaint)


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _values(key: str, value: Any, hint: Any) -> Iterator[tuple[str, float | str, Any]]:
    """The numbers and texts in a field's value, with their keys and declared types."""
    parts = [part for part in typing.get_args(hint) if part not in (Ellipsis, type(None))]
    inner = parts[-1] if parts else None  # X of tuple[X, ...] or Mapping[str, X]
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _values(f"{key}.{name}", item, inner)
    elif isinstance(value, tuple | list):
        for i, item in enumerate(value):
            yield from _values(f"{key}[{i}]", item, inner)
    elif isinstance(value, int | float | str) and not isinstance(value, bool):
        yield key, value, hint


def _complaint(value: float | str, hint: Any) -> str:
    """The rule that a value breaks, such as "be in [0, 1)"; "" if it breaks none."""
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    options = typing.get_args(hint) if union else (hint,)  # X | None: X
    if isinstance(value, str):
        texts = [text for option in options if typing.get_origin(option) is Literal for text in typing.get_args(option)]
        if str in options or not texts or value in texts:
            return ""
        *most, last = map(repr, texts)
        return f"be {', '.join(most)} or {last}" if most else f"be {last}"
    if isinstance(value, float) and not math.isfinite(value):
        return "be a finite number"
    annotated = (option.__metadata__ for option in options if hasattr(option, "__metadata__"))
    range_ = next((item for metadata in annotated for item in metadata if isinstance(item, Range)), None)
    return "" if range_ is None or value in range_ else str(range_)


# --- dataclasses to ConfigDict and back --------------------------------------------------------------------------------

_SCALARS = (int, float, str, bool)


def to_config_dict(value: Any) -> Any:
    """Recursively turns dataclasses (and mappings) into ConfigDicts. A leaf that is None becomes a placeholder of its type."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        config = ml_collections.ConfigDict()
        hints = typing.get_type_hints(type(value))
        for field in dataclasses.fields(value):
            leaf = to_config_dict(getattr(value, field.name))
            if leaf is None:
                hint = hints[field.name]
                options = typing.get_args(hint) or (hint,)
                leaf = config_dict.placeholder(next((option for option in options if option in _SCALARS), object))
            config[field.name] = leaf
        return config
    if isinstance(value, Mapping):
        items = {str(key): to_config_dict(item) for key, item in value.items()}
        return ml_collections.ConfigDict(items, allow_dotted_keys=True)  # names of reward terms: "recipe.term"
    return value


def from_config_dict(cls: type[T], config: Any, path: str = "config") -> T:
    """Builds the dataclass `cls`. Raises ValueError that names the key for unknown keys and values of the wrong type."""
    return _convert(cls, config, path)


def override(value: T, changes: Mapping[str, Any], path: str) -> T:
    """A copy of a dataclass with some fields changed. A mapping changes fields of a section.

    Raises:
      ValueError: a key is unknown or a value has the wrong type; names the key.
    """
    hints = typing.get_type_hints(type(value))
    fields: dict[str, Any] = {}
    for key, change in changes.items():
        if key not in hints:
            raise ValueError(unknown_key(path, key, hints))
        section = getattr(value, key)
        if dataclasses.is_dataclass(section) and isinstance(change, Mapping):
            fields[key] = override(section, change, f"{path}.{key}")
        else:
            fields[key] = _convert(hints[key], change, f"{path}.{key}")
    try:
        return dataclasses.replace(typing.cast(Any, value), **fields)
    except OutOfRange as error:
        raise error.within(path) from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _convert(hint: Any, value: Any, path: str) -> Any:
    """A value as one of the type `hint`. Raises ValueError that names the key."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(value, ml_collections.FieldReference):
        value = value.get()
    if origin in (typing.Union, types.UnionType):
        if value is None:
            if type(None) in arguments:
                return None
            raise ValueError(f"{path} must be set")
        options = [option for option in arguments if option is not type(None)]
        if len(options) == 1:
            return _convert(options[0], value, path)
        errors = []
        for option in options:
            try:
                return _convert(option, value, path)
            except ValueError as error:
                errors.append(str(error))
        raise ValueError("; ".join(errors))
    if dataclasses.is_dataclass(hint):
        return _convert_dataclass(typing.cast(type, hint), value, path)
    if _is_mapping(hint):
        if not isinstance(value, Mapping | ml_collections.ConfigDict):
            raise ValueError(f"{path} must be a mapping of names to sections, got {value!r}")
        return {key: _convert(arguments[1], item, f"{path}.{key}") for key, item in value.items()}
    if origin is tuple:
        if isinstance(value, str) or not hasattr(value, "__iter__"):
            raise ValueError(f"{path} must be a sequence, got {value!r}")
        return tuple(_convert(arguments[0], item, f"{path}[{i}]") for i, item in enumerate(value))
    if origin is typing.Literal:
        if value not in arguments:
            raise ValueError(f"{path}={value!r} is not one of {', '.join(map(repr, arguments))}")
        return value
    if hint is Any:
        return value.to_dict() if isinstance(value, ml_collections.ConfigDict) else value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint not in _SCALARS:
        raise ValueError(f"{path} can't be set in a configuration: it is a {getattr(hint, '__name__', hint)}")
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise ValueError(f"{path}={value!r} must be of type {hint.__name__}")
    return value


def _convert_dataclass(cls: type, value: Any, path: str) -> Any:
    if dataclasses.is_dataclass(value) and isinstance(value, cls):
        return value
    if not isinstance(value, Mapping | ml_collections.ConfigDict):
        raise ValueError(f"{path} must be a section, got {value!r}")
    hints = typing.get_type_hints(cls)
    fields = {field.name for field in dataclasses.fields(cls)}
    for key in value:
        if key not in fields:
            raise ValueError(unknown_key(path, key, fields))
    missing = [
        field.name
        for field in dataclasses.fields(cls)
        if field.name not in value
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ValueError(f"{path}.{missing[0]} is missing")
    try:
        return cls(**{key: _convert(hints[key], value[key], f"{path}.{key}") for key in value})
    except OutOfRange as error:
        raise error.within(path) from None
    except ValueError as error:
        message = str(error)
        raise ValueError(
            message if message.startswith("config") or path in message else f"{path}: {message}"
        ) from error


def first_difference(old: Any, new: Any, key: str) -> tuple[str, Any, Any]:
    """The first setting that differs, sections included: its key and both values. A missing value is None."""
    if not isinstance(old, Mapping) or not isinstance(new, Mapping):
        return key, old, new
    names = {**new, **old}
    name = next(name for name in names if (name in old) != (name in new) or old[name] != new[name])
    return first_difference(old.get(name), new.get(name), f"{key}.{name}")


@contextlib.contextmanager
def naming(path: str) -> Iterator[None]:
    """Puts a key of the configuration before the message of a ValueError that does not name it."""
    try:
        yield
    except ValueError as error:
        if path in str(error):
            raise
        raise ValueError(f"{path}: {error}") from error


def unknown_key(path: str, key: str, valid_keys: typing.Iterable[str]) -> str:
    """The message for a key that the schema does not have."""
    valid_keys = sorted(valid_keys)
    close = difflib.get_close_matches(key, valid_keys, n=1)
    hint = f"did you mean {path}.{close[0]}?" if close else f"known keys: {', '.join(valid_keys)}"
    return f"unknown config key {path}.{key}; {hint}"


# --- descriptions of fields, read from the source ----------------------------------------------------------------------
# A field's description is the comment lines right above it and the comment at its end, or its entry under `Attributes:`
# in the docstring of its class.

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
    result = []
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        arguments = typing.get_args(hint)
        named = _is_mapping(hint) and bool(arguments) and dataclasses.is_dataclass(arguments[-1])
        section = arguments[-1] if named else hint if dataclasses.is_dataclass(hint) else None
        result.append(
            Field(
                name=field.name,
                type=type_in_words(hint),
                default=field.default if field.default_factory is MISSING else field.default_factory(),
                description=_description(cls, field.name),
                section=typing.cast("type | None", section),
                named=named,
            )
        )
    return result


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
