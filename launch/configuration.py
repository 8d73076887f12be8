r"""Writes docs/configuration.md: every field of every configuration, as the source describes it.

python -m launch.configuration
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from absl import flags

from launch import build_kb, construct_data, evaluate, serve_kb, train
from launch.command import start
from routerl_jax.core.config import Field, Section, default_in_words, sections, summary

FLAGS = flags.FLAGS
PAGE = pathlib.Path(__file__).parents[1] / "docs" / "configuration.md"
_PROGRAMS = {  # whose --config holds what; of one class the first has the table
    "launch.train": train,
    "launch.evaluate": evaluate,
    "launch.build_kb": build_kb,
    "launch.serve_kb": serve_kb,
    "launch.construct_data": construct_data,
}
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
    for program, module in _PROGRAMS.items():
        for heading, schema in module.schemas().items():
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


if __name__ == "__main__":
    start(main, define_flags)
