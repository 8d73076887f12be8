"""Registries for the extension points. An entry is named by a short name, or by a dotted path `package.module:attribute`."""

from __future__ import annotations

import difflib
import importlib
import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Generic, TypeVar, cast

T = TypeVar("T")
Entry = TypeVar("Entry")


class Registry(Generic[T]):
    """Maps names to objects. `get` also takes `package.module:attribute`, so users can add an entry from their own package.

    Args:
      kind: what the entries are, for messages.
      paths: dotted paths of further entries by their names. A module is imported when its entry is asked for.
    """

    def __init__(self, kind: str, paths: Mapping[str, str] = {}) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}
        self._paths = dict(paths)

    def register(self, name: str) -> Callable[[Entry], Entry]:
        """Decorator that adds an object, a T, under `name`. Raises ValueError if the name is taken."""

        def add(entry: Entry) -> Entry:  # typed Entry, not T, so that a registered class keeps its signature
            if name in self:
                raise ValueError(f"{self.kind} {name!r} is registered twice")
            self._entries[name] = cast(T, entry)
            return entry

        return add

    def get(self, name: str) -> T:
        """The entry of this name. Raises ValueError that lists the known names, and the closest one, if there is none."""
        if name in self._entries:
            return self._entries[name]
        path = self._paths.get(name, name)
        if ":" in path:
            module, _, attribute = path.partition(":")
            try:
                return operator.attrgetter(attribute)(importlib.import_module(module))
            except (ImportError, AttributeError) as error:
                if path != name:
                    raise ValueError(f"{self.kind} {name!r} is {path}, which can't be imported: {error}") from error
                hint = _import_hint(error, module, attribute)
                raise ValueError(f"cannot load {self.kind} {name!r}: {error}{hint}") from error
        close = difflib.get_close_matches(name, self, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else "."
        raise ValueError(
            f"unknown {self.kind} {name!r}{hint} Known: {', '.join(self) or 'none'}; "
            f"or give a dotted path 'package.module:attribute'."
        )

    def __iter__(self) -> Iterator[str]:
        return iter(sorted({*self._entries, *self._paths}))

    def __contains__(self, name: str) -> bool:
        return name in self._entries or name in self._paths


def import_extension(module: str, setting: str) -> None:
    """Imports a user's module, which registers its entries.

    Args:
      setting: where the module is named, for the error.

    Raises:
      ValueError: it can't be imported.
    """
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f"{setting}: cannot import {module!r}: {error}{_import_hint(error, module)}") from error


def _import_hint(error: Exception, module: str, attribute: str = "") -> str:
    if isinstance(error, ModuleNotFoundError) and error.name in (module, module.partition(".")[0]):
        return "; run the command where it lies, or put its directory on PYTHONPATH"
    close = difflib.get_close_matches(attribute, vars(sys.modules[module]), n=1) if module in sys.modules else []
    return f"; did you mean {close[0]!r}?" if close and isinstance(error, AttributeError) else ""
