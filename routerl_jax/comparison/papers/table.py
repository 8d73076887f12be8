"""A table of a paper, as data: its layout, its numbers, and which of ours belong where."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable, Mapping

from routerl_jax.core.registry import Registry
from routerl_jax.training.config import KnowledgeConfig

RECIPE = "recipe:"  # before an agent: whatever row works as the agent of this recipe, prompted or trained
NAMED = "row:"  # before an agent: what config.rows names so, such as a trained run; `row:KEY:ROUTING` is it with other routing


@dataclasses.dataclass(frozen=True)
class Unit:
    """How a paper prints numbers: ours times `scale`, with so many digits."""

    scale: float
    digits: int

    def printed(self, value: float) -> str:
        """A number of the paper's, as it prints them."""
        return f"{value:.{self.digits}f}"


SHARE, PERCENT, HUNDREDTHS, COUNT = Unit(1, 3), Unit(100, 1), Unit(100, 2), Unit(1, 2)


@dataclasses.dataclass(frozen=True)
class Column:
    """What a column has.

    Attributes:
      benchmarks: on which; of several, the mean over them, or over all their questions if `pooled`.
      metric: a key of a row of results.json (comparison.results.row_results): `em`, `judge`, `search_ratio`, ..
      group: of which of their questions alone: key and value of a row's `by`, such as ("type", "single_hop").
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
      group: the model, as the paper calls it.
      agent: which of ours does it, `recipe:NAME` or `row:KEY`; "" for none.
      published: as the paper prints them; None where it has none, or where the text at hand does not tell which it is.
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
      mark: a regular expression that is found in a name of ours, in lower case, if it is the same; "" if that can't be told.
    """

    said: str
    mark: str = ""

    def matches(self, name: str) -> bool:
        """Whether a name of ours is the same."""
        return bool(self.mark and re.search(self.mark, name.lower()))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaperTable:
    """A table of a paper.

    Attributes:
      policies: models that it has.
      k, searches: documents of a search, and most searches of a question; 0 where the paper does not say.
      judge: the model whose verdicts it has.
      knowledge: knowledge bases of all its benchmarks in the place of their own, as config.knowledge.
      note: what a reader should know of its numbers.
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
        """Ours that need no naming: baselines, and prompted recipes."""
        agents = (row.agent for row in self.rows if row.agent)
        return tuple(dict.fromkeys(agent for agent in agents if not agent.startswith((RECIPE, NAMED))))

    @property
    def keys(self) -> tuple[str, ...]:
        """What config.rows can name: rows of trained runs and others of which there are several, and recipes."""
        agents = (row.agent for row in self.rows if row.agent.startswith((RECIPE, NAMED)))
        return tuple(dict.fromkeys(agent.split(":")[1] for agent in agents))

    @property
    def benchmarks(self) -> tuple[str, ...]:
        """In the order of the columns."""
        return tuple(dict.fromkeys(name for column in self.columns for name in column.benchmarks))

    @property
    def metrics(self) -> tuple[str, ...]:
        """In the order of the columns."""
        return tuple(dict.fromkeys(column.metric for column in self.columns))

    def added(self, rows: Mapping[str, str]) -> tuple[str, ...]:
        """The agents that config.rows adds to it: each as it is, and with the routing that the table asks of it."""
        found = (named(row.agent, rows) for row in self.rows)
        return tuple(dict.fromkeys(agent for agent in found if agent))


def named(agent: str, rows: Mapping[str, str]) -> str:
    """What config.rows puts in a row of a table, "" if nothing.

    Args:
      agent: the row's, such as `row:grpo:random_kb`, which is whatever `grpo` names with that routing.
    """
    if not agent.startswith((RECIPE, NAMED)):
        return ""
    _, key, *routing = agent.split(":")
    return ":".join([rows[key], *routing]) if key in rows else ""


PAPER_TABLES: Registry[PaperTable] = Registry("table of a paper")


def listing(known: Collection[str]) -> list[tuple[str, str, str, str, str]]:
    """(name, paper, benchmarks, names that config.rows can give, title) of every table, sorted by name.

    Args:
      known: benchmarks that there are; others are marked.
    """
    return [
        (name, table.paper, ", ".join(_marked(table.benchmarks, known)), ", ".join(table.keys), table.title)
        for name, table in ((name, PAPER_TABLES.get(name)) for name in PAPER_TABLES)
    ]


def columns(
    benchmarks: Mapping[str, str], metrics: Mapping[str, str], unit: Unit = PERCENT, mean: str = "", of: str = ""
) -> tuple[Column, ...]:
    """Every metric on every benchmark, by heading, and then their means.

    Args:
      mean: heading of the means; "": there are none.
      of: the metric that there is a mean of alone; "": all.
    """
    single = (
        Column(f"{said} {heading}".strip(), (benchmark,), metric, unit)
        for said, benchmark in benchmarks.items()
        for heading, metric in metrics.items()
    )
    means = (
        Column(f"{mean} {heading}".strip(), tuple(benchmarks.values()), metric, unit)
        for heading, metric in metrics.items()
        if mean and of in ("", metric)
    )
    return (*single, *means)


def _marked(names: Iterable[str], known: Collection[str]) -> list[str]:
    return [name if name in known else f"{name} (not yet)" for name in names]
