"""Tables of papers: their numbers (a TOML file for each paper), and their layout with our numbers in it."""

from __future__ import annotations

import dataclasses
import pathlib
import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from routerl_jax.core.registry import Registry
from routerl_jax.evaluation.metrics import answered
from routerl_jax.extras.comparison.benchmarks import BENCHMARKS
from routerl_jax.extras.comparison.document import Block, Heading, Paragraph, Table
from routerl_jax.training.config import KnowledgeConfig

RECIPE = "recipe:"  # prefix of an agent: any row with the agent of this recipe, prompted or trained
NAMED = "row:"  # prefix of an agent: the entry KEY of config.rows, such as a trained run; `row:KEY:ROUTING` has another routing
Results = Mapping[str, Any]  # content of results.json: `benchmarks` and `card`


@dataclasses.dataclass(frozen=True)
class Unit:
    """How a paper prints numbers: our number times `scale`, with `digits` decimals."""

    scale: float
    digits: int

    def printed(self, value: float) -> str:
        """A number in the paper's scale, as the paper prints it."""
        return f"{value:.{self.digits}f}"


UNITS = {"share": Unit(1, 3), "percent": Unit(100, 1), "hundredths": Unit(100, 2), "count": Unit(1, 2)}


@dataclasses.dataclass(frozen=True)
class Column:
    """The content of a column.

    Attributes:
      benchmarks: its benchmarks. For several, the mean over them, or over all their questions if `pooled`.
      metric: a key of a row of results.json (comparison.attempts.row_results): `em`, `judge`, `search_ratio`, ..
      group: a part of the questions: key and value of a row's `by`, such as ("type", "single_hop"). None: all questions.
    """

    heading: str
    benchmarks: tuple[str, ...]
    metric: str
    unit: Unit = UNITS["percent"]
    group: tuple[str, str] | None = None
    pooled: bool = False


@dataclasses.dataclass(frozen=True)
class Row:
    """A method, with its published numbers in the order of the columns.

    Attributes:
      group: the model, in the paper's words.
      agent: our agent for the method: a baseline, `recipe:NAME` or `row:KEY`; "" if there is none.
      published: the numbers as printed; None if the paper has none, or if the text at hand does not show which it is.
    """

    group: str
    method: str
    agent: str
    published: tuple[float | None, ...]


@dataclasses.dataclass(frozen=True)
class Setting:
    """A setting of the paper's numbers.

    Attributes:
      text: the setting in the paper's words.
      mark: a regular expression. If our name, in lower case, contains a match, the setting is the same. "": can't be compared.
    """

    text: str
    mark: str = ""

    def matches(self, name: str) -> bool:
        """True if our name stands for the same setting."""
        return bool(self.mark and re.search(self.mark, name.lower()))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaperTable:
    """A table of a paper.

    Attributes:
      policies: the models in the table.
      k, searches: documents per search, and most searches per question; 0 if the paper does not say.
      judge: the model that judges answers.
      knowledge: knowledge bases that replace those of all its benchmarks, as config.knowledge does.
      note: a remark for readers of the numbers.
    """

    title: str
    paper: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    policies: tuple[Setting, ...]
    corpus: Setting
    retriever: Setting
    questions: str
    k: int = 0
    searches: int = 0
    judge: Setting | None = None
    knowledge: Mapping[str, KnowledgeConfig] = dataclasses.field(default_factory=dict)
    note: str = ""

    @property
    def agents(self) -> tuple[str, ...]:
        """Our agents that config.rows need not name."""
        agents = (row.agent for row in self.rows if row.agent)
        return tuple(dict.fromkeys(agent for agent in agents if not agent.startswith((RECIPE, NAMED))))

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of config.rows that the table uses: `KEY` of agents `row:KEY`, and recipes."""
        agents = (row.agent for row in self.rows if row.agent.startswith((RECIPE, NAMED)))
        return tuple(dict.fromkeys(agent.split(":")[1] for agent in agents))

    @property
    def benchmarks(self) -> tuple[str, ...]:
        """All benchmarks, in the order of the columns."""
        return tuple(dict.fromkeys(name for column in self.columns for name in column.benchmarks))

    @property
    def metrics(self) -> tuple[str, ...]:
        """All metrics, in the order of the columns."""
        return tuple(dict.fromkeys(column.metric for column in self.columns))

    def added(self, rows: Mapping[str, str]) -> tuple[str, ...]:
        """The agents that config.rows adds to the table, each with the routing that its row asks for."""
        agents = (assigned_agent(row.agent, rows) for row in self.rows)
        return tuple(dict.fromkeys(agent for agent in agents if agent))


def assigned_agent(agent: str, rows: Mapping[str, str]) -> str:
    """The agent that config.rows puts in a row of a table; "" if there is none.

    Args:
      agent: the row's agent, such as `row:grpo:random_kb`: the agent of the key `grpo`, with that routing.
    """
    if not agent.startswith((RECIPE, NAMED)):
        return ""
    _, key, *routing = agent.split(":")
    return ":".join([rows[key], *routing]) if key in rows else ""


PAPER_TABLES: Registry[PaperTable] = Registry("table of a paper")


def listing(existing: Collection[str]) -> list[tuple[str, str, str, str, str]]:
    """(name, paper, benchmarks, keys of config.rows, title) of every table, sorted by name.

    Args:
      existing: benchmarks that exist here; others are marked.
    """
    return [
        (
            name,
            table.paper,
            ", ".join(name if name in existing else f"{name} (not yet)" for name in table.benchmarks),
            ", ".join(table.keys),
            table.title,
        )
        for name, table in ((name, PAPER_TABLES.get(name)) for name in PAPER_TABLES)
    ]


def _tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}


def _packaged(paper: str, file: Mapping[str, Any]) -> Iterator[tuple[str, PaperTable]]:
    """The tables of a paper's file, by name.

    `policies` has settings by the names that tables use. `common` has the fields of PaperTable that the tables share. Each
    further entry is a table, with what it has of its own: `rows` of group, method, agent and numbers ("" where there is none),
    and `columns`, one by one or as the arguments of `_columns`.
    """
    for key, fields in file.items():
        if not key.startswith("table"):
            continue
        fields = {**file["common"], **fields}
        given = fields.pop("columns")
        knowledge = fields.pop("knowledge", {})
        settings: dict[str, Any] = {
            name: Setting(**fields.pop(name)) for name in ("corpus", "retriever", "judge") if name in fields
        }
        yield (
            f"{paper}.{key}",
            PaperTable(
                title=f"{file['title']}, Table {key.removeprefix('table')}",
                paper=file["paper"],
                columns=_columns(**given)
                if isinstance(given, Mapping)
                else tuple(_column(**column) for column in given),
                rows=tuple(
                    Row(group, method, agent, tuple(None if number == "" else number for number in numbers))
                    for group, method, agent, *numbers in fields.pop("rows")
                ),
                policies=tuple(Setting(**file["policies"][name]) for name in fields.pop("policies")),
                knowledge={name: KnowledgeConfig(**_tuples(spec)) for name, spec in knowledge.items()},
                **settings,
                **fields,
            ),
        )


def _column(
    heading: str,
    benchmarks: Sequence[str],
    metric: str,
    unit: str = "percent",
    group: Sequence[str] = (),
    pooled: bool = False,
) -> Column:
    return Column(heading, tuple(benchmarks), metric, UNITS[unit], (group[0], group[1]) if group else None, pooled)


def _columns(
    benchmarks: Mapping[str, str],
    metrics: Mapping[str, str],
    unit: str = "percent",
    mean: str = "",
    mean_of: str = "",
    mean_first: bool = False,
) -> tuple[Column, ...]:
    """Columns for every metric on every benchmark, and their means.

    Args:
      benchmarks, metrics: names by their headings in the table; see Column.
      mean: heading of the means; "": no means.
      mean_of: the only metric with a mean; "": all metrics have one.
      mean_first: whether the means are before the other columns.
    """
    single = [
        _column(f"{benchmark_heading} {heading}".strip(), (benchmark,), metric, unit)
        for benchmark_heading, benchmark in benchmarks.items()
        for heading, metric in metrics.items()
    ]
    means = [
        _column(f"{mean} {heading}".strip(), tuple(benchmarks.values()), metric, unit)
        for heading, metric in metrics.items()
        if mean and mean_of in ("", metric)
    ]
    return (*means, *single) if mean_first else (*single, *means)


PAPERS: Mapping[str, Mapping[str, Any]] = {
    path.stem: tomllib.loads(path.read_text()) for path in sorted(pathlib.Path(__file__).parent.glob("*.toml"))
}
for _paper, _file in PAPERS.items():
    for _name, _table in _packaged(_paper, _file):
        PAPER_TABLES.register(_name)(_table)


def paper_blocks(table: PaperTable, results: Results) -> list[Block]:
    """The table with our numbers above the paper's (blank if not run), and a table of the differences in settings.

    Args:
      results: content of results.json, including the comparisons in `beside`.
    """
    headings = ["model", "method", *(column.heading for column in table.columns)]
    comparisons = {"": results, **results.get("beside", {})}
    methods = dict.fromkeys((row.method, row.agent) for row in table.rows)  # once, even if the paper has several models
    rows = [row for method, agent in methods for row in _our_rows(method, agent, table, comparisons)]
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


def _our_rows(method: str, agent: str, table: PaperTable, comparisons: Mapping[str, Results]) -> list[list[str]]:
    """Our rows of a method, or one blank row."""
    rows = [
        [
            _label(directory, _policies([row], compared)),
            method if name in (agent, f"{agent}_all") else f"{method}, {name}",
            *cells,
        ]
        for directory, compared in comparisons.items()
        for name, row in agent_rows(agent, compared).items()
        if any(cells := [_value(name, column, compared) for column in table.columns])
    ]
    blank = [_label("", _policies(_all_rows(comparisons[""]).values(), comparisons[""])), method]
    return rows or [[*blank, *[""] * len(table.columns)]]


def _label(directory: str, policies: list[str]) -> str:
    return f"here: {' and '.join(policies)}{directory and f', {directory}'}"


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
    """Our number of a row, as `evaluation.report.score_text` marks it; "" if any benchmark of the column was not run."""
    values, counts = [], []
    for benchmark in column.benchmarks:
        row = results["benchmarks"].get(benchmark, {}).get("rows", {}).get(name, {})
        if column.group:
            key, value = column.group
            row = row.get("by", {}).get(key, {}).get(value, {})
        if row.get(column.metric) is None:
            return ""
        values.append((row[column.metric], row["n"] if column.pooled else 1))
        counts.append(answered(row, column.metric))
    mean = sum(value * weight for value, weight in values) / sum(weight for _, weight in values)
    count, asked = map(sum, zip(*counts))
    text = _cell(column.unit.scale * mean, column) if all(number for number, _ in counts) else "-"
    return text if count == asked else f"{text}, {count} of {asked}"


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
    lines.append(["prompts", "its own", "in our own words (docs/evaluation.md#baselines)", "differs"])
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
