"""A paper's table as data: its layout, its numbers, and the places of our numbers."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable, Mapping

from routerl_jax.core.registry import Registry
from routerl_jax.training.config import KnowledgeConfig

RECIPE = "recipe:"  # prefix of an agent: any row with the agent of this recipe, prompted or trained
NAMED = "row:"  # prefix of an agent: the entry KEY of config.rows, such as a trained run; `row:KEY:ROUTING` has another routing


@dataclasses.dataclass(frozen=True)
class Unit:
    """How a paper prints numbers: our number times `scale`, with `digits` decimals."""

    scale: float
    digits: int

    def printed(self, value: float) -> str:
        """A number in the paper's scale, as the paper prints it."""
        return f"{value:.{self.digits}f}"


SHARE, PERCENT, HUNDREDTHS, COUNT = Unit(1, 3), Unit(100, 1), Unit(100, 2), Unit(1, 2)


@dataclasses.dataclass(frozen=True)
class Column:
    """The content of a column.

    Attributes:
      benchmarks: its benchmarks. For several, the mean over them, or over all their questions if `pooled`.
      metric: a key of a row of results.json (comparison.results.row_results): `em`, `judge`, `search_ratio`, ..
      group: a part of the questions: key and value of a row's `by`, such as ("type", "single_hop"). None: all questions.
    """

    heading: str
    benchmarks: tuple[str, ...]
    metric: str
    unit: Unit = PERCENT
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
        (name, table.paper, ", ".join(_marked(table.benchmarks, existing)), ", ".join(table.keys), table.title)
        for name, table in ((name, PAPER_TABLES.get(name)) for name in PAPER_TABLES)
    ]


def columns(
    benchmarks: Mapping[str, str], metrics: Mapping[str, str], unit: Unit = PERCENT, mean: str = "", mean_of: str = ""
) -> tuple[Column, ...]:
    """Columns for every metric on every benchmark, followed by their means.

    Args:
      benchmarks, metrics: names by their headings in the table; see Column.
      mean: heading of the means; "": no means.
      mean_of: the only metric with a mean; "": all metrics have one.
    """
    single = (
        Column(f"{benchmark_heading} {heading}".strip(), (benchmark,), metric, unit)
        for benchmark_heading, benchmark in benchmarks.items()
        for heading, metric in metrics.items()
    )
    means = (
        Column(f"{mean} {heading}".strip(), tuple(benchmarks.values()), metric, unit)
        for heading, metric in metrics.items()
        if mean and mean_of in ("", metric)
    )
    return (*single, *means)


def _marked(names: Iterable[str], existing: Collection[str]) -> list[str]:
    return [name if name in existing else f"{name} (not yet)" for name in names]
