"""Draws figures of papers by name, from the directory of a run or of a comparison."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from routerl_jax.core.config import naming
from routerl_jax.evaluation.figures import save_figure
from routerl_jax.extras.comparison.papers.known import PAPER_FIGURES
from routerl_jax.extras.comparison.papers.measured import TEST, Measured
from routerl_jax.extras.comparison.papers.reading import read_measured
from routerl_jax.parallel.platform import split_cpu

PASSAGES = (1, 2, 3, 5)  # numbers of documents, or of pages, that a run's policy tries
QUESTIONS = 128  # that it tries them on


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
      names: names in comparison.papers.known.PAPER_FIGURES, such as r1_searcher.figure2.
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
        drawing = figure.drawing
        with naming(name):
            measured = read_measured(
                directory,
                drawing.recipe,
                drawing.methods,
                rows,
                over_training=drawing.over_training,
                with_records=drawing.records,
            )
        output.mkdir(parents=True, exist_ok=True)
        if drawing.tries and directory and TEST in measured.benchmarks:
            trial_rows = _run_trials(directory, drawing.tries, ks, limit)
            (output / f"{name}.json").write_text(json.dumps(trial_rows, indent=2) + "\n")
            measured = _with_trials(measured, drawing.tries, trial_rows)
        drawn[name] = output / f"{name}.png"
        save_figure(drawing.draw(measured), drawn[name])
    return drawn


def _with_trials(measured: Measured, tries: str, trial_rows: Mapping[int, Any]) -> Measured:
    results = {TEST: trial_rows}
    return dataclasses.replace(measured, **({"at_once": results} if tries == "pages" else {"by_k": results}))


def _run_trials(workdir: pathlib.Path, tries: str, ks: Sequence[int], limit: int) -> dict[int, Any]:
    """Results of a run's policy with other numbers of documents, or as vanilla RAG with other numbers of pages."""
    from routerl_jax.extras.analysis.trials import Trials
    from routerl_jax.training import load

    config = load.load_config(workdir)
    split_cpu(config.mesh.cpu_devices)
    trials = Trials(config, workdir, load.policy_records(config, workdir)[load.TRAINED], limit)
    if tries == "pages":
        return trials.pages_at_once(ks)
    return {int(k): row for k, row in trials.top_k(ks).items()}
