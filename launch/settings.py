"""Prints configurations: the fields for `--help`, the values for `--show`."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from routerl_jax.core.config import MISSING, Section, default_in_words, sections, settings, summary
from routerl_jax.core.console import open_console

_WIDTH = 120  # most columns of a description


def print_fields(schemas: Mapping[str, type], console: Console | None = None) -> None:
    """Prints every field of configurations, with type, default and comment.

    Args:
      schemas: their classes by heading.
    """
    console = console or open_console()
    for heading, schema in schemas.items():
        console.print()
        console.print(Text(f"{heading} (--config.key=value):", style="bold underline"))
        for section in sections(schema):
            _print_section(console, section)


def _print_section(console: Console, section: Section) -> None:
    what = f"as {section.like}{', but' if section.fields else ''}" if section.like else summary(section.schema)
    console.print()
    console.print(Text.assemble((section.path, "bold"), f": {what}"))
    if section.description:
        console.print(_indented(section.description, 2, console))
    for field in section.fields:
        key, default = f"{section.path}.{field.name}", default_in_words(field.default)
        console.print(Text.assemble("  ", (key, "cyan"), f" = {default}  ", (field.type, "dim")), soft_wrap=True)
        if field.description:
            console.print(_indented(field.description, 6, console))


def _indented(words: str, by: int, console: Console) -> Text:
    return Text(textwrap.fill(words, min(console.width, _WIDTH), initial_indent=" " * by, subsequent_indent=" " * by))


def print_settings(config: Any, console: Console | None = None) -> None:
    """Prints every value of a configuration; those that differ from the defaults begin with a star and name the default."""
    console = console or open_console()
    count = differing = 0
    for setting in settings(config):
        count += 1
        differing += setting.differs
        line = Text(f"{'*' if setting.differs else ' '} {setting.key}", style="bold" if setting.differs else "dim")
        if not setting.section:
            line.append(f" = {_value(setting.value)}")
        if setting.differs:
            by_default = "not there" if setting.default is MISSING else _value(setting.default)
            line.append(f"  (default: {by_default})", style="not bold yellow")
        console.print(line, soft_wrap=True)
    console.print(Text(f"* {differing} of {count} settings differ from the defaults"), soft_wrap=True)


def _value(value: Any) -> str:
    return repr(dict(value)) if isinstance(value, Mapping) else repr(value)
