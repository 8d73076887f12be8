"""Draws RouteRAG's figures 2 to 5 (Guo et al., arXiv 2512.09487). The layout follows captions and text of the paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from routerl_jax.evaluation.figures import color_of, legend
from routerl_jax.extras.comparison.papers.figure import (
    A_RUN,
    COMPARED,
    Measured,
    Method,
    bars,
    behaviours,
    labels_of,
    legend_below,
    missing,
    panels,
    paper_figure,
    parts,
)

_HERE = "another size"
EFFICIENCY = (
    Method("RouteRAG-3B", "row:routerag_3b", group="3B"),
    Method("RouteRAG-3B w/o efficiency reward", "row:no_efficiency_3b", group="3B"),
    Method("RouteRAG-7B", "row:routerag_7b", group="7B"),
    Method("RouteRAG-7B w/o efficiency reward", "row:no_efficiency_7b", group="7B"),
    Method("RouteRAG", "row:routerag", run=("trained",), other="recipe:routerag", group=_HERE),
    Method("w/o efficiency reward", "row:no_efficiency", run=("stage1_only",), group=_HERE),
)
DEPTH = (
    Method("RouteRAG-3B, before", "row:before_3b", group="3B"),
    Method("RouteRAG-3B, after", "row:routerag_3b", group="3B"),
    Method("RouteRAG-7B, before", "row:before_7b", group="7B"),
    Method("RouteRAG-7B, after", "row:routerag_7b", group="7B"),
    Method("before", "routerag", run=("warm_start",), group=_HERE),
    Method("after", "row:routerag", run=("trained",), other="recipe:routerag", group=_HERE),
)
SYSTEMS = (
    Method("RouteRAG", "recipe:routerag"),
    Method("Search-R1", "recipe:search_r1"),
    Method("R1-Searcher", "recipe:r1_searcher"),
)
_AVERAGES = {"3B": "2.43 with, 2.51 without", "7B": "2.25 with, 2.70 without"}  # table 4
_SYSTEM_METRICS = {
    "f1": ("F1", "{:.2f}"),
    "tokens": ("Response length, tokens", "{:.0f}"),
    "turns": ("Turns", "{:.2f}"),
}
_BY_K = {"em": "EM", "f1": "F1", "searches_per_question": "Retrieval turns"}


@paper_figure(
    "routerag",
    2,
    shows="retrieval turns with and without the efficiency reward, by benchmark",
    needs=f"{COMPARED} with the runs of table 3, or {A_RUN} with a control stage1_only",
    methods=EFFICIENCY,
)
def retrieval_turns(measured: Measured) -> Any:
    """Figure 2: searches of a question with and without the efficiency reward, for each size of models."""
    values = {
        name: {label: row["searches_per_question"] for label, row in rows.items()}
        for name, rows in parts(measured, ("searches_per_question",)).items()
    }
    notes = {size: f"; the paper's averages are {averages} (table 4)" for size, averages in _AVERAGES.items()}
    return _by_size(measured, values, EFFICIENCY, "retrieval turns of a question", notes)


@paper_figure(
    "routerag",
    3,
    shows="reasoning steps before and after training, by benchmark",
    needs=f"{COMPARED} with prompted (routerag) and trained policies, or {A_RUN}",
    methods=DEPTH,
    records=True,
)
def depth(measured: Measured) -> Any:
    """Figure 3: turns of a question before and after training, for each size of models."""
    values = {name: {label: row["turns"] for label, row in rows.items()} for name, rows in behaviours(measured).items()}
    return _by_size(measured, values, DEPTH, "turns of a question", {})


@paper_figure(
    "routerag",
    4,
    shows="F1, response tokens and turns of RouteRAG, Search-R1 and R1-Searcher, by benchmark",
    needs=f"{COMPARED} with these agents, as table 1's",
    methods=SYSTEMS,
    records=True,
)
def systems(measured: Measured) -> Any:
    """Figure 4: F1, sampled tokens and turns of several systems on every benchmark."""
    by_part = behaviours(measured)
    figure, axes = panels(len(_SYSTEM_METRICS), measured.caption)
    for axis, (metric, (title, label_format)) in zip(axes, _SYSTEM_METRICS.items()):
        values = {name: {label: row[metric] for label, row in rows.items()} for name, rows in by_part.items()}
        bars(axis, values, SYSTEMS, label_format, with_legend=False)
        axis.set(title=title)
    legend_below(figure, axes)
    return figure


@paper_figure(
    "routerag",
    5,
    shows="EM, F1 and retrieval turns by the number of documents of a search",
    needs=f"{A_RUN}, whose policy answers --limit questions with each of --top_k documents; or a {COMPARED} for each config.k, "
    "joined by config.compare_with",
    methods=(Method("RouteRAG", "recipe:routerag"),),
    tries="documents",
)
def documents(measured: Measured) -> Any:
    """Figure 5: EM, F1 and retrieval turns by the number of documents of a search, a line per benchmark."""
    figure, axes = panels(len(_BY_K), measured.caption)
    for axis, (metric, title) in zip(axes, _BY_K.items()):
        lines = {
            name: {k: value for k, row in rows.items() if (value := _metric_of(row, metric)) is not None}
            for name, rows in measured.by_k.items()
        }
        lines = {name: line for name, line in lines.items() if len(line) > 1}
        if not lines:
            missing(axis, title, measured.missing.get("by_k", "other numbers of documents were not tried"))
            continue
        for i, (name, line) in enumerate(lines.items()):
            axis.plot(list(line), list(line.values()), "o-", color=color_of(i), label=name)
        axis.set_xticks(sorted({k for line in lines.values() for k in line}))
        top = max(value for line in lines.values() for value in line.values())
        axis.set(title=title, xlabel="documents of a search", ylim=(0, 1.12 * max(top, 0.1)))
        legend(axis)
    return figure


def _metric_of(row: Mapping[str, Any], metric: str) -> float | None:
    """A metric of a row, which may be of extras.analysis.numbers.behaviour."""
    return row.get(metric, row.get("searches") if metric == "searches_per_question" else None)


def _by_size(
    measured: Measured,
    values: Mapping[str, Mapping[str, float]],
    methods: Sequence[Method],
    label: str,
    notes: Mapping[str, str],
) -> Any:
    """A panel for each size of models, with bars by benchmark; blank if none of the size was run."""
    groups = list(dict.fromkeys(method.group for method in methods))
    figure, axes = panels(len(groups), measured.about)
    for axis, group in zip(axes, groups):
        group_methods = [method for method in methods if method.group == group]
        labels = {name for method in group_methods for rows in values.values() for name in labels_of(method, rows)}
        rows_by_part = {part: {name: rows[name] for name in rows if name in labels} for part, rows in values.items()}
        lacking = [method for method in group_methods if method.name in measured.absent]
        if not labels:
            keys = " or ".join(method.key or method.agent for method in group_methods)
            missing(axis, group, f"no run is named {keys} (--rows, config.rows){notes.get(group, '')}")
            continue
        bars(axis, {part: rows for part, rows in rows_by_part.items() if rows}, group_methods)
        lines = [f"not run: {method.name} ({measured.absent[method.name]})" for method in lacking]
        axis.set(title="\n".join([group, *lines]), ylabel=label)
    return figure
