"""Figures of a run: learning curves, and the use of knowledge bases over training."""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from routerl_jax.evaluation.report import heading

COLORS = ("#3366cc", "#dc7633", "#2e8b57", "#8e44ad", "#c0392b", "#7f8c8d")


def color_of(index: int) -> str:
    """The colour of line or bar number `index`. Colours repeat."""
    return COLORS[index % len(COLORS)]


def training_figures(rows: Sequence[dict[str, Any]], directory: pathlib.Path, knowledge_bases: tuple[str, ...]) -> None:
    """Writes learning_curves.png and kb_usage.png from metrics.jsonl rows; nothing if there are no rows."""
    if not rows:
        return
    directory.mkdir(parents=True, exist_ok=True)
    _learning_curves(rows, directory / "learning_curves.png")
    _kb_usage(rows, directory / "kb_usage.png", knowledge_bases)


def comparison_figure(table: Mapping[str, Mapping[str, Any]], path: pathlib.Path, metric: str = "em") -> None:
    """Writes a bar chart per agent of an answer metric with its interval, and of searches per question."""
    path.parent.mkdir(parents=True, exist_ok=True)
    names = [name for name in table if table[name].get("n_answered", 1)]  # those with any reply of the policy
    figure, (quality, searches) = _axes(2, 5.0)
    means = [table[name][metric] for name in names]
    errors = [
        [max(mean - table[name][f"{metric}_interval"][0], 0) for mean, name in zip(means, names)],
        [max(table[name][f"{metric}_interval"][1] - mean, 0) for mean, name in zip(means, names)],
    ]
    quality.barh(names, means, xerr=errors, color=COLORS[0], height=0.6, capsize=3)
    quality.set(title=f"{heading(metric)[:-2]} with 95 % interval", xlim=(0, 1.02), xlabel="")
    searches.barh(names, [table[name]["searches_per_question"] for name in names], color=COLORS[2], height=0.6)
    searches.set(title="Searches per question", xlabel="")
    for axis in (quality, searches):
        axis.invert_yaxis()
        axis.grid(visible=False, axis="y")
    save_figure(figure, path)


def difficulty_figure(rollouts: Sequence[int | None], easy_below: int, hard_above: int, path: pathlib.Path) -> None:
    """Writes a histogram of the number of attempts until questions were answered (None: never), coloured by difficulty."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure, (axis,) = _axes(1, 7.0)
    numbers = list(range(1, hard_above + 1))
    counts = [sum(value == number for value in rollouts) for number in numbers]
    colors = [COLORS[2] if number < easy_below else COLORS[1] for number in numbers]
    axis.bar(numbers, counts, color=colors)
    axis.bar([hard_above + 2], [sum(value is None for value in rollouts)], color=COLORS[4])
    ticks = sorted({1, easy_below, hard_above})
    axis.set_xticks([*ticks, hard_above + 2], [*map(str, ticks), f"> {hard_above}"])
    axis.set(
        title=f"{len(rollouts)} questions: easy (< {easy_below}), medium, hard (> {hard_above})",
        xlabel="attempts until the first right answer",
        ylabel="questions",
    )
    save_figure(figure, path)


def new_figure(size: tuple[float, float]) -> Any:
    """An empty figure of this size in inches. It is not pyplot's, so that the figures of a notebook stay as they are."""
    from matplotlib.figure import Figure

    return Figure(figsize=size, layout="constrained")


def panels_of(figure: Any, rows: int, columns: int) -> list[Any]:
    """New panels of a figure, or of a part of one, in reading order."""
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    return axes


def _axes(count: int, width: float = 4.2) -> tuple[Any, list[Any]]:
    figure = new_figure((width * count, 3.4))
    axes = panels_of(figure, 1, count)
    for axis in axes:
        axis.set_xlabel("step")
    return figure, axes


def _series(rows: Sequence[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    points = [(row["step"] + 1, row[key]) for row in rows if row.get(key) is not None]
    return [step for step, _ in points], [value for _, value in points]


def curve(axis: Any, rows: Sequence[dict[str, Any]], key: str, label: str, color: str) -> None:
    """Draws a metric over the steps, faintly, and its running mean over nine values, or a sixth of all if they are few."""
    steps, values = _series(rows, key)
    if steps:
        window = max(1, min(9, len(values) // 6))
        parts = [values[max(0, i + 1 - window) : i + 1] for i in range(len(values))]
        axis.plot(steps, values, color=color, alpha=0.2, linewidth=1)
        axis.plot(steps, [sum(part) / len(part) for part in parts], color=color, label=label, linewidth=2)


def _learning_curves(rows: Sequence[dict[str, Any]], path: pathlib.Path) -> None:
    figure, (quality, second, health) = _axes(3)
    stepwise = _of_golden_steps(rows, "rollout")
    for key, name, color in _quality(stepwise):
        curve(quality, rows, f"rollout/{key}", f"{name}, sampled", color)
    for key, name, color in _quality(_of_golden_steps(rows, "validation")):
        steps, values = _series(rows, f"validation/{key}")
        if steps:
            quality.plot(steps, values, "o", color=color, label=f"{name}, held out", markersize=5)
    drawn = "answers and routing" if _routed(rows) else "answers"
    quality.set(title=f"Golden steps: {drawn}" if stepwise else drawn.capitalize(), ylim=(0, 1.02))
    legend(quality, loc="lower right")
    second.set(title=_effort(second, rows), ylim=(0, None))
    curve(health, rows, "reward/total", "reward", COLORS[3])
    curve(health, rows, "rollout/frac_reward_zero_std", "groups without signal", COLORS[5])
    curve(health, rows, "actor/kl", "KL to the start", COLORS[4])
    health.set(title="Reward and health")
    legend(health)
    _mark_stages((quality, second, health), rows)
    save_figure(figure, path)


def _effort(axis: Any, rows: Sequence[dict[str, Any]]) -> str:
    """Draws searches, and their cost if costs differ. Returns the title."""
    if not any(row.get("rollout/searches_per_question") for row in rows):  # golden steps make no searches
        curve(axis, rows, "rollout/tokens_per_question", "tokens", COLORS[2])
        return "Sampled tokens per attempt"
    curve(axis, rows, "rollout/searches_per_question", "searches", COLORS[2])
    searches, costs = (_series(rows, f"rollout/{key}")[1] for key in ("searches_per_question", "retrieval_cost"))
    if not costs or costs == searches:
        return "Searches per question"
    curve(axis, rows, "rollout/retrieval_cost", "their cost", COLORS[1])
    steps, values = _series(rows, "validation/retrieval_cost")
    if steps:
        axis.plot(steps, values, "o", color=COLORS[1], label="cost, held out", markersize=5)
    legend(axis)
    return "Searches per question, and their cost"


def _mark_stages(axes: Sequence[Any], rows: Sequence[dict[str, Any]]) -> None:
    """Draws a line at the beginning of every stage but the first, with its name on the first of the axes."""
    for before, row in itertools.pairwise(rows):
        if (stage := row.get("stage")) == before.get("stage"):
            continue
        for axis in axes:
            axis.axvline(row["step"], color="#555555", linestyle=":", linewidth=1)
        axes[0].annotate(
            str(stage), (row["step"], 0.02), xytext=(4, 0), textcoords="offset points", fontsize=8, color="#555555"
        )


def _of_golden_steps(rows: Sequence[dict[str, Any]], source: str) -> bool:
    return any(row.get(f"{source}/em/{kind}") is not None for row in rows for kind in ("answer", "final"))


def _routed(rows: Sequence[dict[str, Any]]) -> bool:
    """Whether the right knowledge base of searches is known."""
    return any(row.get("rollout/routing_accuracy") is not None for row in rows)


def _quality(stepwise: bool) -> list[tuple[str, str, str]]:
    """(key, name, colour) of the curves of answers (for golden steps, by kind of step) and of routing."""
    final = [("em", "EM", COLORS[0])]
    steps = [("em/final", "EM of final answers", COLORS[0]), ("em/answer", "EM of sub-answers", COLORS[2])]
    return [*(steps if stepwise else final), ("routing_accuracy", "routing", COLORS[1])]


def _kb_usage(rows: Sequence[dict[str, Any]], path: pathlib.Path, knowledge_bases: tuple[str, ...]) -> None:
    figure, (shares, invalid) = _axes(2, 5.0)
    for i, name in enumerate(knowledge_bases):
        filled = [{**row, f"rollout/kb/{name}": row.get(f"rollout/kb/{name}", 0.0)} for row in rows]
        curve(shares, filled, f"rollout/kb/{name}", name, color_of(i))
    shares.set(title="Share of searches by knowledge base", ylim=(0, 1))
    _mark_stages((shares, invalid), rows)
    legend(shares)
    curve(invalid, rows, "rollout/routing_accuracy", "sent to the right one", COLORS[2])
    curve(invalid, rows, "rollout/invalid_action_rate", "invalid actions", COLORS[4])
    curve(invalid, rows, "rollout/repeated_search_rate", "asked the same twice", COLORS[3])
    if _routed(rows):
        invalid.set(title="Routing, repeated searches, invalid actions", ylim=(0, 1.02))
    else:
        invalid.set(title="Repeated searches, invalid actions", ylim=(0, None))
    legend(invalid)
    save_figure(figure, path)


def dots(
    axis: Any, series: Sequence[tuple[str, Sequence[tuple[float, float, float] | None]]], names: Sequence[str]
) -> None:
    """Draws shares as dots with their intervals, in percent.

    Each name has a row, from top to bottom. Its series are drawn slightly apart.

    Args:
      series: label and, for each name, (mean, low, high), or None if there is none.
    """
    spacing = 0.5 / len(series)
    for number, (label, values) in enumerate(series):
        shown = [(row, [100 * part for part in value]) for row, value in enumerate(values) if value is not None]
        heights = [row + (number - (len(series) - 1) / 2) * spacing for row, _ in shown]
        errors = [
            [max(mean - low, 0) for _, (mean, low, _) in shown],
            [max(high - mean, 0) for _, (mean, _, high) in shown],
        ]
        means = [mean for _, (mean, _, _) in shown]
        axis.errorbar(
            means, heights, xerr=errors, fmt="o", color=color_of(number), label=label, markersize=4.5, elinewidth=1.2
        )
    axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.set_ylim(len(names) - 0.5, -0.5)


def legend(axis: Any, **options: Any) -> None:
    """Adds a legend to an axis, if anything is drawn on it."""
    if axis.get_legend_handles_labels()[0]:
        axis.legend(frameon=False, fontsize=8, **options)


def save_figure(figure: Any, path: pathlib.Path) -> None:
    """Writes a figure as a PNG."""
    figure.savefig(path, dpi=130)
