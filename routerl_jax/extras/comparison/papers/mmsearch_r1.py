"""Draws MMSearch-R1's figures 4 and 5 (Wu et al., arXiv 2506.20670). The layout follows captions and text of the paper."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from routerl_jax.evaluation.figures import COLORS
from routerl_jax.evaluation.report import heading
from routerl_jax.extras.comparison.papers.figure import (
    A_RUN,
    COMPARED,
    REWARD,
    Measured,
    Method,
    Row,
    bars,
    behaviours,
    colors_of,
    labels_of,
    missing,
    over_steps,
    panels,
    paper_figure,
    parts,
)

WORKFLOW = (
    Method("Base", "mmsearch_r1", run=("warm_start",)),
    Method("RL", "recipe:mmsearch_r1", run=("trained",)),
    Method("RAG workflow: Base", "mmsearch_r1:rag_workflow", run=("warm_start_rag_workflow",)),
    Method("RAG workflow: RL", "recipe:mmsearch_r1:rag_workflow", run=("rag_workflow",)),
)
TRAINING = (
    Method("Base", "mmsearch_r1", run=("warm_start",)),
    Method("SFT", "row:sft", run=("sft",)),
    Method("MMSearch-R1 (RL)", "row:mmsearch_r1", run=("trained",), other="recipe:mmsearch_r1"),
    Method("w/o Data Balancing", "row:unbalanced", run=("unbalanced",)),
    Method("w/o Search Penalty", "row:no_penalty", run=("no_penalty",)),
)
_TASKS = {"ID tasks": ("fvqa", "infoseek"), "OOD tasks": ("mmsearch", "simplevqa", "livevqa")}
_BROKEN_DOWN = ("infoseek", "simplevqa")
_RINGS = 5  # most parts of other questions that are broken down
_FOUR = {
    "correct_with_search": ("correct, searched", COLORS[2]),
    "correct_without_search": ("correct, not searched", COLORS[0]),
    "wrong_with_search": ("wrong, searched", COLORS[1]),
    "wrong_without_search": ("wrong, not searched", COLORS[5]),
}


@paper_figure(
    "mmsearch_r1",
    4,
    shows="start and trained policy under the RAG workflow; right and wrong, with and without a search",
    needs=f"{A_RUN} with config.evaluation.before_baselines, or {COMPARED} with mmsearch_r1, "
    "mmsearch_r1:rag_workflow, RUN and RUN:rag_workflow",
    methods=WORKFLOW,
    records=True,
)
def workflow(measured: Measured) -> Any:
    """Figure 4: accuracy of start and trained policy under the RAG workflow (a); right and wrong, with and without a search, of
    the start (inner ring) and the trained policy (outer ring) (b)."""
    by_part = behaviours(measured)
    names = [name for name in _BROKEN_DOWN if name in by_part] or list(by_part)[:_RINGS] or list(_BROKEN_DOWN)
    figure, (accuracy, *rings) = panels(1 + len(names), measured.caption, columns=min(3, 1 + len(names)))
    values = _tasks(parts(measured, (measured.metric,)), measured.metric, ("RAG workflow: Base", "RAG workflow: RL"))
    title = "(a) With the RAG workflow"
    if any(values.values()):
        bars(accuracy, values, WORKFLOW, "{:.1f}")
        accuracy.set(title=title, ylabel=heading(measured.metric))
    else:
        why = [how for name, how in measured.absent.items() if "workflow" in name]
        missing(accuracy, title, " and ".join(why) or "no workflow was run")
    for axis, name in zip(rings, names):
        _rings(axis, by_part.get(name, {}), f"(b) {name}: Base inside, RL outside")
    return figure


@paper_figure(
    "mmsearch_r1",
    5,
    shows="accuracy and search ratio after SFT and RL; reward and searches over training, also without balance or penalty",
    needs=f"{A_RUN} with controls sft, unbalanced and no_penalty, or {COMPARED} with mmsearch_r1 and such runs",
    methods=TRAINING,
)
def training(measured: Measured) -> Any:
    """Figure 5: accuracy and search ratio of start, SFT and RL on every benchmark (a); reward and share of attempts that search
    over training, without balanced data and without the penalty (b)."""
    figure, (accuracy, reward, searched) = panels(3, measured.about, width=5.6)
    compared = [method for method in TRAINING if method.name in ("Base", "SFT", "MMSearch-R1 (RL)")]
    by_part = parts(measured, (measured.metric, "search_ratio"))
    rows = {
        name: {
            label: row
            for label, row in rows_of_part.items()
            if any(label in labels_of(method, [label]) for method in compared)
        }
        for name, rows_of_part in by_part.items()
    }
    rows = {name: rows_of_part for name, rows_of_part in rows.items() if rows_of_part}
    lacking = [
        f"{method.name} ({measured.absent[method.name]})" for method in compared if method.name in measured.absent
    ]
    title = "(a) Accuracy (bars), search ratio (diamonds)" + (f"\nnot run: {', '.join(lacking)}" if lacking else "")
    if rows:
        values = {
            name: {label: 100 * row[measured.metric] for label, row in rows_of_part.items()}
            for name, rows_of_part in rows.items()
        }
        bars(accuracy, values, TRAINING, "{:.0f}")
        _diamonds(accuracy, rows)
        accuracy.set(title=title, ylabel=f"{heading(measured.metric)[:-2]} and search ratio, %", ylim=(0, 118))
    else:
        missing(accuracy, title, "neither start nor trained policies were run")
    ran = [method for method in TRAINING if method.run not in (("warm_start",), ("sft",))]
    not_run = [f"{method.name} ({measured.absent[method.name]})" for method in ran if method.name in measured.absent]
    over_steps(reward, measured, REWARD, "(b) Reward", TRAINING)
    over_steps(searched, measured, "rollout/searched_rate", "(b) Share of attempts that search", TRAINING)
    if not_run:
        reward.set_title(f"(b) Reward\nnot run: {', '.join(not_run)}")
    return figure


def _tasks(
    rows_by_benchmark: Mapping[str, Mapping[str, Row]], metric: str, methods: tuple[str, ...]
) -> dict[str, dict[str, float]]:
    """Percent by kind of task and method, means over the benchmarks of the kind that were run; of other benchmarks by name."""
    values = {
        name: {label: 100 * row[metric] for label, row in rows.items() if label.startswith(methods)}
        for name, rows in rows_by_benchmark.items()
    }
    benchmarks_by_kind = {kind: [name for name in names if name in values] for kind, names in _TASKS.items()}
    if not any(benchmarks_by_kind.values()):
        return {name: rows for name, rows in values.items() if rows}
    tasks = {}
    for kind, names in benchmarks_by_kind.items():
        labels = dict.fromkeys(label for name in names for label in values[name])
        values_by_label = {label: [values[name][label] for name in names if label in values[name]] for label in labels}
        if values_by_label:
            tasks[f"{kind}: {', '.join(names)}"] = {
                label: sum(label_values) / len(label_values) for label, label_values in values_by_label.items()
            }
    return tasks


def _rings(axis: Any, rows: Mapping[str, Mapping[str, Any]], title: str) -> None:
    """Two rings of the four ways in which a question ends."""
    labels = {name: next(labels_of(Method(name, ""), rows), "") for name in ("Base", "RL")}
    present = {name: label for name, label in labels.items() if label}
    if not present:
        missing(axis, title, "neither start nor trained policy was run")
        return
    for name, radius in (("Base", 0.65), ("RL", 1.0)):
        if name not in present:
            axis.text(0, 0 if name == "Base" else -1.2, f"{name}: not run", ha="center", va="center", fontsize=8)
            continue
        shares = rows[present[name]]["breakdown"]
        wedges, _ = axis.pie(
            [shares[key] for key in _FOUR],
            radius=radius,
            colors=[color for _, color in _FOUR.values()],
            startangle=90,
            counterclock=False,
            wedgeprops={"width": 0.33, "edgecolor": "white"},
        )
        for wedge, key in zip(wedges, _FOUR):
            if shares[key] >= 0.04:
                _percent(axis, wedge, radius - 0.165, shares[key])
    axis.set(title=title, aspect="equal")
    handles = [axis.scatter([], [], marker="s", color=color) for _, color in _FOUR.values()]
    texts = [text for text, _ in _FOUR.values()]
    below = {"loc": "upper center", "bbox_to_anchor": (0.5, 0.02), "ncols": 2}
    axis.legend(handles, texts, frameon=False, fontsize=8, **below)


def _percent(axis: Any, wedge: Any, radius: float, share: float) -> None:
    """Writes a share in the middle of its wedge."""
    middle = math.radians((wedge.theta1 + wedge.theta2) / 2)
    x, y = radius * math.cos(middle), radius * math.sin(middle)
    axis.text(x, y, f"{100 * share:.0f}", ha="center", va="center", fontsize=8, color="white")


def _diamonds(axis: Any, rows: Mapping[str, Mapping[str, Row]]) -> None:
    """The search ratio of each method over its bar."""
    labels = list(dict.fromkeys(label for by_label in rows.values() for label in by_label))
    width = 0.8 / len(labels)
    colors = colors_of(labels, TRAINING)
    for i, label in enumerate(labels):
        xs = [number - 0.4 + (i + 0.5) * width for number, by_label in enumerate(rows.values()) if label in by_label]
        ratios = [100 * by_label[label]["search_ratio"] for by_label in rows.values() if label in by_label]
        axis.plot(xs, ratios, "D", color=colors[label], markeredgecolor="black", markersize=5)
