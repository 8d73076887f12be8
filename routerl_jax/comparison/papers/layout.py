"""A paper's table with our numbers in it, and what they differ in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from routerl_jax.comparison.benchmarks.known import BENCHMARKS
from routerl_jax.comparison.document import Block, Heading, Paragraph, Table
from routerl_jax.comparison.papers.table import NAMED, RECIPE, Column, PaperTable, Setting, named

Results = Mapping[str, Any]  # of results.json: `benchmarks` and `card`


def paper_blocks(table: PaperTable, results: Results) -> list[Block]:
    """The table with our numbers above the paper's, blank where something was not run, and what differs.

    Args:
      results: those of results.json, with the comparisons that it has `beside` it.
    """
    headings = ["model", "method", *(column.heading for column in table.columns)]
    comparisons = {"": results, **results.get("beside", {})}
    rows = [row for method, agent in _methods(table) for row in _here(method, agent, table, comparisons)]
    rows += [
        [row.group, row.method, *(_cell(value, column) for value, column in zip(row.published, table.columns))]
        for row in table.rows
    ]
    differs = [line for place, one in comparisons.items() for line in _differences(table, one, place)]
    said = "Our numbers are in the first rows; what was not run is blank. Below is what they differ in."
    return [
        Heading(f"{table.title} (arXiv {table.paper})"),
        Paragraph(f"{said} {table.note}".strip()),
        Table(headings, rows, texts=2),
        Table(["", "the paper", "here", ""], differs, texts=4),
    ]


def _methods(table: PaperTable) -> Iterable[tuple[str, str]]:
    """A method that the paper has with several models is one of ours."""
    return dict.fromkeys((row.method, row.agent) for row in table.rows)


def _here(method: str, agent: str, table: PaperTable, comparisons: Mapping[str, Results]) -> list[list[str]]:
    """Our rows of a method, or a blank one."""
    found = [
        [_label(place, _policies([row], one)), _said(method, agent, name), *cells]
        for place, one in comparisons.items()
        for name, row in _ours(agent, one).items()
        if any(cells := [_value(name, column, one) for column in table.columns])
    ]
    blank = [_label("", _policies(_all_rows(comparisons[""]).values(), comparisons[""])), method]
    return found or [[*blank, *[""] * len(table.columns)]]


def _label(place: str, policies: list[str]) -> str:
    return f"here: {' and '.join(policies)}{place and f', {place}'}"


def _said(method: str, agent: str, name: str) -> str:
    """The method, and what does it where that can't be told from the table."""
    return method if name in (agent, f"{agent}_all") else f"{method}, {name}"


def _all_rows(results: Results) -> dict[str, Any]:
    return {name: row for found in results["benchmarks"].values() for name, row in found["rows"].items()}


def _ours(agent: str, results: Results) -> dict[str, Any]:
    """The rows that do what a method does. One that config.rows names is where it is named, and nowhere else."""
    rows, given = _all_rows(results), results["card"].get("rows", {})
    if name := named(agent, given).rstrip("/"):
        return {name: rows[name]} if name in rows else {}
    elsewhere = {one.rstrip("/") for one in given.values()}
    free = {name: row for name, row in rows.items() if name not in elsewhere}
    if agent.startswith(RECIPE):
        recipe = agent.removeprefix(RECIPE)
        about = {name: row["agent"] for name, row in free.items()}
        return {
            name: free[name] for name, one in about.items() if one.get("recipe") == recipe and not one.get("routing")
        }
    if not agent or agent.startswith(NAMED):
        return {}
    return {name: free[name] for name in [one for one in (agent, f"{agent}_all") if one in free][:1]}


def _value(name: str, column: Column, results: Results) -> str:
    """Our number of a row, "" if any benchmark of the column was not run."""
    found = []
    for benchmark in column.benchmarks:
        row = results["benchmarks"].get(benchmark, {}).get("rows", {}).get(name, {})
        if column.group:
            key, value = column.group
            row = row.get("by", {}).get(key, {}).get(value, {})
        if row.get(column.metric) is None:
            return ""
        found.append((row[column.metric], row["n"] if column.pooled else 1))
    mean = sum(value * weight for value, weight in found) / sum(weight for _, weight in found)
    return _cell(column.unit.scale * mean, column)


def _cell(value: float | None, column: Column) -> str:
    return "" if value is None else column.unit.printed(value)


def _policies(rows: Iterable[Mapping[str, Any]], results: Results) -> list[str]:
    """Names of the policies of rows; a run with the model that it began with."""
    known = results["card"]["policies"]
    return list(dict.fromkeys(_policy(known[row["policy"]]) for row in rows))


def _policy(about: Mapping[str, Any]) -> str:
    if "chat model" in about:
        return about["chat model"]["model"]
    return f"{about['name']} ({about['model']})" if about.get("model") else about["name"]


def _differences(table: PaperTable, results: Results, place: str) -> list[list[str]]:
    """Lines of what the paper has, what is here, and whether that differs."""
    card = results["card"]
    ran = {name: card["benchmarks"][name] for name in table.benchmarks if name in card["benchmarks"]}
    bases = [base for found in ran.values() for base in found["knowledge"].values()]
    corpora = [f"{base['source']} ({base.get('passages', '?')} passages)" for base in bases if base["source"]]
    retrievers = [base.get("encoder", base["kind"]) for base in bases if base["kind"] != "hybrid"]
    models = [
        about.get("model") or _policy(about) for about in card["policies"].values()
    ]  # of a run, the one that it began with
    any_of = [one.matches for one in table.policies]
    lines = [
        _line(
            "policy", ", ".join(one.said for one in table.policies), models, lambda name: any(f(name) for f in any_of)
        ),
        _line("corpus", table.corpus.said, corpora, table.corpus.matches),
        _line("retriever", table.retriever.said, retrievers, table.retriever.matches),
        [
            "questions",
            table.questions,
            ", ".join(f"{name} {found['n']}" for name, found in ran.items()),
            _missing(table, ran),
        ],
    ]
    for said, number, ours in (
        ("documents of a search", table.k, card["k"]),
        ("searches of a question", table.searches, card["searches"]),
    ):
        lines += [_line(said, str(number), [str(ours)], str(number).__eq__)] if number else []
    if table.judge:
        lines.append(_judged(table.judge, card))
    lines.append(["prompts", "its own", "in our own words (docs/baselines.md)", "differs"])
    lines += [
        [f"not run on {benchmark}", "", agent, why]
        for benchmark, agents in card.get("left out", {}).items()
        for agent, why in agents.items()
    ]
    return [[f"{place}: {name}" if place else name, *rest] for name, *rest in lines]


def _line(name: str, paper: str, here: list[str], same: Callable[[str], bool]) -> list[str]:
    """All that is here must be what the paper has."""
    return [name, paper, ", ".join(dict.fromkeys(here)), "" if here and all(map(same, here)) else "differs"]


def _judged(judge: Setting, card: Mapping[str, Any]) -> list[str]:
    if "judge" not in card:
        return ["judge", judge.said, "", "not asked: its columns are blank (config.judge)"]
    return _line("judge", judge.said, [card["judge"]["model"]], judge.matches)


def _missing(table: PaperTable, ran: Mapping[str, Any]) -> str:
    missing = [name for name in table.benchmarks if name not in ran]
    there = [name for name in missing if name in BENCHMARKS]
    said = {"not run": there, "no benchmark here yet": [name for name in missing if name not in there]}
    return "; ".join(f"{what}: {', '.join(names)}" for what, names in said.items() if names)
