"""Typed configuration: dataclasses are the schema, ml_collections carries overrides, and no key is ever ignored.

A config file returns a `ConfigDict`, made by `to_config_dict` from dataclass defaults. `--config.a.b=v` changes it. Then
`from_config_dict` turns it back into frozen dataclasses, and rejects every key that the schema does not have.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import ml_collections
from ml_collections import config_dict

from routerl_jax.core.checked import OutOfRange

T = TypeVar("T")


def to_config_dict(value: Any) -> Any:
    """Recursively turns dataclasses (and mappings) into ConfigDicts. A leaf that is None becomes a placeholder of its type."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        config = ml_collections.ConfigDict()
        hints = typing.get_type_hints(type(value))
        for field in dataclasses.fields(value):
            leaf = to_config_dict(getattr(value, field.name))
            if leaf is None:
                leaf = config_dict.placeholder(_scalar_type(hints[field.name]))
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


_SCALARS = (int, float, str, bool)


def _scalar_type(hint: Any) -> type:
    for option in typing.get_args(hint) or (hint,):
        if option in _SCALARS:
            return option
    return object


def _convert(hint: Any, value: Any, path: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(value, ml_collections.FieldReference):
        value = value.get()
    if origin in (typing.Union, types.UnionType):
        if value is None:
            if type(None) in arguments:
                return None
            raise ValueError(f"{path} must be set")
        options = [option for option in arguments if option is not type(None)]
        return _convert(options[0], value, path) if len(options) == 1 else _first_match(options, value, path)
    if dataclasses.is_dataclass(hint):
        return _convert_dataclass(typing.cast(type, hint), value, path)
    if origin in (dict, Mapping) or (isinstance(origin, type) and issubclass(origin, Mapping)):
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
    return _convert_scalar(hint, value, path)


def _first_match(options: list[Any], value: Any, path: str) -> Any:
    errors = []
    for option in options:
        try:
            return _convert(option, value, path)
        except ValueError as error:
            errors.append(str(error))
    raise ValueError("; ".join(errors))


def _convert_scalar(hint: Any, value: Any, path: str) -> Any:
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
