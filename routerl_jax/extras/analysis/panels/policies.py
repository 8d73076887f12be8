"""Panels of policies on the same questions: answers, searches, turns and costs."""

from __future__ import annotations

from typing import Any

from routerl_jax.evaluation.figures import COLORS, color_of
from routerl_jax.evaluation.report import title
from routerl_jax.extras.analysis.panels.drawing import (
    BELOW,
    WHOLE,
    Panel,
    Rows,
    downwards,
    errors,
    size_of,
    stacked,
    table,
)

_LARGEST = 200  # square points; largest marker whose size shows a number
_MEASURES = {
    "em": "EM",
    "searched_rate": "questions with a search",
    "search_ratio": "searches made of those allowed",
}
_FOUR_WAYS = {  # parts of the breakdown: label, colour, and colour of numbers in it
    "correct_without_search": ("right, no search", "#2e8b57", "white"),
    "correct_with_search": ("right, searched", "#9bd1b1", "black"),
    "wrong_with_search": ("wrong, searched", "#f0b9a8", "black"),
    "wrong_without_search": ("wrong, no search", "#c0392b", "white"),
}
_LEAST = 0.04  # smallest share of a bar with room for its number


def answers_and_searches(policies: Rows) -> Panel:
    """A table of EM and searches."""
    measures = _measured(policies)
    names = [title(name) for name in policies]
    shares = [[row.get(measure) for measure in measures] for row in policies.values()]
    columns = [_MEASURES[measure].replace(" with ", "\nwith ").replace(" of ", "\nof ") for measure in measures]
    return lambda axis: table(axis, names, columns, shares, "Answers and searches, %")


def tables_by_group(policies: Rows, key: str) -> list[Panel]:
    """EM and searches by group of questions, one panel per measure (MMSearch-R1, arXiv 2506.20670, figure 5a)."""
    groups = {name: row["by"][key] for name, row in policies.items() if key in row["by"]}
    values = next(iter(groups.values()))
    rows = [f"{value} ({row['n']})" for value, row in values.items()]
    names = [title(name) for name in groups]
    panels: list[Panel] = []
    for measure in _measured(values):
        shares = [[group[value].get(measure) for group in groups.values()] for value in values]
        heading = f"{_MEASURES[measure][0].upper()}{_MEASURES[measure][1:]}, %"
        panels.append(lambda axis, shares=shares, heading=heading: table(axis, rows, names, shares, heading))
    return panels


def _measured(rows: Rows) -> list[str]:
    return [measure for measure in _MEASURES if any(measure in row for row in rows.values())]


def four_ways(rows: Rows, heading: str) -> Panel:
    """Right and wrong answers, with and without a search (figure 4b). `rows`: by the names of the bars."""
    labels, colors, inks = zip(*_FOUR_WAYS.values())
    shares = [row["breakdown"] for row in rows.values()]

    def draw(axis: Any) -> None:
        stacked(axis, list(rows), shares, list(_FOUR_WAYS), colors, labels)
        for bars, part, ink in zip(axis.containers, _FOUR_WAYS, inks):
            numbers = [f"{100 * share[part]:.0f}" if share[part] >= _LEAST else "" for share in shares]
            axis.bar_label(bars, numbers, label_type="center", fontsize=min(size_of(len(rows)), 8), color=ink)
        axis.set_title(heading)

    return draw


def turns(axis: Any, policies: Rows) -> None:
    """Turns and searches per question of each policy, as bars."""
    names = [title(name) for name in policies]
    axis.barh(names, [row["turns"] for row in policies.values()], color=COLORS[0], height=0.6, label="turns")
    axis.barh(names, [row["searches"] for row in policies.values()], color=COLORS[2], height=0.3, label="searches")
    downwards(axis)
    axis.set(title="Turns and searches per question")
    axis.legend(**BELOW, bbox_to_anchor=(0.5, -0.06), ncols=2)


def cost(axis: Any, policies: Rows, single: Rows, policy: str) -> None:
    """EM against cost. Policies are dots. The policy with a single mode is a square, if it has the same number of questions;
    they often coincide."""
    count = policies[policy]["n"]
    fixed = {name: row for name, row in single.items() if name != "trained" and row["n"] == count}
    looks = [{"fmt": "o", "markersize": 6}] * len(policies) + [{"fmt": "s", "markersize": 11, "mfc": "none"}] * len(
        fixed
    )
    for i, ((name, row), look) in enumerate(zip([*policies.items(), *fixed.items()], looks)):
        spent, em = row["retrieval_cost"], row["em"]
        axis.errorbar(spent, em, yerr=errors([row]), color=color_of(i), capsize=3, label=title(name), **look, **WHOLE)
    axis.set(title="EM (95 %) against retrieval cost", xlabel="retrieval cost per question", ylim=(0, 1.02))
    axis.set_xlim(0, max(axis.get_xlim()[1], 0.1))
    axis.legend(**BELOW, bbox_to_anchor=(0.5, -0.14), ncols=3)


def em_by(axis: Any, policies: Rows, key: str, heading: str) -> None:
    """EM over turns or tokens."""
    most = max((point["n"] for row in policies.values() for point in row[key]), default=1)
    for i, (name, row) in enumerate(policies.items()):
        points, color = row[key], color_of(i)
        x = [point["turns"] if "turns" in point else (point["from"] + point["to"]) / 2 for point in points]
        axis.plot(x, [point["em"] for point in points], color=color, linewidth=1.5, label=title(name))
        sizes = [8 + _LARGEST * point["n"] / most for point in points]
        axis.scatter(x, [point["em"] for point in points], s=sizes, color=color, **WHOLE)
    axis.set(title=heading, ylim=(-0.05, 1.05), xlabel="turns" if "turns" in key else "tokens")
    axis.margins(x=0.08)
    if "turns" in key:
        axis.xaxis.get_major_locator().set_params(integer=True)
    axis.legend(frameon=False, fontsize=8, loc="best", title="size: questions", title_fontsize=8)
