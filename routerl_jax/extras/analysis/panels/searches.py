"""Panels of searches: by mode, by search number, and for right answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from routerl_jax.evaluation.figures import COLORS, color_of
from routerl_jax.evaluation.report import title
from routerl_jax.extras.analysis.panels.drawing import BELOW, Panel, Rows, stacked


def modes(policies: Rows) -> list[Panel]:
    """Shares of knowledge bases among all searches; [] if there were no searches."""
    names = [title(name) for name in policies]
    shares = [row["mode_usage"] for row in policies.values()]
    return _by_mode(names, shares, "Share of searches by mode")


def modes_by_step(rows: Rows, by: str = "") -> list[Panel]:
    """A bar of modes for every search number of every policy or group of questions, if another one has the same number to
    compare with."""
    steps = [(name, step) for name, row in rows.items() for step in row["mode_by_step"]]
    steps.sort(key=lambda pair: pair[1]["step"])  # stable: policies stay in their order
    names = [f"{step['step']}. {title(name)} ({step['n']})" for name, step in steps]
    return _by_mode(names, [step["mode_usage"] for _, step in steps], f"Each search by mode (searches){by}")


def _by_mode(names: list[str], shares: list[Mapping[str, float]], heading: str) -> list[Panel]:
    used = sorted({mode for share in shares for mode in share})

    def draw(axis: Any) -> None:
        stacked(axis, names, shares, used)
        axis.set_title(heading)

    return [draw] if used else []


def searches_of_correct(rows: Rows, by: str = "") -> list[Panel]:
    """The number of searches of right answers; [] if there were none."""
    right = {name: row["searches_of_correct"] for name, row in rows.items() if row["searches_of_correct"]["share"]}
    return [lambda axis: _searches_of_correct(axis, right, by)] if right else []


def _searches_of_correct(axis: Any, distributions: Rows, by: str) -> None:
    """Distributions over numbers of searches, with their means. They are side by side, or one below the other if there are more
    than colours."""
    numbers = sorted({int(count) for row in distributions.values() for count in row["share"]})
    axis.set_title(f"Searches of questions answered rightly{by}")
    names = [f"{title(name)}: {row['mean']:.2f}" for name, row in distributions.items()]
    if len(distributions) > len(COLORS):
        stacked(axis, names, [row["share"] for row in distributions.values()], [str(number) for number in numbers])
        return
    width = 0.8 / len(distributions)
    for i, (name, row) in enumerate(zip(names, distributions.values())):
        positions = [number - 0.4 + (i + 0.5) * width for number in numbers]
        heights = [row["share"].get(str(number), 0.0) for number in numbers]
        axis.bar(positions, heights, width, color=color_of(i), label=name)
    axis.set(xlabel="searches", ylabel="share", ylim=(0, 1))
    axis.set_xticks(numbers)
    axis.legend(**BELOW, bbox_to_anchor=(0.5, -0.14), ncols=3, title="mean", title_fontsize=8)
