r"""Writes docs/configuration.md: every field of every configuration, as the source describes it.

python -m launch.configuration

Programs print configurations with the functions here: the fields for --help, the values for --show.
"""

from __future__ import annotations

import importlib
import pathlib
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags
from rich.console import Console
from rich.text import Text

from launch.command import start
from routerl_jax.core.config import MISSING, Field, Section, default_in_words, sections, settings, summary
from routerl_jax.core.console import open_console

FLAGS = flags.FLAGS
PAGE = pathlib.Path(__file__).parents[1] / "docs" / "configuration.md"
_WIDTH = 120  # most columns of a description
# programs whose --config holds what; of one class the first has the table
_PROGRAMS = ("launch.train", "launch.evaluate", "launch.build_kb", "launch.serve_kb", "launch.construct_data")
_HEAD = """# Configuration

All settings of all programs. `--config.key=value` overrides one; `python -m launch.train --help` prints the same, and
`python -m launch.train --config=configs/quickstart.py --show` prints what a configuration sets, with a star where that
differs from the defaults. In a key, NAME stands for a name of your choice.

This page is made from the comments in the source by `python -m launch.configuration`. Change it there.
"""


def define_flags() -> None:
    flags.DEFINE_string("output", str(PAGE), "File to write.")


def main(_: Sequence[str]) -> None:
    pathlib.Path(FLAGS.output).write_text(page(), encoding="utf-8")
    print(f"wrote {FLAGS.output}")


def page() -> str:
    """The text of docs/configuration.md."""
    lines, anchors, seen = [_HEAD], dict[type, str](), {}
    for program in _PROGRAMS:
        for heading, schema in importlib.import_module(program).schemas().items():
            if schema not in seen:
                lines += ["", f"## {heading}", "", f"`{program}`"]
                for section in sections(schema, seen=seen):
                    lines += _section(section, anchors)
    return "\n".join(lines) + "\n"


def _section(section: Section, anchors: dict[type, str]) -> list[str]:
    """A heading and a table; of a dataclass that has them already, where they are, and what is different here."""
    about = f" ({_escaped(section.description)})" if section.description else ""
    if section.like:
        name = section.schema.__name__
        differing = [f"`{field.name}={default_in_words(field.default)}`" for field in section.fields]
        but = f", but {', '.join(differing)}" if differing else ""
        return ["", f"`{section.path}`: as [{name}](#{anchors[section.schema]}){but}{about}."]
    heading = f"{section.path} ({section.schema.__name__})"
    anchors[section.schema] = heading.lower().replace(".", "").replace("(", "").replace(")", "").replace(" ", "-")
    return [
        "",
        f"### {heading}",
        "",
        f"{_escaped(summary(section.schema))}{about}",
        "",
        *(_table(section.fields) if section.fields else ()),
    ]


def _table(fields: Sequence[Field]) -> list[str]:
    lines = ["| key | type | default | what it is |", "|---|---|---|---|"]
    for field in fields:
        default = f"`{default_in_words(field.default)}`".replace("|", "\\|")
        lines.append(f"| `{field.name}` | {_escaped(field.type)} | {default} | {_escaped(field.description)} |")
    return lines


def _escaped(text: str) -> str:
    """Shown by Markdown word for word, but for what stands between backticks."""
    parts = text.split("`")
    for i in range(0, len(parts), 2):
        for sign in "\\*_<>[]$":
            parts[i] = parts[i].replace(sign, f"\\{sign}")
    return "`".join(parts).replace("|", "\\|")


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


if __name__ == "__main__":
    start(main, define_flags)
