"""Lays out a paper's table with our numbers in it, and lists how the settings differ."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from routerl_jax.extras.comparison.benchmarks.known import BENCHMARKS
from routerl_jax.extras.comparison.document import Block, Heading, Paragraph, Table
from routerl_jax.extras.comparison.papers.table import NAMED, RECIPE, Column, PaperTable, Setting, assigned_agent

Results = Mapping[str, Any]  # content of results.json: `benchmarks` and `card`


def paper_blocks(table: PaperTable, results: Results) -> list[Block]:
    """The table with our numbers above the paper's (blank if not run), and a table of the differences in settings.

    Args:
      results: content of results.json, including the comparisons in `beside`.
    """
    headings = ["model", "method", *(column.heading for column in table.columns)]
    comparisons = {"": results, **results.get("beside", {})}
    rows = [row for method, agent in _methods(table) for row in _our_rows(method, agent, table, comparisons)]
    rows += [
        [row.group, row.method, *(_cell(value, column) for value, column in zip(row.published, table.columns))]
        for row in table.rows
    ]
    differs = [line for directory, compared in comparisons.items() for line in _differences(table, compared, directory)]
    introduction = "Our numbers are in the first rows; what was not run is blank. Below is what they differ in."
    return [
        Heading(f"{table.title} (arXiv {table.paper})"),
        Paragraph(f"{introduction} {table.note}".strip()),
        Table(headings, rows, texts=2),
        Table(["", "the paper", "here", ""], differs, texts=4),
    ]


def _methods(table: PaperTable) -> Iterable[tuple[str, str]]:
    """(method, agent) pairs, each once, even if the paper has a method with several models."""
    return dict.fromkeys((row.method, row.agent) for row in table.rows)


def _our_rows(method: str, agent: str, table: PaperTable, comparisons: Mapping[str, Results]) -> list[list[str]]:
    """Our rows of a method, or one blank row."""
    rows = [
        [_label(directory, _policies([row], compared)), _method_name(method, agent, name), *cells]
        for directory, compared in comparisons.items()
        for name, row in agent_rows(agent, compared).items()
        if any(cells := [_value(name, column, compared) for column in table.columns])
    ]
    blank = [_label("", _policies(_all_rows(comparisons[""]).values(), comparisons[""])), method]
    return rows or [[*blank, *[""] * len(table.columns)]]


def _label(directory: str, policies: list[str]) -> str:
    return f"here: {' and '.join(policies)}{directory and f', {directory}'}"


def _method_name(method: str, agent: str, name: str) -> str:
    """The method, with the name of our row if the table does not show it."""
    return method if name in (agent, f"{agent}_all") else f"{method}, {name}"


def _all_rows(results: Results) -> dict[str, Any]:
    return {name: row for benchmark in results["benchmarks"].values() for name, row in benchmark["rows"].items()}


def agent_rows(agent: str, results: Results) -> dict[str, Any]:
    """Our rows for the agent of a method, by name, of some benchmark. A row that config.rows names stands only where it is
    named."""
    rows, assigned = _all_rows(results), results["card"].get("rows", {})
    if name := assigned_agent(agent, assigned).rstrip("/"):
        return {name: rows[name]} if name in rows else {}
    named_elsewhere = {value.rstrip("/") for value in assigned.values()}
    free = {name: row for name, row in rows.items() if name not in named_elsewhere}
    if agent.startswith(RECIPE):
        recipe = agent.removeprefix(RECIPE)
        agent_cards = {name: row["agent"] for name, row in free.items()}
        return {
            name: free[name]
            for name, value in agent_cards.items()
            if value.get("recipe") == recipe and not value.get("routing")
        }
    if not agent or agent.startswith(NAMED):
        return {}
    return {name: free[name] for name in [value for value in (agent, f"{agent}_all") if value in free][:1]}


def _value(name: str, column: Column, results: Results) -> str:
    """Our number of a row; "" if any benchmark of the column was not run."""
    values = []
    for benchmark in column.benchmarks:
        row = results["benchmarks"].get(benchmark, {}).get("rows", {}).get(name, {})
        if column.group:
            key, value = column.group
            row = row.get("by", {}).get(key, {}).get(value, {})
        if row.get(column.metric) is None:
            return ""
        values.append((row[column.metric], row["n"] if column.pooled else 1))
    mean = sum(value * weight for value, weight in values) / sum(weight for _, weight in values)
    return _cell(column.unit.scale * mean, column)


def _cell(value: float | None, column: Column) -> str:
    return "" if value is None else column.unit.printed(value)


def _policies(rows: Iterable[Mapping[str, Any]], results: Results) -> list[str]:
    """Names of the policies of rows."""
    policies = results["card"]["policies"]
    return list(dict.fromkeys(policy_name(policies[row["policy"]]) for row in rows))


def policy_name(policy_card: Mapping[str, Any]) -> str:
    """The name of a policy of the card. The name of a run has the model that it started from."""
    if "chat model" in policy_card:
        return policy_card["chat model"]["model"]
    return f"{policy_card['name']} ({policy_card['model']})" if policy_card.get("model") else policy_card["name"]


def _differences(table: PaperTable, results: Results, directory: str) -> list[list[str]]:
    """Lines with a setting, the paper's value, our value, and whether they differ."""
    card = results["card"]
    ran = {name: card["benchmarks"][name] for name in table.benchmarks if name in card["benchmarks"]}
    bases = [base for benchmark_card in ran.values() for base in benchmark_card["knowledge"].values()]
    corpora = [f"{base['source']} ({base.get('passages', '?')} passages)" for base in bases if base["source"]]
    retrievers = [base.get("encoder", base["kind"]) for base in bases if base["kind"] != "hybrid"]
    # for a run, the model that it started from
    models = [policy_card.get("model") or policy_name(policy_card) for policy_card in card["policies"].values()]
    any_of = [setting.matches for setting in table.policies]
    lines = [
        _line(
            "policy",
            ", ".join(setting.text for setting in table.policies),
            models,
            lambda name: any(f(name) for f in any_of),
        ),
        _line("corpus", table.corpus.text, corpora, table.corpus.matches),
        _line("retriever", table.retriever.text, retrievers, table.retriever.matches),
        [
            "questions",
            table.questions,
            ", ".join(f"{name} {benchmark_card['n']}" for name, benchmark_card in ran.items()),
            _missing(table, ran),
        ],
    ]
    for label, number, ours in (
        ("documents of a search", table.k, card["k"]),
        ("searches of a question", table.searches, card["searches"]),
    ):
        lines += [_line(label, str(number), [str(ours)], str(number).__eq__)] if number else []
    if table.judge:
        lines.append(_judged(table.judge, card))
    lines.append(["prompts", "its own", "in our own words (docs/baselines.md)", "differs"])
    lines += [
        [f"not run on {benchmark}", "", agent, why]
        for benchmark, agents in card.get("left out", {}).items()
        for agent, why in agents.items()
    ]
    return [[f"{directory}: {name}" if directory else name, *cells] for name, *cells in lines]


def _line(name: str, paper: str, ours: list[str], matches: Callable[[str], bool]) -> list[str]:
    """A line of the differences. All our values must match the paper's."""
    return [name, paper, ", ".join(dict.fromkeys(ours)), "" if ours and all(map(matches, ours)) else "differs"]


def _judged(judge: Setting, card: Mapping[str, Any]) -> list[str]:
    if "judge" not in card:
        return ["judge", judge.text, "", "not asked: its columns are blank (config.judge)"]
    return _line("judge", judge.text, [card["judge"]["model"]], judge.matches)


def _missing(table: PaperTable, ran: Mapping[str, Any]) -> str:
    missing = [name for name in table.benchmarks if name not in ran]
    not_run = [name for name in missing if name in BENCHMARKS]
    groups = {"not run": not_run, "no benchmark here yet": [name for name in missing if name not in not_run]}
    return "; ".join(f"{reason}: {', '.join(names)}" for reason, names in groups.items() if names)
