"""Draws R1-Searcher's figures 2 to 6 (Song et al., arXiv 2503.05592). The layout follows captions and text of the paper."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from routerl_jax.evaluation.figures import COLORS
from routerl_jax.extras.comparison.papers.figure import (
    COMPARED,
    LENGTH,
    REWARD,
    SEARCHES,
    Measured,
    Method,
    legend_below,
    missing,
    over_steps,
    panels,
    paper_figure,
)
from routerl_jax.extras.comparison.papers.table import PAPER_TABLES

# by the figure's number: what is compared, and its methods
_OVER_TRAINING: Mapping[int, tuple[str, tuple[Method, ...]]] = {
    2: ("GRPO and Reinforce++", (Method("GRPO", "row:grpo"), Method("Reinforce++", "row:reinforce_pp"))),
    3: (
        "answers rewarded by EM, CEM and F1",
        (Method("EM", "row:em"), Method("CEM", "row:cover_em"), Method("F1", "row:f1")),
    ),
    4: (
        "training without and with difficult questions",
        (Method("w/o Difficult", "row:no_difficult"), Method("w. Difficult", "row:difficult")),
    ),
    5: (
        "training on HotpotQA, 2Wiki and both",
        (Method("HotpotQA", "row:hotpotqa"), Method("2Wiki", "row:2wiki"), Method("Mixture", "row:mixture")),
    ),
}
_TABLE_2 = PAPER_TABLES.get("r1_searcher.table2")
_SHOWN = {REWARD: "Reward", LENGTH: "Response length, tokens", SEARCHES: "Searches of an attempt"}
_WAYS = {"online": ("online search", COLORS[1]), "local": ("local search", COLORS[0]), "": ("no search", COLORS[5])}
_BAR = 0.24  # inches
_BAMBOOGLE = "bamboogle"


def over_training(measured: Measured, methods: tuple[Method, ...]) -> Any:
    """Figures 2 to 5: reward, response length and searches over the steps, a line per run."""
    figure, axes = panels(len(_SHOWN), measured.caption)
    for axis, (key, title) in zip(axes, _SHOWN.items()):
        over_steps(axis, measured, key, title, methods)
    return figure


for _number, (_compared, _methods) in _OVER_TRAINING.items():
    paper_figure(
        "r1_searcher",
        _number,
        shows=f"reward, response length and searches over the steps: {_compared}",
        needs="a run for each key (--rows), or RUN (--workdir) and its controls; none need have ended",
        methods=_methods,
        over_training=True,
    )(functools.partial(over_training, methods=_methods))


@paper_figure(
    "r1_searcher",
    6,
    shows="CEM on Bamboogle, searched locally and on the web, beside table 2's",
    needs=f"{COMPARED} on bamboogle with the local corpus, and one with config.knowledge=\"{{'text': {{'kind': 'web', "
    "'directory': 'kb/web'}}\" (docs/web.md), joined by config.compare_with",
    methods=(
        *(Method(row.method, row.agent) for row in _TABLE_2.rows if row.group == "GPT" and row.agent),
        Method("Search-o1", "search_o1"),
        Method("R1-Searcher", "recipe:r1_searcher"),
    ),
)
def online(measured: Measured) -> Any:
    """Figure 6: covered exact match on Bamboogle of every agent, by whether it searches a local corpus or the web. The paper's
    numbers of the local search are those of its table 2; the others stand in its picture alone."""
    rows = list(_rows(measured))
    lacking = [_WAYS[way][0] for way in ("online", "local") if not any(row[2] == way for row in rows)]
    caption = measured.caption
    if lacking:
        caption += (
            f" Not run: {' and '.join(lacking)} (two comparisons, one with a knowledge base of kind web; compare_with)."
        )
    column = next(i for i, column in enumerate(_TABLE_2.columns) if column.benchmarks == (_BAMBOOGLE,))
    published = [
        (f"{row.method} ({row.group})", value, "" if row.agent == "direct" else "local", None)
        for row in _TABLE_2.rows
        if row.group != "GPT" and (value := row.published[column]) is not None
    ]
    figure, (ours, paper) = panels(2, caption.strip(), width=6.5)
    figure.set_figheight(1.6 + _BAR * max(len(rows), len(published)))
    title = f"{_benchmark(measured)}: CEM, 95 % intervals"
    if rows:
        _ways(ours, rows, title)
    else:
        missing(ours, title, "a comparison is needed (launch.evaluate --config=configs/eval/..)")
    _ways(paper, published, "The paper, Bamboogle: table 2 (Llama, Qwen)")
    legend_below(figure, [ours, paper])
    return figure


def _benchmark(measured: Measured) -> str:
    """Bamboogle, or the first benchmark where it was not run."""
    names = [name for compared in measured.comparisons.values() for name in compared["benchmarks"]]
    return _BAMBOOGLE if _BAMBOOGLE in names or not names else names[0]


def _rows(measured: Measured) -> Iterator[tuple[str, float, str, list[float] | None]]:
    """(agent, CEM, way of searching, interval) of every agent in the comparison and in those beside it."""
    benchmark = _benchmark(measured)
    for compared in measured.comparisons.values():
        bases = compared["card"]["benchmarks"].get(benchmark, {}).get("knowledge", {})
        way = "online" if any(base.get("kind") == "web" for base in bases.values()) else "local"
        for name, row in compared["benchmarks"].get(benchmark, {}).get("rows", {}).items():
            yield name, row["cover_em"], way if row["searched_rate"] else "", row.get("cover_em_interval")


def _ways(axis: Any, rows: Sequence[tuple[str, float, str, list[float] | None]], title: str) -> None:
    for way, (label, color) in _WAYS.items():
        numbered = [(y, row) for y, row in enumerate(rows) if row[2] == way]
        if not numbered:
            continue
        values = [row[1] for _, row in numbered]
        ends = [row[3] or [row[1], row[1]] for _, row in numbered]
        lower = [max(value - low, 0) for value, (low, _) in zip(values, ends)]
        upper = [max(high - value, 0) for value, (_, high) in zip(values, ends)]
        ys, errors = [y for y, _ in numbered], [lower, upper]
        drawn = axis.barh(ys, values, xerr=errors, height=0.7, color=color, label=label, ecolor="#333333")
        axis.bar_label(drawn, [f" {value:.3f}" for value in values], fontsize=7)
    axis.set_yticks(range(len(rows)), [row[0] for row in rows], fontsize=8)
    axis.invert_yaxis()
    axis.margins(x=0.12)
    axis.grid(visible=False, axis="y")
    axis.set_axisbelow(True)
    axis.set(title=title, xlabel="covered exact match")
