"""Draws VRAG-RL's figures 3 to 6 (Wang et al., arXiv 2505.22019) from what a run or a comparison has measured.

The text at hand has captions and what the paper reads in the figures, not the pictures. The layout follows that.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from routerl_jax.evaluation.figures import COLORS, legend, new_figure
from routerl_jax.evaluation.report import heading
from routerl_jax.extras.comparison.papers.figure import (
    A_RUN,
    COMPARED,
    TEST,
    WIDTH,
    Measured,
    Method,
    Row,
    bars,
    colors_of,
    counted,
    legend_below,
    missing,
    panels,
    paper_figure,
    say,
)
from routerl_jax.extras.comparison.papers.table import PAPER_TABLES, PaperTable

METHODS = (
    Method("Vanilla RAG", "vrag_rl:vanilla_rag"),
    Method("ReAct", "vrag_rl:react"),
    Method("Search-R1-VL", "row:search_r1_vl", {"looks": False}),
    Method("VRAG-RL", "recipe:vrag_rl"),
)
_RUN_OR = f"{A_RUN}, or {COMPARED} with RUN, vrag_rl:vanilla_rag, vrag_rl:react"
_KINDS = ("source_type", "type")  # of questions: MMLongBench's, else any
_RETRIEVAL = {"recall_at_first": "first search", "recall": "all searches", "ndcg": "NDCG, all searches"}
_ACTIONS = {"searches_per_question": ("searches", COLORS[0]), "crops_per_question": ("closer looks", COLORS[2])}


@paper_figure(
    "vrag_rl",
    3,
    shows="accuracy by the length of the context",
    needs=f"{A_RUN}, whose policy as vanilla RAG answers --limit questions with each of --top_k pages at once; or a {COMPARED} "
    "for each number of pages (config.settings, vrag_rl, max_searches), joined by config.compare_with",
    methods=METHODS,
    tries="pages",
)
def context_length(measured: Measured) -> Any:
    """Figure 3: accuracy of vanilla RAG by the number of pages that it is shown at once, of all questions and of those whose
    gold pages are always shown ("when the information is sufficient"). Dashed: the share of gold pages that are shown."""
    names = list(measured.at_once) or list(measured.benchmarks)
    figure, axes = panels(len(names), "Vanilla RAG has the trained policy's weights." if TEST in names else "")
    for axis, name in zip(axes, names):
        rows = measured.at_once.get(name, {})
        if len(rows) < 2:
            missing(axis, name, measured.missing.get("at_once", "other numbers of pages were not tried"))
            continue
        pages = list(rows)
        metric, measurements = measured.metric, list(rows.values())
        values = [row[metric] for row in measurements]
        axis.errorbar(
            pages,
            values,
            yerr=_errors(measurements, metric),
            fmt="o-",
            color=COLORS[0],
            capsize=3,
            label="all questions",
        )
        if sufficient := {count: row["sufficient"] for count, row in rows.items() if row.get("sufficient")}:
            axis.plot(
                list(sufficient),
                [row[metric] for row in sufficient.values()],
                "D-",
                color=COLORS[2],
                label=_sufficient(sufficient),
            )
        if all("recall" in row for row in measurements):
            axis.plot(pages, [row["recall"] for row in measurements], "s--", color=COLORS[5], label="gold pages shown")
        axis.set_xticks(pages, [_context(count, row) for count, row in rows.items()])
        axis.set(
            title=counted(name, measurements),
            xlabel=_context_unit(measurements),
            ylabel=heading(metric)[:-2],
            ylim=(0, 1.05),
        )
        legend(axis, loc="best")
    return figure


@paper_figure("vrag_rl", 4, shows="recall of gold pages", needs=_RUN_OR, methods=METHODS)
def retrieval(measured: Measured) -> Any:
    """Figure 4: gold pages that each method's searches showed: recall of the first search, of all, and NDCG."""
    figure, axes = panels(len(measured.benchmarks), measured.caption)
    for axis, (name, rows) in zip(axes, measured.benchmarks.items()):
        with_gold = {method: row for method, row in rows.items() if all(key in row for key in _RETRIEVAL)}
        if not with_gold:
            missing(axis, name, "no gold pages of these questions are known")
            continue
        groups = {label: {method: row[key] for method, row in with_gold.items()} for key, label in _RETRIEVAL.items()}
        bars(axis, groups, METHODS)
        axis.set(title=counted(name, with_gold.values()), ylabel="recall and NDCG of gold pages", ylim=(0, 1.12))
    return figure


@paper_figure(
    "vrag_rl",
    5,
    shows="accuracy on MMLongBench by source, relative to the best method, beside table 1's",
    needs=_RUN_OR,
    methods=METHODS,
)
def by_kind(measured: Measured) -> Any:
    """Figure 5: accuracy by kind of question, each divided by the best method's. The paper's panels are table 1's numbers of
    MMLongBench by source; kinds of other questions can't be compared with them."""
    table = PAPER_TABLES.get("vrag_rl.table1")
    groups = list(dict.fromkeys(row.group for row in table.rows))
    figure = new_figure((WIDTH * (1 + len(groups)), 4.9))
    axes = figure.subplots(1, 1 + len(groups), subplot_kw={"projection": "polar"})
    name, kinds = _kinds(measured)
    if len(kinds) < 3:
        missing(axes[0], name, "there are not three kinds of questions (source_type or type of their metadata)")
    else:
        _radar(axes[0], kinds, f"{name}: {heading(measured.metric)[:-2]}")
    for axis, group in zip(axes[1:], groups):
        _radar(axis, _published(table, group), f"The paper, {group.removesuffix('-Instruct')}: MMLongBench")
    legend_below(figure, axes)
    say(figure, f"Relative to the best method of each kind; in brackets the best, in percent. {measured.caption}")
    return figure


@paper_figure(
    "vrag_rl",
    6,
    shows="latency of generation",
    needs=f"{_RUN_OR}; seconds: of a comparison alone",
    methods=METHODS,
)
def latency(measured: Measured) -> Any:
    """Figure 6: seconds of a question, and the searches and closer looks that they were spent on."""
    figure, axes = panels(2 * len(measured.benchmarks), measured.caption)
    for i, (name, rows) in enumerate(measured.benchmarks.items()):
        timed, actions = axes[2 * i : 2 * i + 2]
        seconds = {method: row["cost"]["seconds"] for method, row in rows.items() if "cost" in row}
        if seconds:
            bars(timed, {"": seconds}, METHODS, "{:.3g}")
            label = "seconds of a question, shared side by side"
            timed.set(title=counted(name, rows.values()), ylabel=label, xticks=[])
        else:
            missing(timed, f"{name}: seconds", measured.missing.get("seconds", "seconds were not measured"))
        names = [textwrap.fill(method, 14, break_long_words=False) for method in rows]
        below = [0.0] * len(names)
        for key, (action, color) in _ACTIONS.items():
            values = [row.get(key, 0.0) for row in rows.values()]
            drawn = actions.bar(names, values, bottom=below, width=0.6, color=color, label=action)
            labels = [f"{value:.2f}" if value >= 0.1 else "" for value in values]
            actions.bar_label(drawn, labels, label_type="center", fontsize=8, color="white")
            below = [first + second for first, second in zip(below, values)]
        actions.tick_params(axis="x", labelsize=8)
        actions.grid(visible=False, axis="x")
        actions.set_axisbelow(True)
        actions.set(title=counted(name, rows.values()), ylabel="per question", ylim=(0, 1.25 * max(*below, 0.1)))
        legend(actions, loc="upper left", ncols=2)
    return figure


def _errors(rows: Sequence[Row], metric: str) -> list[list[float]]:
    ends = [(row[metric], *row[f"{metric}_interval"]) for row in rows]
    return [[max(mean - low, 0) for mean, low, _ in ends], [max(high - mean, 0) for mean, _, high in ends]]


def _sufficient(rows: Mapping[int, Row]) -> str:
    """The questions whose gold pages are shown with any number of pages."""
    fewest = min(rows)
    first = "the first page is" if fewest == 1 else f"the first {fewest} pages are"
    return f"questions of which {first} all that is needed ({rows[fewest]['n']})"


def _context(pages: int, row: Row) -> str:
    tokens = row["cost"]["read"] if "cost" in row else row.get("image_tokens_per_question")
    return str(pages) if tokens is None else f"{pages}\n{tokens:,.0f}"


def _context_unit(rows: Sequence[Row]) -> str:
    read = all("cost" in row for row in rows)
    return f"pages shown at once, at most; {'tokens read' if read else 'image tokens'} of a question"


def _kinds(measured: Measured) -> tuple[str, dict[str, dict[str, float]]]:
    """The benchmark whose kinds of questions are shown, and accuracies by kind and method: MMLongBench if it is there."""
    for key in _KINDS:
        for name, rows in measured.benchmarks.items():
            groups = [row.get("by", {}).get(key, {}) for row in rows.values()]
            kinds = [kind for kind in groups[0] if all(measured.metric in group.get(kind, {}) for group in groups)]
            if kinds:
                return name, {
                    kind: {method: rows[method]["by"][key][kind][measured.metric] for method in rows} for kind in kinds
                }
    return next(iter(measured.benchmarks), TEST), {}


def _published(table: PaperTable, group: str) -> dict[str, dict[str, float]]:
    """The table's accuracies of the methods by source, as shares."""
    rows = {row.method.partition(": ")[2]: row for row in table.rows if row.group == group and row.method[0] == "V"}
    numbers = {method: row.published for method, row in rows.items()}
    return {
        column.group[1]: {method: (values[i] or 0.0) / 100 for method, values in numbers.items()}
        for i, column in enumerate(table.columns)
        if column.group and column.group[0] == "source_type"
    }


def _radar(axis: Any, kinds: Mapping[str, Mapping[str, float]], title: str) -> None:
    """A spoke for each kind, a polygon for each method."""
    angles = [2 * math.pi * i / len(kinds) for i in range(len(kinds))]
    best = {kind: max(values.values()) for kind, values in kinds.items()}
    for method, color in colors_of(next(iter(kinds.values())), METHODS).items():
        shares = [values[method] / best[kind] if best[kind] else 0.0 for kind, values in kinds.items()]
        closed, around = [*shares, shares[0]], [*angles, angles[0]]
        axis.plot(around, closed, "o-", markersize=3, color=color, label=method)
        axis.fill(around, closed, color=color, alpha=0.08)
    axis.set_theta_zero_location("N")
    axis.set_xticks(angles, [f"{kind.replace('_', ' ')}\n({100 * best[kind]:.0f})" for kind in kinds])
    axis.set_yticks([0.25, 0.5, 0.75, 1.0], ["25 %", "50 %", "75 %", "100 %"], fontsize=7, color="#777777")
    axis.set_ylim(0, 1.04)
    axis.tick_params(axis="x", pad=8)
    axis.spines["polar"].set_alpha(0.3)
    axis.grid(alpha=0.3)
    axis.set_title(title, pad=14)
