"""A table of a paper: its layout, its numbers, and ours in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from routerl_jax.comparison.document import Block, Heading, Paragraph, Table
from routerl_jax.core.registry import Registry

RECIPE = "recipe:"  # before an agent: whatever row works as the agent of this recipe, prompted or trained


@dataclasses.dataclass(frozen=True)
class Column:
    """What a column has: a metric (evaluation.metrics) on a benchmark."""

    heading: str
    benchmark: str
    metric: str


@dataclasses.dataclass(frozen=True)
class Row:
    """A method, with its published numbers in the order of the columns.

    Attributes:
      group: the model, as the paper calls it.
      agent: which of ours does it, or `recipe:NAME`; "" for none.
    """

    group: str
    method: str
    agent: str
    published: tuple[float | None, ...]


@dataclasses.dataclass(frozen=True)
class Setting:
    """What the numbers were had with.

    Attributes:
      said: by the paper.
      mark: what a name of ours has in it if it is the same, in lower case; "" if that can't be told.
    """

    name: str
    said: str
    mark: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaperTable:
    """A table of a paper. Values are shares."""

    title: str
    paper: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    policies: Mapping[str, str]
    corpus: Setting
    retriever: Setting
    questions: str

    @property
    def agents(self) -> tuple[str, ...]:
        """Ours that are in it, but for those of recipes, which are named by their directories."""
        return tuple(dict.fromkeys(row.agent for row in self.rows if row.agent and not row.agent.startswith(RECIPE)))

    @property
    def benchmarks(self) -> tuple[str, ...]:
        """In the order of the columns."""
        return tuple(dict.fromkeys(column.benchmark for column in self.columns))

    @property
    def metrics(self) -> tuple[str, ...]:
        """In the order of the columns."""
        return tuple(dict.fromkeys(column.metric for column in self.columns))


PAPER_TABLES: Registry[PaperTable] = Registry("table of a paper")


def listing() -> list[tuple[str, str, str, str]]:
    """(name, paper, benchmarks, title) of every table, sorted by name."""
    tables = [(name, PAPER_TABLES.get(name)) for name in PAPER_TABLES]
    return [(name, table.paper, ", ".join(table.benchmarks), table.title) for name, table in tables]


def paper_blocks(table: PaperTable, results: Mapping[str, Any]) -> list[Block]:
    """The table with our numbers above the paper's, blank where something was not run, and what differs."""
    headings = ["model", "method", *(column.heading for column in table.columns)]
    rows, here = [], " and ".join(dict.fromkeys(_policy(one) for one in results["card"]["policies"].values()))
    for method, agent in {row.method: row.agent for row in table.rows}.items():
        for name in _ours(agent, results) or [""]:
            said = method if not name or name in (agent, f"{agent}_all") else f"{method}, {name}"
            rows.append([f"here: {here}", said, *(_value(_found(name, column, results)) for column in table.columns)])
    rows += [[row.group, row.method, *map(_value, row.published)] for row in table.rows]
    differs = Table(["", "the paper", "here", ""], _differences(table, results, here), texts=4)
    said = "Our numbers are in the first rows; what was not run is blank. Below is what they differ in."
    return [Heading(f"{table.title} (arXiv {table.paper})"), Paragraph(said), Table(headings, rows, texts=2), differs]


def _ours(agent: str, results: Mapping[str, Any]) -> list[str]:
    """The rows that do what a method does."""
    rows = {name: row for found in results["benchmarks"].values() for name, row in found["rows"].items()}
    if agent.startswith(RECIPE):
        return [name for name, row in rows.items() if row["agent"].get("recipe") == agent.removeprefix(RECIPE)]
    return [name for name in (agent, f"{agent}_all") if agent and name in rows][:1]


def _found(name: str, column: Column, results: Mapping[str, Any]) -> float | None:
    rows = results["benchmarks"].get(column.benchmark, {}).get("rows", {})
    return rows.get(name, {}).get(column.metric)


def _value(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _policy(about: Mapping[str, Any]) -> str:
    return about["chat model"]["model"] if "chat model" in about else about["name"]


def _differences(table: PaperTable, results: Mapping[str, Any], here: str) -> list[list[str]]:
    card = results["card"]
    ran = {name: card["benchmarks"][name] for name in table.benchmarks if name in card["benchmarks"]}
    bases = [base for found in ran.values() for base in found["knowledge"].values()]
    corpora = ", ".join(dict.fromkeys(f"{base['source']} ({base.get('passages', '?')} passages)" for base in bases))
    retrievers = ", ".join(dict.fromkeys(base.get("encoder", base["kind"]) for base in bases))
    asked = ", ".join(f"{name} {found['n']}" for name, found in ran.items())
    missing = [name for name in table.benchmarks if name not in ran]
    return [
        ["policy", ", ".join(table.policies.values()), here, _same(here, tuple(table.policies.values()))],
        ["corpus", table.corpus.said, corpora, _same(corpora, (table.corpus.mark,))],
        ["retriever", table.retriever.said, retrievers, _same(retrievers, (table.retriever.mark,))],
        ["questions", table.questions, asked, f"not run: {', '.join(missing)}" if missing else ""],
        ["prompts", "its own", "in our own words (docs/baselines.md)", "differs"],
    ]


def _same(ours: str, marks: tuple[str, ...]) -> str:
    """Whether what we have is what the paper has: all of ours have one of the marks in them."""
    return (
        ""
        if ours and all(any(m and m.lower() in one.lower() for m in marks) for one in ours.split(", "))
        else "differs"
    )
