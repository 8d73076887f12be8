"""Results as a table, in the terminal and as Markdown."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from routerl_jax.core.console import open_console
from routerl_jax.evaluation.metrics import ANSWER, JUDGE, answered

EM = ("em",)

# (key, heading, scale, digits)
_COLUMNS = (
    ("em", "EM %", 100, 1),
    ("f1", "F1 %", 100, 1),
    ("cover_em", "CEM %", 100, 1),
    ("substring_em", "SubEM %", 100, 1),
    ("f1_recall", "F1-recall %", 100, 1),
    ("anls", "ANLS %", 100, 1),
    ("em_answerable", "EM of answerable %", 100, 1),
    ("answerable", "answerable %", 100, 1),
    ("judge", "judge %", 100, 1),
    ("routing_accuracy", "routing %", 100, 1),
    ("searches_per_question", "searches", 1, 2),
    ("retrieval_cost", "cost", 1, 2),
    ("invalid_action_rate", "invalid %", 100, 1),
    ("policy_failed_rate", "no reply %", 100, 1),
    ("money_per_question", "money", 1, 5),
)
# what an answer without a verdict counts, by config.judge.failed
_JUDGED = {
    "zero": "An answer without a verdict counts as wrong for the judge (config.judge.failed='zero').",
    "em": "Where a verdict is missing, exact match decides (config.judge.failed='em').",
    "leave_out": "Answers without a verdict are left out of the judge's means (config.judge.failed='leave_out').",
    "refuse": "The judge gave a verdict on every answer (config.judge.failed='refuse').",
}
_HEADLINE_ONLY = ("substring_em", "f1_recall", "anls")
_TITLES = {
    "warm_start": "before RL",
    "trained": "after RL",
    "random_kb": "random KB",
    "every_kb": "every KB",
    "no_search": "no search",
    "vanilla_rag": "vanilla RAG",
}


def title(agent: str) -> str:
    """The name of an agent in tables."""
    for prefix, words in (("only_", "always"), ("vanilla_rag_", "vanilla RAG,")):
        if agent.startswith(prefix):
            return f"{words} {agent.removeprefix(prefix)}"
    return _TITLES.get(agent, agent)


def heading(metric: str) -> str:
    """The name of a metric in tables."""
    return next(text for key, text, _, _ in _COLUMNS if key == metric)


def score_text(row: Mapping[str, Any], metric: str, *, interval: bool = True) -> str:
    """An answer metric of a row of `metrics.summarize` in percent: "20.0 (5.0-40.0), 16 of 20" if 4 of its 20 questions have no
    reply or no verdict (`metrics.answered`). It is "-" instead of a number if none has, or if there is no number."""
    count, asked = answered(row, metric)
    value, ends = (row.get(metric), row.get(f"{metric}_interval")) if count else (None, None)
    text = "-" if value is None else f"{100 * value:.1f}"
    if interval and ends:
        text += f" ({100 * ends[0]:.1f}-{100 * ends[1]:.1f})"
    return text if count == asked else f"{text}, {count} of {asked}"


def marks_text(table: Mapping[str, Mapping[str, Any]], failed: str = "") -> str:
    """The meaning of "n of N" in cells, if there are any, and of missing verdicts, if there was a judge; else "".

    Args:
      failed: config.judge.failed; "" without a judge.
    """
    lacking = [
        lack
        for lack, metric in (("whole reply of the policy", EM[0]), ("verdict of the judge", JUDGE))
        if any(count < asked for count, asked in (answered(row, metric) for row in table.values()))
    ]
    marks = f'"n of N": n of N questions have a {" and a ".join(lacking)}. ' if lacking else ""
    silent = (
        "A question without a whole reply counts as wrong. " if lacking[:1] == ["whole reply of the policy"] else ""
    )
    return f"{marks}{silent}{_JUDGED.get(failed, '')}".strip()


def rows(table: Mapping[str, Mapping[str, Any]], headline: Sequence[str] = EM) -> tuple[list[str], list[list[str]]]:
    """Headings and cells. The headline metrics come first, with their 95 % intervals. Substring EM, F1-Recall and ANLS
    are shown only if they are among these."""
    named = {column[0]: column for column in _COLUMNS}
    ordered = [
        *(named[metric] for metric in headline),
        *(c for c in _COLUMNS if c[0] not in (*headline, *_HEADLINE_ONLY)),
    ]
    columns = [column for column in ordered if any(column[0] in metrics for metrics in table.values())]
    if all(metrics.get("retrieval_cost") in (0, metrics["searches_per_question"]) for metrics in table.values()):
        columns = [column for column in columns if column[0] != "retrieval_cost"]  # all searches cost 1
    if not any(metrics.get("money_per_question") for metrics in table.values()):
        columns = [column for column in columns if column[0] != "money_per_question"]  # no price is configured
    headings = ["agent", *(heading for _, heading, _, _ in columns), "n"]
    cells = []
    for agent, metrics in table.items():
        row = [title(agent)]
        for key, _, scale, digits in columns:
            value = metrics.get(key)
            if key in (*ANSWER, JUDGE):
                row.append(score_text(metrics, key, interval=key in headline))
            else:
                row.append("-" if value is None else f"{value * scale:.{digits}f}")
        cells.append([*row, str(metrics["n"])])
    return headings, cells


def grouped(table: Mapping[str, Mapping[str, Any]], key: str) -> dict[str, Mapping[str, Any]]:
    """Turns a table of agents into a table of agents and groups of questions, by `key` ("dataset", "kind", "type")."""
    return {
        f"{title(agent)}, {value}": row
        for agent, metrics in table.items()
        for value, row in metrics.get("by", {}).get(key, {}).items()
    }


def markdown(table: Mapping[str, Mapping[str, Any]], headline: Sequence[str] = EM, failed: str = "") -> str:
    """The table in Markdown. `headline`: see `rows`; `failed`: see `marks_text`, which stands below."""
    headings, cells = rows(table, headline)
    lines = ["| " + " | ".join(headings) + " |", "|---" + "|---:" * (len(headings) - 1) + "|"]
    lines += ["| " + " | ".join(row) + " |" for row in cells]
    about = marks_text(table, failed)
    return "\n".join([*lines, *(["", about] if about else [])]) + "\n"


def print_table(
    table: Mapping[str, Mapping[str, Any]], workdir: pathlib.Path, by: str = "", headline: Sequence[str] = EM
) -> None:
    """Prints the table, with `by` also that of groups, and the paths of the files. `headline`: see `rows`."""
    console = open_console()
    console.print(_rich_table("Held-out questions", table, headline))
    if about := marks_text(table):
        console.print(about)
    if by:
        console.print(_rich_table(f"By {by}", grouped(table, by), headline))
    console.print(f"results: {workdir / 'results.json'}   figures: {workdir / 'figures'}", soft_wrap=True)


def _rich_table(title: str, table: Mapping[str, Mapping[str, Any]], headline: Sequence[str]) -> Table:
    headings, cells = rows(table, headline)
    printed = Table(title=title, header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for i, (text, *column) in enumerate(zip(headings, *cells)):
        # In a narrow terminal, cells wrap between words instead of being cut.
        longest = max(len(word) for cell in (text, *column) for word in cell.split())
        printed.add_column(text, justify="left" if i == 0 else "right", min_width=longest)
    for row in cells:
        printed.add_row(*row, style="bold green" if row[0] == "after RL" else None)
    return printed
