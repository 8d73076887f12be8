"""Measurements of the methods in a paper's figure, from runs and comparisons."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from routerl_jax.evaluation.metrics import JUDGE
from routerl_jax.extras.comparison.papers.table import NAMED

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """The data of a figure.

    Attributes:
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
        rows = [
            row
            for by_benchmark in (self.benchmarks, self.at_once)
            for by_label in by_benchmark.values()
            for row in by_label.values()
        ]
        return JUDGE if rows and all(JUDGE in row for row in rows) else "em"

    @property
    def caption(self) -> str:
        """The text over the figure: `about`, and what was not run."""
        lacking = "; ".join(f"{name} ({how})" for name, how in self.absent.items())
        return " ".join(text for text in (self.about, lacking and f"Not run: {lacking}.") if text)


def labels_of(method: Method, labels: Iterable[str]) -> Iterator[str]:
    """The labels that are of a method: its name, or its name and which row it is."""
    return (label for label in labels if label == method.name or label.startswith(f"{method.name}, "))
