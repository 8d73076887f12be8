"""Figures of a comparison: the metrics of all agents, and quality against cost."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from routerl_jax.evaluation.figures import color_of, dots, new_figure, panels_of, save_figure
from routerl_jax.evaluation.report import heading

_MARKS = "osD^vP*X<>"


def metric_figure(benchmarks: Mapping[str, Any], metrics: Sequence[str], path: pathlib.Path) -> None:
    """Writes a PNG with a panel per benchmark: every metric of every agent, with its interval."""
    path.parent.mkdir(parents=True, exist_ok=True)
    agents = list(dict.fromkeys(name for results in benchmarks.values() for name in results["rows"]))
    columns = min(len(benchmarks), 3)
    lines = -(-len(benchmarks) // columns)
    width = 1.2 + max(4.0, 10.8 / columns) * columns
    figure = new_figure((min(width, 12.0), lines * (1.1 + 0.36 * len(agents))))
    panels = panels_of(figure, lines, columns)
    for axis, (name, results) in zip(panels, benchmarks.items()):
        rows = [results["rows"].get(agent, {}) for agent in agents]
        series = [
            (heading(metric).removesuffix(" %"), [_measured(row, metric) for row in rows])
            for metric in metrics
            if any(metric in row for row in rows)
        ]
        dots(axis, series, agents)
        axis.set(title=f"{name} (n={results['n']})", xlabel="%")
    for i, axis in enumerate(panels):
        if i >= len(benchmarks):
            axis.remove()
        elif i % columns:
            axis.set_yticklabels([])
    marks = {label: mark for axis in panels for mark, label in zip(*axis.get_legend_handles_labels())}
    figure.legend(marks.values(), marks, loc="outside upper left", frameon=False, fontsize=8, ncols=len(marks))
    save_figure(figure, path)


def _measured(row: Mapping[str, Any], metric: str) -> tuple[float, float, float] | None:
    return (row[metric], *row[f"{metric}_interval"]) if metric in row else None


def cost_figure(benchmarks: Mapping[str, Any], metric: str, path: pathlib.Path) -> None:
    """Writes a PNG with two panels per benchmark: a metric with its interval, by number of searches and by number of tokens."""
    from matplotlib.ticker import LogLocator

    path.parent.mkdir(parents=True, exist_ok=True)
    agents = list(dict.fromkeys(name for results in benchmarks.values() for name in results["rows"]))
    columns = -(-len(agents) // 24)
    figure = new_figure((9.2 + 2.6 * columns, 3.3 * len(benchmarks) + 0.2))
    axes = panels_of(figure, len(benchmarks), 2)
    for i, (name, results) in enumerate(benchmarks.items()):
        searches, tokens = axes[2 * i : 2 * i + 2]
        for agent, row in results["rows"].items():
            if metric not in row:  # no verdict of the judge counts
                continue
            number, cost = agents.index(agent), row["cost"]
            low, value, high = (
                100 * part for part in (row[f"{metric}_interval"][0], row[metric], row[f"{metric}_interval"][1])
            )
            bar = [[max(value - low, 0)], [max(high - value, 0)]]
            style = {
                "fmt": _MARKS[(number // 6) % len(_MARKS)],
                "color": color_of(number),
                "markersize": 7,
                "elinewidth": 1,
                "capsize": 2,
                "alpha": 0.9,
            }
            searches.errorbar([sum(cost["searches"].values())], [value], yerr=bar, label=agent, **style)
            tokens.errorbar([max(cost["read"] + cost["written"], 1)], [value], yerr=bar, **style)
        tokens.set_xscale("log")
        tokens.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))  # the usual labels, 2 x 10^1, lie over each other
        tokens.xaxis.set_major_formatter("{x:,.0f}")
        tokens.xaxis.set_minor_formatter("")
        searches.set(title=name, ylabel=heading(metric), xlabel="searches of a question")
        tokens.set(title=name, xlabel="tokens of a question, read and written")
        for axis in (searches, tokens):
            axis.set_ylim(bottom=-0.04 * max(axis.get_ylim()[1], 1))  # so that marks at 0 are not cut off
    marks = {label: mark for axis in axes for mark, label in zip(*axis.get_legend_handles_labels())}
    labelled = [agent for agent in agents if agent in marks]
    figure.legend(
        [marks[a] for a in labelled], labelled, loc="outside right upper", frameon=False, fontsize=8, ncols=columns
    )
    save_figure(figure, path)
