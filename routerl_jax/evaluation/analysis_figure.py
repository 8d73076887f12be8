"""The picture of an analysis: turns, modes, cost against accuracy, and sweeps."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

from routerl_jax.evaluation.figures import COLORS, save_figure
from routerl_jax.evaluation.report import title


def analysis_figure(analysis: Mapping[str, Any], path: pathlib.Path) -> None:
    """Writes the panels of an analysis (launch.analyze) that it has data for."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 3, figsize=(14, 7.4), constrained_layout=True)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    policies, fixed = analysis["policies"], analysis.get("single_mode", {})
    _turns(axes[0, 0], policies)
    _modes(axes[0, 1], policies)
    _cost(axes[0, 2], policies, fixed)
    _by(axes[1, 0], policies, "em_by_turns", "EM by number of turns")
    _by(axes[1, 1], policies, "em_by_tokens", "EM by sampled tokens")
    _sweep(axes[1, 2], analysis.get("top_k", {}), analysis.get("retrievers", {}))
    path.parent.mkdir(parents=True, exist_ok=True)
    save_figure(figure, path)


def _turns(axis: Any, policies: Mapping[str, Any]) -> None:
    names = [title(name) for name in policies]
    axis.barh(names, [row["turns"] for row in policies.values()], color=COLORS[0], height=0.6, label="turns")
    axis.barh(
        names, [row["searches"] for row in policies.values()], color=COLORS[2], height=0.3, label="of them searches"
    )
    axis.invert_yaxis()
    axis.grid(visible=False, axis="y")
    axis.set(title="Turns per question")
    axis.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.06), ncols=2)


def _modes(axis: Any, policies: Mapping[str, Any]) -> None:
    names = [title(name) for name in policies]
    modes = sorted({mode for row in policies.values() for mode in row["mode_usage"]})
    left = [0.0] * len(names)
    for mode, color in zip(modes, COLORS):
        widths = [row["mode_usage"].get(mode, 0.0) for row in policies.values()]
        axis.barh(names, widths, left=left, color=color, height=0.6, label=mode)
        left = [a + b for a, b in zip(left, widths)]
    axis.invert_yaxis()
    axis.grid(visible=False, axis="y")
    axis.set(title="Share of searches by mode", xlim=(0, 1))
    axis.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.06), ncols=max(len(modes), 1))


def _cost(axis: Any, policies: Mapping[str, Any], fixed: Mapping[str, Any]) -> None:
    rows = [*((name, row, "o") for name, row in policies.items()), *((name, row, "s") for name, row in fixed.items())]
    for i, (name, row, marker) in enumerate(rows):
        low, high = row["em_interval"]
        error = [[max(row["em"] - low, 0)], [max(high - row["em"], 0)]]
        axis.errorbar(
            row["retrieval_cost"],
            row["em"],
            yerr=error,
            fmt=marker,
            color=COLORS[i % len(COLORS)],
            markersize=7,
            capsize=3,
            label=title(name),
        )
    axis.set(
        title="EM (95 %) against retrieval cost", xlabel="retrieval cost per question", ylim=(0, 1.02), xlim=(0, None)
    )
    axis.legend(frameon=False, fontsize=8, loc="lower right")


def _by(axis: Any, policies: Mapping[str, Any], key: str, heading: str) -> None:
    for (name, row), color in zip(policies.items(), COLORS):
        points = row[key]
        x = [point["turns"] if "turns" in point else (point["from"] + point["to"]) / 2 for point in points]
        axis.plot(x, [point["em"] for point in points], color=color, linewidth=1.5, label=title(name))
        axis.scatter(x, [point["em"] for point in points], s=[8 + 0.5 * point["n"] for point in points], color=color)
    axis.set(title=f"{heading} (dots: questions)", ylim=(-0.05, 1.05), xlabel="turns" if "turns" in key else "tokens")
    if "turns" in key:
        axis.xaxis.get_major_locator().set_params(integer=True)
    axis.legend(frameon=False, fontsize=8, loc="lower left")


def _sweep(axis: Any, top_k: Mapping[str, Any], retrievers: Mapping[str, Any]) -> None:
    for name, row in retrievers.items():
        axis.axhline(row["em"], color=COLORS[-1], linestyle=":", linewidth=1)
        axis.annotate(f"EM with {name}", (0.02, row["em"]), xycoords=("axes fraction", "data"), fontsize=8, va="bottom")
    if top_k:
        ks = [int(k) for k in top_k]
        axis.plot(ks, [row["em"] for row in top_k.values()], "o-", color=COLORS[0], label="EM")
        axis.plot(ks, [row["searches"] for row in top_k.values()], "s-", color=COLORS[2], label="searches per question")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.legend(frameon=False, fontsize=8)
    axis.set(title="Passages per search (top-k), retrievers", xlabel="k", ylim=(0, None))
