"""Figures of papers: what each shows, of which methods, and what it needs (a TOML file for each paper); and its data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from routerl_jax.core.registry import Registry
from routerl_jax.evaluation.metrics import JUDGE
from routerl_jax.extras.comparison.papers.table import NAMED, PAPERS

Row = Mapping[str, Any]  # an agent's metrics on a benchmark: evaluation.metrics.summarize, of a comparison with `cost`
Records = Sequence[dict[str, Any]]
TEST = "The run's test questions"


@dataclasses.dataclass(frozen=True)
class Method:
    """A method of a figure.

    Attributes:
      name: the method in the paper's words.
      agent: our agent for it, as papers.table.Row has it: `recipe:NAME`, `row:KEY` or `NAME:BASELINE`; and
        `recipe:NAME:BASELINE`, a trained policy as that baseline.
      settings: the config.agent.settings by which a run's control is this method; {}: no control is.
      run: names of this method in a run: `warm_start`, `trained`, a baseline, or a control. (): as `agent` says.
      other: the agent that replaces `agent` in a comparison without a row of `agent`; "": none does.
      group: the method's part of the figure, such as a size of models.
    """

    name: str
    agent: str
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    run: tuple[str, ...] = ()
    other: str = ""
    group: str = ""

    @property
    def key(self) -> str:
        """The key of config.rows and --rows that names runs of this method; "" if there is none."""
        return self.agent.split(":")[1] if self.agent.startswith(NAMED) else ""


def labels_of(name: str, labels: Iterable[str]) -> Iterator[str]:
    """The labels that are of a method: its name, or its name and which row it is."""
    return (label for label in labels if label == name or label.startswith(f"{name}, "))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaperFigure:
    """A figure of a paper, with values that are measured here (launch.analyze --figures).

    Attributes:
      recipe: the recipe that the figure is about.
      shows: what the figure plots.
      needs: what must have been run for all of it.
      methods: the methods in it.
      draw: name of the function that draws it (papers.drawings).
      tries: trials of a run (extras.analysis.trials) before the figure is drawn: vanilla RAG with other numbers of `pages` at
        once, or the policy with other numbers of `documents` of a search.
      over_training: the figure needs only the metrics of training. A run need not have ended.
      records: the figure needs the episode records.
    """

    title: str
    paper: str
    recipe: str
    shows: str
    needs: str
    methods: tuple[Method, ...]
    draw: str
    tries: Literal["", "pages", "documents"] = ""
    over_training: bool = False
    records: bool = False

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of --rows that the figure uses."""
        return tuple(dict.fromkeys(method.key for method in self.methods if method.key))


PAPER_FIGURES: Registry[PaperFigure] = Registry("figure of a paper")
FIGURE_HEADINGS = ("name", "paper", "shows", "needs", "runs to be named (--rows)")

# In a paper's file, `methods` has lists of methods by the names that figures use, and each entry figureNUMBER is a figure.
for _paper, _file in PAPERS.items():
    for _key, _fields in _file.items():
        if _key.startswith("figure"):
            _methods = [
                {**method, "run": tuple(method.get("run", ()))} for method in _file["methods"][_fields["methods"]]
            ]
            _figure = PaperFigure(
                title=f"{_file['title']}, Figure {_key.removeprefix('figure')}",
                paper=_file["paper"],
                recipe=_paper,
                **{**_fields, "methods": tuple(Method(**method) for method in _methods)},
            )
            PAPER_FIGURES.register(f"{_paper}.{_key}")(_figure)


def listing() -> list[tuple[str, str, str, str, str]]:
    """(name, paper, what it shows, what it needs, keys of --rows) of every figure, sorted by name."""
    figures = [(name, PAPER_FIGURES.get(name)) for name in PAPER_FIGURES]
    return [(name, figure.paper, figure.shows, figure.needs, ", ".join(figure.keys)) for name, figure in figures]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """The data of a figure.

    Attributes:
      methods: the figure's methods.
      benchmarks: rows by benchmark and method, in the order of the figure's methods.
      records: the episode records of these rows, if the figure needs them.
      training: rows of metrics.jsonl by method, of methods that are runs; of other runs by the names of their directories.
      at_once: rows of vanilla RAG by benchmark and number of pages that are shown at once.
      by_k: rows of the figure's recipe by benchmark and number of documents of a search.
      comparisons: content of results.json by directory, of the comparison and of those in config.compare_with.
      about: a note for readers of the figure, such as whose weights the baselines have.
      missing: how to measure the data that are missing, by their kind (`seconds`, `at_once`, `by_k`).
      absent: how to run the methods that were not run, by method.
    """

    methods: tuple[Method, ...] = ()
    benchmarks: Mapping[str, Mapping[str, Row]] = dataclasses.field(default_factory=dict)
    records: Mapping[str, Mapping[str, Records]] = dataclasses.field(default_factory=dict)
    training: Mapping[str, Records] = dataclasses.field(default_factory=dict)
    at_once: Mapping[str, Mapping[int, Row]] = dataclasses.field(default_factory=dict)
    by_k: Mapping[str, Mapping[int, Row]] = dataclasses.field(default_factory=dict)
    comparisons: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    about: str = ""
    missing: Mapping[str, str] = dataclasses.field(default_factory=dict)
    absent: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def metric(self) -> str:
        """The measure of answers: the judge's verdict if all rows have it, else EM."""
        by_benchmark = [*self.benchmarks.values(), *self.at_once.values()]
        rows = [row for by_label in by_benchmark for row in by_label.values()]
        return JUDGE if rows and all(JUDGE in row for row in rows) else "em"

    @property
    def caption(self) -> str:
        """The text over the figure: `about`, and what was not run."""
        lacking = "; ".join(f"{name} ({how})" for name, how in self.absent.items())
        return " ".join(text for text in (self.about, lacking and f"Not run: {lacking}.") if text)
