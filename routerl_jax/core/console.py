"""The console that tables and other results are printed to."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

_WIDTH = 200  # columns of a log or a pipe


def open_console() -> Console:
    """A console on standard output, as wide as its terminal.

    A log or a pipe has no width. rich would assume 80 columns and fold wide tables, so it gets 200 here. The environment's
    COLUMNS says otherwise.
    """
    console = Console(highlight=False)
    if not console.is_terminal and not console.is_jupyter and "COLUMNS" not in os.environ:
        console.width = _WIDTH
    return console


def print_listing(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints a table of what there is, such as for --agents=help."""
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    open_console().print(table)
