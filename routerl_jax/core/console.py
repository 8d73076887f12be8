"""The console that tables and other results are printed to."""

from __future__ import annotations

import os

from rich.console import Console

_WIDTH = 200  # columns of a log or a pipe


def open_console() -> Console:
    """A console on standard output, as wide as its terminal.

    A log or a pipe has no width. rich would assume 80 columns and fold wide tables, so it gets 200 here. The environment's
    COLUMNS says otherwise.
    """
    made = Console(highlight=False)
    if not made.is_terminal and not made.is_jupyter and "COLUMNS" not in os.environ:
        made.width = _WIDTH
    return made
