"""Results as a table, in the terminal and as Markdown."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

# (key, heading, scale, digits)
_COLUMNS = (
    ("em", "EM %", 100, 1),
    ("f1", "F1 %", 100, 1),
    ("cover_em", "CEM %", 100, 1),
    ("routing_accuracy", "routing %", 100, 1),
    ("searches_per_question", "searches", 1, 2),
    ("retrieval_cost", "cost", 1, 2),
    ("invalid_action_rate", "invalid %", 100, 1),
)
_TITLES = {
    "warm_start": "before RL",
    "trained": "after RL",
    "random_kb": "random KB",
    "no_search": "no search",
    "vanilla_rag": "vanilla RAG",
}


def title(agent: str) -> str:
    """How an agent is called in tables."""
    for prefix, said in (("only_", "always"), ("vanilla_rag_", "vanilla RAG,")):
        if agent.startswith(prefix):
            return f"{said} {agent.removeprefix(prefix)}"
    return _TITLES.get(agent, agent)


def rows(table: Mapping[str, Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Headings and cells. EM comes with its 95 % interval."""
    columns = [column for column in _COLUMNS if any(column[0] in metrics for metrics in table.values())]
    if all(metrics.get("retrieval_cost") in (0, metrics["searches_per_question"]) for metrics in table.values()):
        columns = [column for column in columns if column[0] != "retrieval_cost"]  # every search costs one
    headings = ["agent", *(heading for _, heading, _, _ in columns), "n"]
    cells = []
    for agent, metrics in table.items():
        row = [title(agent)]
        for key, _, scale, digits in columns:
            value = metrics.get(key)
            text = "-" if value is None else f"{value * scale:.{digits}f}"
            if key == "em" and "em_interval" in metrics:
                low, high = metrics["em_interval"]
                text += f" ({low * 100:.1f}-{high * 100:.1f})"
            row.append(text)
        cells.append([*row, str(metrics["n"])])
    return headings, cells


def grouped(table: Mapping[str, Mapping[str, Any]], key: str) -> dict[str, Mapping[str, Any]]:
    """A table of agents as one of their groups of questions, by what `key` ("dataset", "kind", "type") says of them."""
    return {
        f"{title(agent)}, {value}": row
        for agent, metrics in table.items()
        for value, row in metrics.get("by", {}).get(key, {}).items()
    }


def markdown(table: Mapping[str, Mapping[str, Any]]) -> str:
    """The table in Markdown."""
    headings, cells = rows(table)
    lines = ["| " + " | ".join(headings) + " |", "|---" + "|---:" * (len(headings) - 1) + "|"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in cells]) + "\n"


def print_table(table: Mapping[str, Mapping[str, Any]], workdir: pathlib.Path, by: str = "") -> None:
    """Prints the table, with `by` that of groups as well, and says where the files are."""
    console = Console()
    console.print(_printed("Held-out questions", table))
    if by:
        console.print(_printed(f"By {by}", grouped(table, by)))
    console.print(f"results: {workdir / 'results.json'}   figures: {workdir / 'figures'}", highlight=False)


def _printed(heading: str, table: Mapping[str, Mapping[str, Any]]) -> Table:
    headings, cells = rows(table)
    printed = Table(title=heading, header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for i, (heading, *column) in enumerate(zip(headings, *cells)):
        # A narrow terminal breaks cells between words, and cuts none off.
        longest = max(len(word) for cell in (heading, *column) for word in cell.split())
        printed.add_column(heading, justify="left" if i == 0 else "right", min_width=longest)
    for row in cells:
        printed.add_row(*row, style="bold green" if row[0] == "after RL" else None)
    return printed
