"""Figures of papers: what they are drawn from, and the parts that they share: panels, bars by method, curves over training."""

from __future__ import annotations

import collections
import dataclasses
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

from routerl_jax.core.registry import Registry
from routerl_jax.evaluation.figures import color_of, curve, legend, new_figure, panels_of
from routerl_jax.evaluation.metrics import JUDGE, by_group
from routerl_jax.extras.analysis.numbers import behaviour
from routerl_jax.extras.comparison.papers.table import NAMED, PAPERS

Row = Mapping[str, Any]  # an agent's metrics on a benchmark: evaluation.metrics.summarize, of a comparison with `cost`
Records = Sequence[dict[str, Any]]
TEST = "The run's test questions"
Draw = TypeVar("Draw", bound=Callable[[Any], Any])
WIDTH, HEIGHT = 5.0, 3.9  # inches of a panel
REWARD, LENGTH, SEARCHES = "reward/total", "rollout/tokens_per_question", "rollout/searches_per_question"
_GREY = "#555555"
_NARROW = 14  # letters of a line under bars


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaperFigure:
    """A figure of a paper, with values that are measured here (launch.analyze --figures).

    Attributes:
      recipe: the recipe that the figure is about.
      shows: what the figure plots.
      needs: what must have been run for all of it.
      methods: the methods in it.
      draw: makes the figure.
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
    draw: Callable[[Measured], Any]
    tries: Literal["", "pages", "documents"] = ""
    over_training: bool = False
    records: bool = False

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of --rows that the figure uses."""
        return tuple(dict.fromkeys(method.key for method in self.methods if method.key))


PAPER_FIGURES: Registry[PaperFigure] = Registry("figure of a paper")
A_RUN = "RUN (--workdir)"
COMPARED = "DIR of a comparison (--output)"
FIGURE_HEADINGS = ("name", "paper", "shows", "needs", "runs to be named (--rows)")


def paper_figure(recipe: str, number: int, **fields: Any) -> Callable[[Draw], Draw]:
    """Registers what draws a figure of a recipe's paper as `RECIPE.figureNUMBER`. `fields` are further ones of PaperFigure."""

    def register(draw: Draw) -> Draw:
        title = f"{PAPERS[recipe]['title']}, Figure {number}"
        figure = PaperFigure(title=title, paper=PAPERS[recipe]["paper"], recipe=recipe, draw=draw, **fields)
        PAPER_FIGURES.register(f"{recipe}.figure{number}")(figure)
        return draw

    return register


def listing() -> list[tuple[str, str, str, str, str]]:
    """(name, paper, what it shows, what it needs, keys of --rows) of every figure, sorted by name."""
    figures = [(name, PAPER_FIGURES.get(name)) for name in PAPER_FIGURES]
    return [
        (name, figure.paper, figure.shows, figure.needs, ", ".join(figure.keys)) for name, figure in sorted(figures)
    ]


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


def counted(name: str, rows: Any) -> str:
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


def legend_below(figure: Any, axes: Sequence[Any]) -> None:
    """One legend for all panels, under the figure."""
    handles = {label: line for axis in axes for line, label in zip(*axis.get_legend_handles_labels())}
    if handles:
        figure.legend(
            list(handles.values()), list(handles), loc="outside lower center", ncols=len(handles), frameon=False
        )


def over_steps(axis: Any, measured: Measured, key: str, title: str, methods: Sequence[Method]) -> None:
    """Draws a metric of training over the steps: for each run a faint line of its values and a bold one of the running mean."""
    runs = {label: rows for label, rows in measured.training.items() if any(row.get(key) is not None for row in rows)}
    if not runs:
        missing(axis, title, "no run with metrics of training is given")
        return
    colors = colors_of(runs, methods)
    for label, rows in runs.items():
        curve(axis, rows, key, label, colors[label])
    axis.set(title=title, xlabel="step")
    if key != REWARD:  # counts and shares begin at 0
        axis.set_ylim(0, max(axis.get_ylim()[1], 0.1))
    legend(axis)


def parts(measured: Measured, metrics: Collection[str]) -> dict[str, dict[str, Row]]:
    """The rows with these metrics, by the parts that the figure compares.

    The parts are the benchmarks. A single benchmark, or a run, also has its groups of questions as parts (data sets, else
    kinds, else types).
    """
    rows_by_part = {name: _rows_with(rows, metrics) for name, rows in measured.benchmarks.items()}
    if len(rows_by_part) == 1:
        ((name, rows),) = measured.benchmarks.items()
        groups = _groups(rows)
        rows_by_part = {_short(name): rows_by_part[name]} | {
            group: _rows_with({label: row["by"][key][group] for label, row in rows.items() if key}, metrics)
            for key, values in groups.items()
            for group in values
        }
    return {name: rows for name, rows in rows_by_part.items() if rows}


def behaviours(measured: Measured, pools: Mapping[str, str] | None = None) -> dict[str, dict[str, dict[str, Any]]]:
    """`extras.analysis.numbers.behaviour` of the records, by the same parts.

    Args:
      pools: the name of the pool that a benchmark joins, by its name. Other benchmarks stay alone.
    """
    pooled: dict[str, dict[str, list[Any]]] = collections.defaultdict(lambda: collections.defaultdict(list))
    for name, by_method in measured.records.items():
        for label, records in by_method.items():
            pooled[(pools or {}).get(name, name)][label] += records
    if len(pooled) == 1:
        ((name, by_method),) = pooled.items()
        parts_of: dict[str, Mapping[str, Records]] = {_short(name): by_method, **_grouped(by_method)}
    else:
        parts_of = dict(pooled)
    return {name: {label: behaviour(rows) for label, rows in by_method.items()} for name, by_method in parts_of.items()}


def _grouped(by_method: Mapping[str, Records]) -> dict[str, dict[str, Records]]:
    """Records by group of questions and label; {} if the questions have no groups."""
    groups: dict[str, dict[str, Records]] = {}
    for label, records in by_method.items():
        values = next(iter(by_group([record.get("metadata", {}) for record in records]).values()), {})
        for value, numbers in values.items():
            groups.setdefault(value, {})[label] = [records[i] for i in numbers]
    return groups


def _groups(rows: Mapping[str, Row]) -> dict[str, list[str]]:
    """The first key by which all rows have groups, with its values; {} if there is none."""
    keys = [row.get("by", {}) for row in rows.values()]
    shared = next((key for key in (keys[0] if keys else ()) if all(key in groups for groups in keys)), None)
    return (
        {shared: [value for value in keys[0][shared] if all(value in group_values[shared] for group_values in keys)]}
        if shared
        else {}
    )


def _rows_with(rows: Mapping[str, Row], metrics: Collection[str]) -> dict[str, Row]:
    return {label: row for label, row in rows.items() if all(row.get(metric) is not None for metric in metrics)}


def _short(name: str) -> str:
    return "all questions" if name == TEST else name
