"""Draws figures of papers by name, from the directory of a run or of a comparison, and from further runs."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from routerl_jax.core.config import naming
from routerl_jax.core.files import read_json
from routerl_jax.evaluation.figures import save_figure
from routerl_jax.evaluation.records import read_records
from routerl_jax.extras.comparison.agents import file_name
from routerl_jax.extras.comparison.papers import drawings
from routerl_jax.extras.comparison.papers.figure import (
    PAPER_FIGURES,
    TEST,
    Measured,
    Method,
    PaperFigure,
    Records,
    Row,
    labels_of,
)
from routerl_jax.extras.comparison.papers.table import NAMED, RECIPE, agent_rows
from routerl_jax.parallel.platform import split_cpu
from routerl_jax.training.config import TrainConfig
from routerl_jax.training.controls import control_directory
from routerl_jax.training.load import TRAINED, load_config, policy_records
from routerl_jax.training.loggers import read_metrics

PASSAGES = (1, 2, 3, 5)  # numbers of documents, or of pages, that a run's policy tries
QUESTIONS = 128  # that it tries them on
_TRAINED = "Baselines have the trained policy's weights."


def draw_figures(
    names: Sequence[str],
    directory: pathlib.Path | None,
    output: pathlib.Path,
    *,
    rows: Mapping[str, pathlib.Path] | None = None,
    ks: Sequence[int] = PASSAGES,
    limit: int = QUESTIONS,
) -> dict[str, pathlib.Path]:
    """Draws figures, each as NAME.png in `output`. The trials of a run's policy for it are in NAME.json.

    Args:
      names: names in extras.comparison.papers.figure.PAPER_FIGURES, such as r1_searcher.figure2.
      directory: directory of a run (launch.train) or of a comparison (launch.evaluate); None: only `rows` are drawn.
      rows: runs by the keys of a figure's methods. Of a comparison: its agents.
      ks: numbers of documents, or of pages, that a run's policy tries, for figures that need it.
      limit: questions of these trials; -1: all.

    Returns:
      The pictures by name.

    Raises:
      ValueError: there is no such figure, or what it needs was not run.
    """
    figures = {name: PAPER_FIGURES.get(name) for name in names}
    if directory is None and not rows:
        raise ValueError("a figure needs the directory of a run or of a comparison, or runs by its keys (--rows)")
    drawn: dict[str, pathlib.Path] = {}
    for name, figure in figures.items():
        with naming(name):
            measured = read_measured(directory, figure, rows)
        output.mkdir(parents=True, exist_ok=True)
        if figure.tries and directory and TEST in measured.benchmarks:
            trial_rows = _run_trials(directory, figure.tries, ks, limit)
            (output / f"{name}.json").write_text(json.dumps(trial_rows, indent=2) + "\n")
            tried = "at_once" if figure.tries == "pages" else "by_k"
            measured = dataclasses.replace(measured, **{tried: {TEST: trial_rows}})
        drawn[name] = output / f"{name}.png"
        save_figure(getattr(drawings, figure.draw)(measured), drawn[name])
    return drawn


def _run_trials(workdir: pathlib.Path, tries: str, ks: Sequence[int], limit: int) -> dict[int, Any]:
    """Results of a run's policy with other numbers of documents, or as vanilla RAG with other numbers of pages."""
    from routerl_jax.extras.analysis.trials import Trials  # heavy: the engine

    config = load_config(workdir)
    split_cpu(config.mesh.cpu_devices)
    trials = Trials(config, workdir, policy_records(config, workdir)[TRAINED], limit)
    if tries == "pages":
        return trials.pages_at_once(ks)
    return {int(k): row for k, row in trials.top_k(ks).items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _RunRow:
    """A row of a method in a run: its numbers, and the paths of its episodes and of its training, which need not exist."""

    name: str
    row: Row | None
    records: pathlib.Path
    trained_in: pathlib.Path | None = None


def read_measured(
    directory: pathlib.Path | None, figure: PaperFigure, rows: Mapping[str, pathlib.Path] | None = None
) -> Measured:
    """The rows of a figure's methods in the directory of a run (launch.train) or of a comparison (launch.evaluate), and in
    further runs.

    Args:
      rows: runs by the keys of methods (`row:KEY`), as config.rows of a comparison has them. Of a comparison: its agents.

    Raises:
      ValueError: a directory has no results, or no method of the figure is among them; or a run has another recipe; or no
        method has such a key.
    """
    rows = dict(rows or {})
    if unknown := next((key for key in rows if key not in figure.keys), None):
        known_keys = ", ".join(figure.keys) or "none"
        raise ValueError(f"no method of this figure is called {unknown!r}; those to be named are: {known_keys}")
    path = directory and directory / "results.json"
    results = read_json(path, "run the program that wrote it again") if path and path.is_file() else {}
    if "card" in results and directory:
        results = _naming(results, {key: str(path) for key, path in rows.items()})
        measured = of_comparison(results, figure, directory)
    else:
        runs = {key: _Run(path, figure) for key, path in rows.items()}
        measured = of_run(_Run(directory, figure) if directory else None, figure, runs)
    if not any((measured.training if figure.over_training else measured.benchmarks).values()):
        names = ", ".join(dict.fromkeys(method.agent for method in figure.methods))
        source = path if path and path.is_file() else directory or ", ".join(map(str, rows.values()))
        raise ValueError(f"{source} has no agent of this figure: {names}")
    return measured


class _Run:
    """The directory of a run.

    Raises:
      ValueError: it is none, it has not ended although the figure needs that, or it is of another recipe.
    """

    def __init__(self, directory: pathlib.Path, figure: PaperFigure) -> None:
        path = directory / "results.json"
        if not path.is_file() and not (figure.over_training and (directory / "metrics.jsonl").is_file()):
            raise ValueError(f"{path} is not there: give the directory of a finished run, or --output of a comparison")
        self.directory, self.config = directory, load_config(directory)
        if self.config.recipe != figure.recipe:
            raise ValueError(f"{directory} is a run of {self.config.recipe}, and the figure is about {figure.recipe}")
        self._agents = read_json(path, "run the program again")["agents"] if path.is_file() else {}

    def rows_of(self, method: Method) -> list[_RunRow]:
        """The rows of a method."""
        rows = [self.row_called(name) for name in _names_in_run(method, self.config)]
        return [row for row in rows if row.row is not None or (row.trained_in and read_metrics(row.trained_in))]

    def row_called(self, name: str) -> _RunRow:
        """The row of this name in the run: of its start, its trained policy, a baseline, or a control."""
        directory = control_directory(self.directory, name) if name in self.config.controls else self.directory
        file_stem = TRAINED if name in self.config.controls else name
        label = self.config.evaluation.names.get(name, name)
        return _RunRow(
            name=label,
            row=self._agents.get(label),
            records=directory / "evaluation" / f"{file_stem}.jsonl",
            trained_in=directory if file_stem == TRAINED else None,
        )


def of_run(main: _Run | None, figure: PaperFigure, runs: Mapping[str, _Run]) -> Measured:
    """The rows of a run, of its baselines and controls, and of further runs by the keys of methods."""
    rows_by_label: dict[str, _RunRow] = {}
    routed = False  # a row is the trained policy as a baseline, and the figure does not say so
    for method in figure.methods:
        method_rows = (
            [runs[method.key].row_called(TRAINED)] if method.key in runs else main.rows_of(method) if main else []
        )
        labels = _labels(method, [run_row.name for run_row in method_rows])
        rows_by_label |= {labels[run_row.name]: run_row for run_row in method_rows}
        routed |= any(not run_row.trained_in for run_row in method_rows) and not method.run
    drawn_directories = {run_row.trained_in for run_row in rows_by_label.values()}
    if main and main.directory not in drawn_directories and all(method.key for method in figure.methods):
        rows_by_label[main.directory.name] = main.row_called(TRAINED)
    rows = {label: run_row.row for label, run_row in rows_by_label.items() if run_row.row is not None}
    return Measured(
        methods=figure.methods,
        benchmarks={TEST: rows} if rows else {},
        records={TEST: _records({label: rows_by_label[label].records for label in rows})} if figure.records else {},
        training=_training({label: run_row.trained_in for label, run_row in rows_by_label.items()}),
        about=_TRAINED if routed else "",
        missing={
            "seconds": "a run does not time its questions; a comparison does (launch.evaluate --agents=RUN,..)",
            "by_k": "other numbers of documents were not tried (--top_k)",
        },
        absent=_absent(figure.methods, rows_by_label),
    )


def of_comparison(
    results: Mapping[str, Any], figure: PaperFigure, directory: pathlib.Path = pathlib.Path()
) -> Measured:
    """The rows of a comparison. A method that it lacks is taken from those in config.compare_with.

    Args:
      directory: directory of the comparison, for its episodes.
    """
    recipe, methods = figure.recipe, figure.methods
    comparisons = {str(directory): results, **results.get("beside", {})}
    benchmarks: dict[str, dict[str, Row]] = {}
    episode_files: dict[str, dict[str, pathlib.Path]] = {}
    at_once: dict[str, dict[int, Row]] = {}
    by_k: dict[str, dict[int, Row]] = {}
    training: dict[str, pathlib.Path] = {}
    routed = False
    for method in methods:
        lacking = {name for compared in comparisons.values() for name in compared["benchmarks"]}
        for source, compared in comparisons.items():
            names = _agents(method, recipe, methods, compared)
            if not names and method.other:
                other = dataclasses.replace(method, agent=method.other)
                names = _agents(other, recipe, methods, compared)
            for benchmark in [name for name in compared["benchmarks"] if name in lacking]:
                rows = compared["benchmarks"][benchmark]["rows"]
                our_rows = {name: row for name, row in rows.items() if row.get("n_answered", 1)}  # with any reply
                labels = _labels(method, [name for name in names if name in our_rows])
                benchmarks.setdefault(benchmark, {}).update({label: our_rows[name] for name, label in labels.items()})
                episodes = pathlib.Path(source).expanduser() / "episodes" / file_name(benchmark)
                paths = {label: episodes / f"{file_name(name)}.jsonl" for name, label in labels.items()}
                episode_files.setdefault(benchmark, {}).update(paths)
                lacking -= {benchmark} if labels else set()
                runs = {label: name for name, label in labels.items() if our_rows[name]["policy"].startswith("run-")}
                training |= {label: pathlib.Path(name) for label, name in runs.items() if ":" not in name}
                routed |= any(":" in name for name in runs.values()) and not method.agent.startswith(RECIPE)
    for compared in comparisons.values():
        for benchmark, result in compared["benchmarks"].items():
            vanilla = [row for row in result["rows"].values() if _routing(row, recipe) == "vanilla_rag"]
            pages = {_pages(row): row for row in vanilla if "pages" in row["agent"]["fields"]}
            at_once[benchmark] = pages | at_once.get(benchmark, {})
            unrouted = [row for row in result["rows"].values() if _routing(row, recipe) == ""]
            if unrouted and compared["card"].get("k"):
                by_k.setdefault(benchmark, {}).setdefault(compared["card"]["k"], unrouted[-1])
    benchmarks = {name: rows for name, rows in benchmarks.items() if rows}
    return Measured(
        methods=methods,
        benchmarks=benchmarks,
        records={name: _records(episode_files[name]) for name in benchmarks} if figure.records else {},
        training=_training(training),
        at_once={name: dict(sorted(rows.items())) for name, rows in at_once.items() if rows},
        by_k={name: dict(sorted(rows.items())) for name, rows in by_k.items()},
        comparisons=comparisons,
        about=_TRAINED if routed else "",
        missing={
            "at_once": "vanilla RAG with several numbers of pages, each a comparison (config.compare_with)",
            "by_k": "several numbers of documents, each a comparison with config.k (config.compare_with)",
        },
        absent=_absent(methods, {label for rows in benchmarks.values() for label in rows}),
    )


def _names_in_run(method: Method, config: TrainConfig) -> list[str]:
    """The names of a method in a run."""
    if method.run:
        return [name for name in method.run if name not in config.controls or not method.settings]
    if method.agent.startswith(RECIPE):
        return [TRAINED] if method.agent == f"{RECIPE}{config.recipe}" else []
    if method.settings:
        return [
            name
            for name, control in config.controls.items()
            if method.settings.items() <= control.agent.get("settings", {}).items()
        ]
    return [method.agent.partition(":")[2]]


def _absent(methods: Sequence[Method], labels: Iterable[str]) -> dict[str, str]:
    labels = list(labels)
    return {
        method.name: f"row {method.key}" if method.key else method.agent.replace(RECIPE, "recipe ")
        for method in methods
        if not any(labels_of(method.name, labels))
    }


def _records(paths: Mapping[str, pathlib.Path]) -> dict[str, Records]:
    """Records by label; labels without a file are left out."""
    return {label: list(read_records(path)) for label, path in paths.items() if path.is_file()}


def _training(directories: Mapping[str, pathlib.Path | None]) -> dict[str, Records]:
    """Metrics of training by label; supervised runs and runs that are not at hand are left out."""
    read = {label: read_metrics(path) for label, path in directories.items() if path and path.is_dir()}
    return {label: rows for label, rows in read.items() if any("reward/total" in row for row in rows)}


def _naming(results: Mapping[str, Any], rows: Mapping[str, str]) -> dict[str, Any]:
    """The results of a comparison and of those beside it, as if config.rows had named these agents."""
    named = {**results, "card": {**results["card"], "rows": {**results["card"].get("rows", {}), **rows}}}
    beside = {directory: _naming(compared, rows) for directory, compared in results.get("beside", {}).items()}
    return {**named, "beside": beside} if beside else named


def _labels(method: Method, names: Sequence[str]) -> dict[str, str]:
    """A label for each of our rows of a method: the method, and if there are several, which row it is."""
    if len(names) < 2:
        return dict.fromkeys(names, method.name)
    short = [name.rstrip("/").rpartition("/")[2] for name in names]
    unique = len(set(short)) == len(short)
    return {name: f"{method.name}, {last if unique else name}" for name, last in zip(names, short)}


def _agents(method: Method, recipe: str, methods: Sequence[Method], results: Mapping[str, Any]) -> list[str]:
    """Names of a method's rows: the rows of the paper's table, else rows of the recipe with the method's settings or routing.

    So a trained policy as a baseline replaces the prompted one, if the figure has no method for it.
    """
    rows = {name: row for result in results["benchmarks"].values() for name, row in result["rows"].items()}
    others = [other for other in methods if other.name != method.name]
    prompted = {other.agent for other in others if not other.agent.startswith((RECIPE, NAMED))}
    if method.agent.startswith(RECIPE):
        _, recipe_name, *routing = method.agent.split(":")
        own_rows = agent_rows(method.agent, results)
        if routing:
            own_rows = {name: row for name, row in rows.items() if _routing(row, recipe_name) == routing[0]}
        settings = [other.settings for other in others if other.settings]
        names = [name for name in own_rows if not any(map(functools.partial(_has_settings, rows[name]), settings))]
        return [name for name in names if name not in prompted]
    own_rows = list(agent_rows(method.agent, results))
    routing = "" if method.settings else method.agent.partition(":")[2]
    if f"{RECIPE}{recipe}:{routing}" in {other.agent for other in others}:
        return own_rows
    same = [
        name for name, row in rows.items() if _routing(row, recipe) == routing and _has_settings(row, method.settings)
    ]
    return own_rows or ([] if not routing and not method.settings else same)


def _routing(row: Row, recipe: str) -> str | None:
    """The routing of a row of a comparison, "" if it has none; None if it is of another agent."""
    about = row["agent"]
    return about.get("routing", "") if about.get("recipe") == recipe else None


def _has_settings(row: Row, settings: Mapping[str, Any]) -> bool:
    return settings.items() <= {key: value for key, value in row["agent"]["fields"].items() if key in settings}.items()


def _pages(row: Row) -> int:
    """Pages that vanilla RAG shows at once."""
    fields = row["agent"]["fields"]
    searches = min(fields["max_turns"], fields.get("searches") or fields["max_turns"])
    return min(fields["k"], fields["pages"] * searches)
