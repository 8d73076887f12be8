"""What a run or a comparison has measured of the methods in a paper's figure."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from routerl_jax.comparison.papers.layout import agent_rows
from routerl_jax.comparison.papers.table import RECIPE
from routerl_jax.core.files import read_json
from routerl_jax.evaluation.metrics import JUDGE
from routerl_jax.training.config import TrainConfig
from routerl_jax.training.load import load_config

Row = Mapping[str, Any]  # an agent's metrics on a benchmark: evaluation.metrics.summarize, of a comparison with `cost`
TEST = "The run's test questions"
_TRAINED = "Baselines have the trained policy's weights."


@dataclasses.dataclass(frozen=True)
class Method:
    """A method of a figure.

    Attributes:
      name: the method in the paper's words.
      agent: our agent for it, as papers.table.Row has it: `recipe:NAME`, `row:KEY` or `NAME:BASELINE`.
      settings: what config.agent.settings of a run's control must have for the control to be this method; {}: no control is.
    """

    name: str
    agent: str
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """What there is to draw.

    Attributes:
      benchmarks: rows by benchmark and method, in the order of the figure's methods.
      at_once: rows of vanilla RAG by benchmark and number of pages that are shown at once.
      about: what readers of the figure must know, such as whose weights the baselines have.
      missing: what else would have to be run, by what is missing (`seconds`, `at_once`).
    """

    benchmarks: Mapping[str, Mapping[str, Row]]
    at_once: Mapping[str, Mapping[int, Row]] = dataclasses.field(default_factory=dict)
    about: str = ""
    missing: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def metric(self) -> str:
        """The measure of answers: the judge's verdict if all rows have it, else EM."""
        rows = [row for found in (self.benchmarks, self.at_once) for by in found.values() for row in by.values()]
        return JUDGE if rows and all(JUDGE in row for row in rows) else "em"


def read_measured(directory: pathlib.Path, recipe: str, methods: Sequence[Method]) -> Measured:
    """The rows of methods in the directory of a run (launch.train) or of a comparison (launch.evaluate).

    Args:
      recipe: the recipe that the figure is about.

    Raises:
      ValueError: the directory has no results, or no method of the figure is among them; or the run has another recipe.
    """
    path = directory / "results.json"
    if not path.is_file():
        raise ValueError(f"{path} is not there: give the directory of a finished run, or --output of a comparison")
    results = read_json(path, "run the program that wrote it again")
    if "card" in results:
        measured = of_comparison(results, recipe, methods)
    else:
        config = load_config(directory)
        if config.recipe != recipe:
            raise ValueError(f"{directory} is a run of {config.recipe}, and the figure is about {recipe}")
        measured = of_run(results, config, methods)
    if not any(measured.benchmarks.values()):
        names = ", ".join(method.agent for method in methods)
        raise ValueError(f"{path} has no agent of this figure: {names}")
    return measured


def of_run(results: Mapping[str, Any], config: TrainConfig, methods: Sequence[Method]) -> Measured:
    """The rows of a run, of its baselines, and of its controls with the settings of a method."""
    agents, names = results["agents"], config.evaluation.names
    rows: dict[str, Row] = {}
    for method in methods:
        if method.agent.startswith(RECIPE):
            found = ["trained"]
        elif method.settings:
            found = [
                name
                for name, control in config.controls.items()
                if method.settings.items() <= control.agent.get("settings", {}).items()
            ]
        else:
            found = [method.agent.partition(":")[2]]
        labels = _labels(method, [name for name in (names.get(one, one) for one in found) if name in agents])
        rows |= {label: agents[name] for name, label in labels.items()}
    return Measured(
        benchmarks={TEST: rows},
        about=_TRAINED,
        missing={"seconds": "a run does not time its questions; a comparison does (launch.evaluate --agents=RUN,..)"},
    )


def of_comparison(results: Mapping[str, Any], recipe: str, methods: Sequence[Method]) -> Measured:
    """The rows of a comparison. A method that it lacks is taken from those in config.compare_with."""
    comparisons = [results, *results.get("beside", {}).values()]
    benchmarks: dict[str, dict[str, Row]] = {}
    at_once: dict[str, dict[int, Row]] = {}
    routed = False
    for method in methods:
        lacking = {name for compared in comparisons for name in compared["benchmarks"]}
        for compared in comparisons:
            found = _agents(method, recipe, methods, compared)
            for benchmark in [name for name in compared["benchmarks"] if name in lacking]:
                here = compared["benchmarks"][benchmark]["rows"]
                labels = _labels(method, [name for name in found if name in here])
                benchmarks.setdefault(benchmark, {}).update({label: here[name] for name, label in labels.items()})
                lacking -= {benchmark} if labels else set()
                routed |= any(here[name]["policy"].startswith("run-") for name in labels if ":" in name)
    for compared in comparisons:
        for benchmark, result in compared["benchmarks"].items():
            pages = {_pages(row): row for row in result["rows"].values() if _routing(row, recipe) == "vanilla_rag"}
            at_once[benchmark] = pages | at_once.get(benchmark, {})
    return Measured(
        benchmarks={name: rows for name, rows in benchmarks.items() if rows},
        at_once={name: dict(sorted(rows.items())) for name, rows in at_once.items() if rows},
        about=_TRAINED if routed else "",
        missing={"at_once": "vanilla RAG with several numbers of pages, each a comparison (config.compare_with)"},
    )


def _labels(method: Method, names: Sequence[str]) -> dict[str, str]:
    """A label for each of our rows of a method: the method, and if there are several, which row it is."""
    if len(names) < 2:
        return dict.fromkeys(names, method.name)
    short = [name.rstrip("/").rpartition("/")[2] for name in names]
    unique = len(set(short)) == len(short)
    return {name: f"{method.name}, {last if unique else name}" for name, last in zip(names, short)}


def _agents(method: Method, recipe: str, methods: Sequence[Method], results: Mapping[str, Any]) -> list[str]:
    """Names of a method's rows: those of the paper's table, else rows of the recipe with the method's settings or routing. So a
    trained policy as a baseline stands in for the prompted one."""
    rows = {name: row for result in results["benchmarks"].values() for name, row in result["rows"].items()}
    found = list(agent_rows(method.agent, results))
    if method.agent.startswith(RECIPE):
        others = [one.settings for one in methods if one.settings]
        return [name for name in found if not any(map(functools.partial(_set, rows[name]), others))]
    routing = "" if method.settings else method.agent.partition(":")[2]
    same = [name for name, row in rows.items() if _routing(row, recipe) == routing and _set(row, method.settings)]
    return found or same


def _routing(row: Row, recipe: str) -> str | None:
    """The routing of a row of a comparison, "" if it has none; None if it is of another agent."""
    about = row["agent"]
    return about.get("routing", "") if about.get("recipe") == recipe else None


def _set(row: Row, settings: Mapping[str, Any]) -> bool:
    return settings.items() <= {key: value for key, value in row["agent"]["fields"].items() if key in settings}.items()


def _pages(row: Row) -> int:
    """Pages that vanilla RAG shows at once."""
    fields = row["agent"]["fields"]
    searches = min(fields["max_turns"], fields.get("searches") or fields["max_turns"])
    return min(fields["k"], fields["pages"] * searches)
