"""Draws the figures of papers from what was measured: the parts that they share, then a function for each kind of figure.

The texts at hand have captions and what the papers read in their figures, not the pictures. The layouts follow that.
"""

from __future__ import annotations

import collections
import math
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from routerl_jax.evaluation.figures import COLORS, color_of, curve, legend, new_figure, panels_of
from routerl_jax.evaluation.metrics import by_group
from routerl_jax.evaluation.report import heading
from routerl_jax.extras.analysis.figure import errors
from routerl_jax.extras.analysis.numbers import behaviour
from routerl_jax.extras.comparison.papers.figure import TEST, Measured, Method, Records, Row, labels_of
from routerl_jax.extras.comparison.papers.table import PAPER_TABLES, PaperTable

WIDTH, HEIGHT = 5.0, 3.9  # inches of a panel
REWARD, LENGTH, SEARCHES = "reward/total", "rollout/tokens_per_question", "rollout/searches_per_question"
_GREY = "#555555"
_NARROW = 14  # letters of a line under bars


# --- what is drawn: rows and records by the parts that a figure compares ---


def parts(measured: Measured, metrics: Collection[str]) -> dict[str, dict[str, Row]]:
    """The rows with these metrics, by the parts that the figure compares.

    The parts are the benchmarks. A single benchmark, or a run, also has its groups of questions as parts (data sets, else
    kinds, else types).
    """
    rows_by_part = {name: _rows_with(rows, metrics) for name, rows in measured.benchmarks.items()}
    if len(rows_by_part) == 1:
        ((name, rows),) = measured.benchmarks.items()
        groups = [row.get("by", {}) for row in rows.values()]
        key = next((key for key in (groups[0] if groups else ()) if all(key in group for group in groups)), None)
        shared = [value for value in groups[0][key] if all(value in group[key] for group in groups)] if key else []
        rows_by_part = {_short(name): rows_by_part[name]} | {
            value: _rows_with({label: row["by"][key][value] for label, row in rows.items()}, metrics)
            for value in shared
        }
    return {name: rows for name, rows in rows_by_part.items() if rows}


def behaviours(measured: Measured, pools: Mapping[str, str] | None = None) -> dict[str, dict[str, dict[str, Any]]]:
    """`extras.analysis.numbers.behaviour` of the records, by the same parts.

    Args:
      pools: the name of the pool that a benchmark joins, by its name. Other benchmarks stay alone.
    """
    pooled: dict[str, dict[str, Records]] = collections.defaultdict(dict)
    for name, by_method in measured.records.items():
        pool = pooled[(pools or {}).get(name, name)]
        for label, records in by_method.items():
            pool[label] = [*pool.get(label, ()), *records]
    if len(pooled) == 1:
        ((name, by_method),) = pooled.items()
        pooled = {_short(name): by_method}
        for label, records in by_method.items():
            values = next(iter(by_group([record.get("metadata", {}) for record in records]).values()), {})
            for value, numbers in values.items():
                pooled.setdefault(value, {})[label] = [records[i] for i in numbers]
    return {name: {label: behaviour(rows) for label, rows in by_method.items()} for name, by_method in pooled.items()}


def _rows_with(rows: Mapping[str, Row], metrics: Collection[str]) -> dict[str, Row]:
    return {label: row for label, row in rows.items() if all(row.get(metric) is not None for metric in metrics)}


def _short(name: str) -> str:
    return "all questions" if name == TEST else name


# --- parts of figures: panels, bars by method, curves over training ---


def panels(count: int, caption: str, columns: int = 0, width: float = WIDTH) -> tuple[Any, list[Any]]:
    """A figure with a row of panels, or several rows of `columns`, under a text."""
    columns = columns or count
    rows = -(-count // columns)
    figure = new_figure((max(width * columns, 6.4), HEIGHT * rows))
    axes = panels_of(figure, rows, columns)
    for axis in axes[count:]:
        axis.set_axis_off()
    say(figure, caption)
    return figure, axes[:count]


def say(figure: Any, text: str) -> None:
    """Writes a text above a figure."""
    if text:
        figure.suptitle(textwrap.fill(text, int(13 * figure.get_figwidth())), fontsize=9, color=_GREY)


def missing(axis: Any, title: str, why: str) -> None:
    """Makes a panel blank, and says why."""
    axis.set_axis_off()
    axis.set_title(title)
    text = textwrap.fill(f"not measured: {why}", 40)
    axis.text(0.5, 0.5, text, ha="center", va="center", transform=axis.transAxes, color=_GREY)


def not_run(measured: Measured, methods: Sequence[Method]) -> list[str]:
    """Those of the methods that were not run, each with how it is."""
    return [f"{method.name} ({measured.absent[method.name]})" for method in methods if method.name in measured.absent]


def counted(name: str, rows: Collection[Row]) -> str:
    """A name with the number of questions."""
    counts = sorted({row["n"] for row in rows})
    return f"{name} ({', '.join(map(str, counts))})"


def colors_of(labels: Collection[str], methods: Sequence[Method]) -> dict[str, str]:
    """A method has the same colour in all figures of its paper. Further rows of a method, and other runs, have colours of their
    own."""
    names = [method.name for method in methods]
    colors: dict[str, str] = {}
    next_index = len(names)
    for label in labels:
        name = next((candidate for candidate in names if label == candidate or label.startswith(f"{candidate}, ")), "")
        index = names.index(name) if name else next_index
        if not name or color_of(index) in colors.values():
            index, next_index = next_index, next_index + 1
        colors[label] = color_of(index)
    return colors


def bars(
    axis: Any,
    groups: Mapping[str, Mapping[str, float | None]],
    methods: Sequence[Method],
    label_format: str = "{:.2f}",
    *,
    with_legend: bool = True,
) -> None:
    """Draws a bar per method for each group. A method that only other groups have is marked "not run"; a None is "none"."""
    labels = list(dict.fromkeys(label for values in groups.values() for label in values))
    width, colors = 0.8 / max(len(labels), 1), colors_of(labels, methods)
    for i, label in enumerate(labels):
        values_at = {number - 0.4 + (i + 0.5) * width: values for number, values in enumerate(groups.values())}
        heights = {x: value for x, values in values_at.items() if (value := values.get(label)) is not None}
        drawn = axis.bar(list(heights), list(heights.values()), width, color=colors[label], label=label)
        axis.bar_label(drawn, [label_format.format(value) for value in heights.values()], fontsize=7)
        for x in values_at.keys() - heights.keys():
            why = " none" if label in values_at[x] else " not run"
            axis.text(x, 0, why, rotation=90, ha="center", va="bottom", fontsize=7, color=_GREY)
    names = [textwrap.fill(str(name), _NARROW) for name in groups]
    axis.set_xticks(range(len(groups)), names)
    axis.margins(y=0.12)
    axis.grid(visible=False, axis="x")
    axis.set_axisbelow(True)
    if with_legend:
        below = -0.03 - 0.07 * max((name.count("\n") + 1 for name in names), default=1)
        axis.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, below), ncols=2)


def stacks(
    axis: Any, layers: Mapping[str, Sequence[float]], colors: Sequence[str], label_format: str, least: float
) -> list[float]:
    """Draws bars, each stacked from a value of every layer, which is written in it if it is `least` or more. Returns their
    heights."""
    count = max(map(len, layers.values()), default=0)
    tops = [0.0] * count
    for (label, values), color in zip(layers.items(), colors):
        drawn = axis.bar(range(count), values, bottom=tops, width=0.6, color=color, label=label)
        texts = [label_format.format(value) if value >= least else "" for value in values]
        axis.bar_label(drawn, texts, label_type="center", fontsize=8, color="white")
        tops = [top + value for top, value in zip(tops, values)]
    axis.grid(visible=False, axis="x")
    axis.set_axisbelow(True)
    return tops


def legend_below(figure: Any, axes: Sequence[Any]) -> None:
    """One legend for all panels, under the figure."""
    handles = {label: line for axis in axes for line, label in zip(*axis.get_legend_handles_labels())}
    if handles:
        figure.legend(
            list(handles.values()), list(handles), loc="outside lower center", ncols=len(handles), frameon=False
        )


def over_steps(axis: Any, measured: Measured, key: str, title: str) -> None:
    """Draws a metric of training over the steps: for each run a faint line of its values and a bold one of the running mean."""
    runs = {label: rows for label, rows in measured.training.items() if any(row.get(key) is not None for row in rows)}
    if not runs:
        missing(axis, title, "no run with metrics of training is given")
        return
    colors = colors_of(runs, measured.methods)
    for label, rows in runs.items():
        curve(axis, rows, key, label, colors[label])
    axis.set(title=title, xlabel="step")
    if key != REWARD:  # counts and shares begin at 0
        axis.set_ylim(0, max(axis.get_ylim()[1], 0.1))
    legend(axis)


# --- R1-Searcher's figures (Song et al., arXiv 2503.05592) ---


_WAYS = {"online": ("online search", COLORS[1]), "local": ("local search", COLORS[0]), "": ("no search", COLORS[5])}
_BAR = 0.24  # inches
_BAMBOOGLE = "bamboogle"
_WayRow = tuple[str, float, str, list[float] | None]  # agent, CEM, way of searching, interval


def over_training(measured: Measured) -> Any:
    """Figures 2 to 5: reward, response length and searches over the steps, a line per run."""
    shown = {REWARD: "Reward", LENGTH: "Response length, tokens", SEARCHES: "Searches of an attempt"}
    figure, axes = panels(len(shown), measured.caption)
    for axis, (key, title) in zip(axes, shown.items()):
        over_steps(axis, measured, key, title)
    return figure


def online(measured: Measured) -> Any:
    """Figure 6: covered exact match on Bamboogle of every agent, by whether it searches a local corpus or the web. The paper's
    numbers of the local search are those of its table 2; the others stand in its picture alone."""
    names = [name for compared in measured.comparisons.values() for name in compared["benchmarks"]]
    benchmark = _BAMBOOGLE if _BAMBOOGLE in names or not names else names[0]
    rows = list(_searched_rows(measured, benchmark))
    lacking = [_WAYS[way][0] for way in ("online", "local") if not any(row[2] == way for row in rows)]
    caption = measured.caption
    if lacking:
        caption += (
            f" Not run: {' and '.join(lacking)} (two comparisons, one with a knowledge base of kind web; compare_with)."
        )
    table = PAPER_TABLES.get("r1_searcher.table2")
    column = next(i for i, column in enumerate(table.columns) if column.benchmarks == (_BAMBOOGLE,))
    published: list[_WayRow] = [
        (f"{row.method} ({row.group})", value, "" if row.agent == "direct" else "local", None)
        for row in table.rows
        if row.group != "GPT" and (value := row.published[column]) is not None
    ]
    figure, (ours, paper) = panels(2, caption.strip(), width=6.5)
    figure.set_figheight(1.6 + _BAR * max(len(rows), len(published)))
    title = f"{benchmark}: CEM, 95 % intervals"
    if rows:
        _by_way(ours, rows, title)
    else:
        missing(ours, title, "a comparison is needed (launch.evaluate --config=configs/eval/..)")
    _by_way(paper, published, "The paper, Bamboogle: table 2 (Llama, Qwen)")
    legend_below(figure, [ours, paper])
    return figure


def _searched_rows(measured: Measured, benchmark: str) -> Iterator[_WayRow]:
    """Every agent in the comparison and in those beside it."""
    for compared in measured.comparisons.values():
        bases = compared["card"]["benchmarks"].get(benchmark, {}).get("knowledge", {})
        way = "online" if any(base.get("kind") == "web" for base in bases.values()) else "local"
        for name, row in compared["benchmarks"].get(benchmark, {}).get("rows", {}).items():
            yield name, row["cover_em"], way if row["searched_rate"] else "", row.get("cover_em_interval")


def _by_way(axis: Any, rows: Sequence[_WayRow], title: str) -> None:
    """Horizontal bars with their intervals, coloured by the way of searching."""
    for way, (label, color) in _WAYS.items():
        numbered = [(y, row) for y, row in enumerate(rows) if row[2] == way]
        if not numbered:
            continue
        values = [row[1] for _, row in numbered]
        ends = [{"em": row[1], "em_interval": row[3] or [row[1], row[1]]} for _, row in numbered]
        ys = [y for y, _ in numbered]
        drawn = axis.barh(ys, values, xerr=errors(ends), height=0.7, color=color, label=label, ecolor="#333333")
        axis.bar_label(drawn, [f" {value:.3f}" for value in values], fontsize=7)
    axis.set_yticks(range(len(rows)), [row[0] for row in rows], fontsize=8)
    axis.invert_yaxis()
    axis.margins(x=0.12)
    axis.grid(visible=False, axis="y")
    axis.set_axisbelow(True)
    axis.set(title=title, xlabel="covered exact match")


# --- RouteRAG's figures (Guo et al., arXiv 2512.09487) ---


_AVERAGES = {"3B": "2.43 with, 2.51 without", "7B": "2.25 with, 2.70 without"}  # table 4
_SYSTEM_METRICS = {
    "f1": ("F1", "{:.2f}"),
    "tokens": ("Response length, tokens", "{:.0f}"),
    "turns": ("Turns", "{:.2f}"),
}
_BY_K = {"em": "EM", "f1": "F1", "searches_per_question": "Retrieval turns"}


def retrieval_turns(measured: Measured) -> Any:
    """Figure 2: searches of a question with and without the efficiency reward, for each size of models."""
    values = {
        name: {label: row["searches_per_question"] for label, row in rows.items()}
        for name, rows in parts(measured, ("searches_per_question",)).items()
    }
    notes = {size: f"; the paper's averages are {averages} (table 4)" for size, averages in _AVERAGES.items()}
    return _by_size(measured, values, "retrieval turns of a question", notes)


def reasoning_depth(measured: Measured) -> Any:
    """Figure 3: turns of a question before and after training, for each size of models."""
    values = {name: {label: row["turns"] for label, row in rows.items()} for name, rows in behaviours(measured).items()}
    return _by_size(measured, values, "turns of a question", {})


def _by_size(
    measured: Measured, values: Mapping[str, Mapping[str, float]], label: str, notes: Mapping[str, str]
) -> Any:
    """A panel for each size of models, with bars by benchmark; blank if none of the size was run."""
    groups = list(dict.fromkeys(method.group for method in measured.methods))
    figure, axes = panels(len(groups), measured.about)
    for axis, group in zip(axes, groups):
        methods = [method for method in measured.methods if method.group == group]
        labels = {name for method in methods for rows in values.values() for name in labels_of(method.name, rows)}
        if not labels:
            keys = " or ".join(method.key or method.agent for method in methods)
            missing(axis, group, f"no run is named {keys} (--rows, config.rows){notes.get(group, '')}")
            continue
        rows_by_part = {part: {name: rows[name] for name in rows if name in labels} for part, rows in values.items()}
        bars(axis, {part: rows for part, rows in rows_by_part.items() if rows}, methods)
        lines = [f"not run: {method}" for method in not_run(measured, methods)]
        axis.set(title="\n".join([group, *lines]), ylabel=label)
    return figure


def systems(measured: Measured) -> Any:
    """Figure 4: F1, sampled tokens and turns of several systems on every benchmark."""
    by_part = behaviours(measured)
    figure, axes = panels(len(_SYSTEM_METRICS), measured.caption)
    for axis, (metric, (title, label_format)) in zip(axes, _SYSTEM_METRICS.items()):
        values = {name: {label: row[metric] for label, row in rows.items()} for name, rows in by_part.items()}
        bars(axis, values, measured.methods, label_format, with_legend=False)
        axis.set(title=title)
    legend_below(figure, axes)
    return figure


def by_documents(measured: Measured) -> Any:
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


def _metric_of(row: Row, metric: str) -> float | None:
    """A metric of a row, which may be of extras.analysis.numbers.behaviour."""
    return row.get(metric, row.get("searches") if metric == "searches_per_question" else None)


# --- R1-Router's figures (Peng et al., arXiv 2505.22095) ---


_TABLE, _VISUAL, _TEXT = "Table QA", "Visual QA", "Text QA"
# Section 5.3 puts its benchmarks together by the kind of knowledge that they need
_POOLS = {
    **dict.fromkeys(("open_wikitable", "tabfact"), _TABLE),
    **dict.fromkeys(("infoseek", "dyn_vqa", "webqa"), _VISUAL),
    "2wikimultihopqa": _TEXT,
}
_VISUAL_PARTS = (_VISUAL, "visual")  # of a comparison, and kind of Atlas's questions


def reward_length_and_searches(measured: Measured) -> Any:
    """Figure 2: reward (a) and response length (b) over training; searches of rightly answered questions (c)."""
    figure, (reward, length, steps) = panels(3, measured.caption)
    over_steps(reward, measured, REWARD, "(a) Reward")
    over_steps(length, measured, LENGTH, "(b) Response length, tokens")
    by_part = behaviours(measured, _POOLS)
    title = "(c) Searches of questions answered rightly"
    if not by_part:
        missing(steps, title, "no episodes are at hand")
        return figure
    means = {
        name: {label: row["searches_of_correct"]["mean"] for label, row in rows.items()}
        for name, rows in by_part.items()
    }
    bars(steps, means, measured.methods)
    steps.set(title=title, ylabel="searches of a question")
    return figure


def routing(measured: Measured) -> Any:
    """Figure 3: the share of each knowledge base in first, second and further searches on visual questions, by method."""
    by_part = behaviours(measured, _POOLS)
    part = next((name for name in _VISUAL_PARTS if name in by_part), next(iter(by_part), ""))
    rows = by_part.get(part, {})
    figure, axes = panels(len(measured.methods), measured.about, width=4.2)
    bases = sorted({base for row in rows.values() for step in row["mode_by_step"] for base in step["mode_usage"]})
    for axis, method, letter in zip(axes, measured.methods, "abc"):
        title = f"({letter}) {method.name}, {part}"
        label = next(labels_of(method.name, rows), "")
        if not label:
            missing(axis, title, f"not run ({measured.absent.get(method.name, method.agent)})")
            continue
        steps = rows[label]["mode_by_step"]
        if not steps:
            missing(axis, title, "it made no search")
            continue
        shares = {base: [100 * step["mode_usage"].get(base, 0.0) for step in steps] for base in bases}
        stacks(axis, shares, [color_of(i) for i in range(len(bases))], "{:.0f}", 6)
        axis.set_xticks(range(len(steps)), [f"{step['step']}\n({step['n']})" for step in steps])
        axis.set(title=title, xlabel="search (how many)", ylabel="% of searches", ylim=(0, 102))
    legend_below(figure, axes)
    return figure


# --- MMSearch-R1's figures (Wu et al., arXiv 2506.20670) ---


_TASKS = {"ID tasks": ("fvqa", "infoseek"), "OOD tasks": ("mmsearch", "simplevqa", "livevqa")}
_BROKEN_DOWN = ("infoseek", "simplevqa")
_RINGS = 5  # most parts of other questions that are broken down
_FOUR = {
    "correct_with_search": ("correct, searched", COLORS[2]),
    "correct_without_search": ("correct, not searched", COLORS[0]),
    "wrong_with_search": ("wrong, searched", COLORS[1]),
    "wrong_without_search": ("wrong, not searched", COLORS[5]),
}


def workflow(measured: Measured) -> Any:
    """Figure 4: accuracy of start and trained policy under the RAG workflow (a); right and wrong, with and without a search, of
    the start (inner ring) and the trained policy (outer ring) (b)."""
    by_part = behaviours(measured)
    names = [name for name in _BROKEN_DOWN if name in by_part] or list(by_part)[:_RINGS] or list(_BROKEN_DOWN)
    figure, (accuracy, *rings) = panels(1 + len(names), measured.caption, columns=min(3, 1 + len(names)))
    values = _by_task(measured, ("RAG workflow: Base", "RAG workflow: RL"))
    title = "(a) With the RAG workflow"
    if any(values.values()):
        bars(accuracy, values, measured.methods, "{:.1f}")
        accuracy.set(title=title, ylabel=heading(measured.metric))
    else:
        why = [how for name, how in measured.absent.items() if "workflow" in name]
        missing(accuracy, title, " and ".join(why) or "no workflow was run")
    for axis, name in zip(rings, names):
        _rings(axis, by_part.get(name, {}), f"(b) {name}: Base inside, RL outside")
    return figure


def _by_task(measured: Measured, methods: tuple[str, ...]) -> dict[str, dict[str, float]]:
    """Percent by kind of task and method, means over the benchmarks of the kind that were run; of other benchmarks by name."""
    values = {
        name: {label: 100 * row[measured.metric] for label, row in rows.items() if label.startswith(methods)}
        for name, rows in parts(measured, (measured.metric,)).items()
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
    present = {name: label for name in ("Base", "RL") if (label := next(labels_of(name, rows), ""))}
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
            if shares[key] >= 0.04:  # written in the middle of the wedge
                middle, inside = math.radians((wedge.theta1 + wedge.theta2) / 2), radius - 0.165
                x, y = inside * math.cos(middle), inside * math.sin(middle)
                axis.text(x, y, f"{100 * shares[key]:.0f}", ha="center", va="center", fontsize=8, color="white")
    axis.set(title=title, aspect="equal")
    handles = [axis.scatter([], [], marker="s", color=color) for _, color in _FOUR.values()]
    texts = [text for text, _ in _FOUR.values()]
    below = {"loc": "upper center", "bbox_to_anchor": (0.5, 0.02), "ncols": 2}
    axis.legend(handles, texts, frameon=False, fontsize=8, **below)


def accuracy_and_training(measured: Measured) -> Any:
    """Figure 5: accuracy and search ratio of start, SFT and RL on every benchmark (a); reward and share of attempts that search
    over training, without balanced data and without the penalty (b)."""
    figure, (accuracy, reward, searched) = panels(3, measured.about, width=5.6)
    compared = [method for method in measured.methods if method.name in ("Base", "SFT", "MMSearch-R1 (RL)")]
    rows = {}
    for name, found in parts(measured, (measured.metric, "search_ratio")).items():
        labels = {label for method in compared for label in labels_of(method.name, found)}
        if labels:
            rows[name] = {label: row for label, row in found.items() if label in labels}
    lacking = not_run(measured, compared)
    title = "(a) Accuracy (bars), search ratio (diamonds)" + (f"\nnot run: {', '.join(lacking)}" if lacking else "")
    if rows:
        values = {
            name: {label: 100 * row[measured.metric] for label, row in rows_of_part.items()}
            for name, rows_of_part in rows.items()
        }
        bars(accuracy, values, measured.methods, "{:.0f}")
        _diamonds(accuracy, rows, measured.methods)
        accuracy.set(title=title, ylabel=f"{heading(measured.metric)[:-2]} and search ratio, %", ylim=(0, 118))
    else:
        missing(accuracy, title, "neither start nor trained policies were run")
    over_steps(reward, measured, REWARD, "(b) Reward")
    over_steps(searched, measured, "rollout/searched_rate", "(b) Share of attempts that search")
    ran = [method for method in measured.methods if method.run not in (("warm_start",), ("sft",))]
    if lacking := not_run(measured, ran):
        reward.set_title(f"(b) Reward\nnot run: {', '.join(lacking)}")
    return figure


def _diamonds(axis: Any, rows: Mapping[str, Mapping[str, Row]], methods: Sequence[Method]) -> None:
    """The search ratio of each method over its bar."""
    labels = list(dict.fromkeys(label for by_label in rows.values() for label in by_label))
    width = 0.8 / len(labels)
    colors = colors_of(labels, methods)
    for i, label in enumerate(labels):
        xs = [number - 0.4 + (i + 0.5) * width for number, by_label in enumerate(rows.values()) if label in by_label]
        ratios = [100 * by_label[label]["search_ratio"] for by_label in rows.values() if label in by_label]
        axis.plot(xs, ratios, "D", color=colors[label], markeredgecolor="black", markersize=5)


# --- VRAG-RL's figures (Wang et al., arXiv 2505.22019) ---


_KINDS = ("source_type", "type")  # of questions: MMLongBench's, else any
_RETRIEVAL = {"recall_at_first": "first search", "recall": "all searches", "ndcg": "NDCG, all searches"}


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
        pages, measurements, metric = list(rows), list(rows.values()), measured.metric
        values, style = [row[metric] for row in measurements], {"fmt": "o-", "color": COLORS[0], "capsize": 3}
        axis.errorbar(pages, values, yerr=errors(measurements, metric), label="all questions", **style)
        if sufficient := {count: row["sufficient"] for count, row in rows.items() if row.get("sufficient")}:
            fewest = min(sufficient)
            first = "the first page is" if fewest == 1 else f"the first {fewest} pages are"
            label = f"questions of which {first} all that is needed ({sufficient[fewest]['n']})"
            values = [row[metric] for row in sufficient.values()]
            axis.plot(list(sufficient), values, "D-", color=COLORS[2], label=label)
        if all("recall" in row for row in measurements):
            axis.plot(pages, [row["recall"] for row in measurements], "s--", color=COLORS[5], label="gold pages shown")
        axis.set_xticks(pages, [_context(count, row) for count, row in rows.items()])
        read = "tokens read" if all("cost" in row for row in measurements) else "image tokens"
        xlabel = f"pages shown at once, at most; {read} of a question"
        axis.set(title=counted(name, measurements), xlabel=xlabel, ylabel=heading(metric)[:-2], ylim=(0, 1.05))
        legend(axis, loc="best")
    return figure


def _context(pages: int, row: Row) -> str:
    tokens = row["cost"]["read"] if "cost" in row else row.get("image_tokens_per_question")
    return str(pages) if tokens is None else f"{pages}\n{tokens:,.0f}"


def gold_pages(measured: Measured) -> Any:
    """Figure 4: gold pages that each method's searches showed: recall of the first search, of all, and NDCG."""
    figure, axes = panels(len(measured.benchmarks), measured.caption)
    for axis, (name, rows) in zip(axes, measured.benchmarks.items()):
        with_gold = {method: row for method, row in rows.items() if all(key in row for key in _RETRIEVAL)}
        if not with_gold:
            missing(axis, name, "no gold pages of these questions are known")
            continue
        groups = {label: {method: row[key] for method, row in with_gold.items()} for key, label in _RETRIEVAL.items()}
        bars(axis, groups, measured.methods)
        axis.set(title=counted(name, with_gold.values()), ylabel="recall and NDCG of gold pages", ylim=(0, 1.12))
    return figure


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
        _radar(axes[0], kinds, measured.methods, f"{name}: {heading(measured.metric)[:-2]}")
    for axis, group in zip(axes[1:], groups):
        title = f"The paper, {group.removesuffix('-Instruct')}: MMLongBench"
        _radar(axis, _published(table, group), measured.methods, title)
    legend_below(figure, axes)
    say(figure, f"Relative to the best method of each kind; in brackets the best, in percent. {measured.caption}")
    return figure


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
    return {
        column.group[1]: {method: (row.published[i] or 0.0) / 100 for method, row in rows.items()}
        for i, column in enumerate(table.columns)
        if column.group and column.group[0] == "source_type"
    }


def _radar(axis: Any, kinds: Mapping[str, Mapping[str, float]], methods: Sequence[Method], title: str) -> None:
    """A spoke for each kind, a polygon for each method."""
    angles = [2 * math.pi * i / len(kinds) for i in range(len(kinds))]
    best = {kind: max(values.values()) for kind, values in kinds.items()}
    for method, color in colors_of(next(iter(kinds.values())), methods).items():
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


def latency(measured: Measured) -> Any:
    """Figure 6: seconds of a question, and the searches and closer looks that they were spent on."""
    figure, axes = panels(2 * len(measured.benchmarks), measured.caption)
    for i, (name, rows) in enumerate(measured.benchmarks.items()):
        timed, actions = axes[2 * i : 2 * i + 2]
        title = counted(name, rows.values())
        if seconds := {method: row["cost"]["seconds"] for method, row in rows.items() if "cost" in row}:
            bars(timed, {"": seconds}, measured.methods, "{:.3g}")
            timed.set(title=title, ylabel="seconds of a question, shared side by side", xticks=[])
        else:
            missing(timed, f"{name}: seconds", measured.missing.get("seconds", "seconds were not measured"))
        counts = {
            label: [row.get(key, 0.0) for row in rows.values()]
            for key, label in (("searches_per_question", "searches"), ("crops_per_question", "closer looks"))
        }
        tops = stacks(actions, counts, (COLORS[0], COLORS[2]), "{:.2f}", 0.1)
        names = [textwrap.fill(method, _NARROW, break_long_words=False) for method in rows]
        actions.set_xticks(range(len(names)), names, fontsize=8)
        actions.set(title=title, ylabel="per question", ylim=(0, 1.25 * max([*tops, 0.1])))
        legend(actions, loc="upper left", ncols=2)
    return figure
