"""Panels that compare the start with the trained policy: in the same workflow, and for a price on searches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from routerl_jax.evaluation.report import title
from routerl_jax.extras.analysis.panels.drawing import BELOW, WHOLE, Panel, Rows, downwards, errors

_MARKERS = "osD^v<>P"
_LARGEST, _SMALLEST = 200, 80  # square points; different sizes, so that markers that coincide are all visible


def workflow_panels(workflows: Mapping[str, Rows], colors: Mapping[str, str]) -> list[Panel]:
    """EM of several policies under each workflow, and by group of questions (MMSearch-R1, arXiv 2506.20670, figure 4a).

    Args:
      workflows: by workflow and policy. Workflows with a single policy are left out.
      colors: colours of the policies, by name.
    """
    compared = {name: rows for name, rows in workflows.items() if len(rows) > 1}
    if not compared:
        return []
    named = {title(name): rows for name, rows in compared.items()}
    panels: list[Panel] = [lambda axis: _grouped(axis, named, "EM in the same workflow", colors)]
    for name, rows in compared.items():
        for key, groups in next(iter(rows.values()))["by"].items():
            values = {
                f"{value} ({row['n']})": {policy: row_of["by"][key][value] for policy, row_of in rows.items()}
                for value, row in groups.items()
            }
            heading = f"EM in {title(name)}, by {key} (questions)"
            panels.append(lambda axis, values=values, heading=heading: _grouped(axis, values, heading, colors))
    return panels


def _grouped(axis: Any, groups: Mapping[str, Rows], heading: str, colors: Mapping[str, str]) -> None:
    """For each group, a bar per policy with its interval."""
    policies = list(next(iter(groups.values())))
    height = 0.8 / len(policies)
    for i, policy in enumerate(policies):
        rows = [group[policy] for group in groups.values()]
        positions = [number - 0.4 + (i + 0.5) * height for number in range(len(groups))]
        em = [row["em"] for row in rows]
        axis.barh(positions, em, height, xerr=errors(rows), color=colors[policy], capsize=2, label=title(policy))
    axis.set_yticks(range(len(groups)), list(groups))
    downwards(axis, len(groups))
    axis.set(title=heading, xlim=(0, 1.02), xlabel="EM (95 %)")
    axis.legend(**BELOW, bbox_to_anchor=(0.5, -0.14), ncols=len(policies))


def calibration(axis: Any, penalty: float, kinds: Rows) -> None:
    """EM of the start without a search (P_c, closed book) and with searches (P_s, open book), and how often the trained policy
    searches.

    Below the lower line a search pays in spite of its price. Above the upper line it never pays. In between the price decides.
    """
    paid = 1 - penalty
    axis.plot([0, 1], [0, 1], color="#555555", linewidth=1)
    axis.plot([0, 1], [0, paid], color="#555555", linewidth=1, linestyle="--")
    axis.fill_between([0, 1], [0, paid], [0, 1], color="#dc7633", alpha=0.15, linewidth=0, label="the price decides")
    sizes = [_LARGEST - (_LARGEST - _SMALLEST) * i / max(len(kinds) - 1, 1) for i in range(len(kinds))]
    drawn = None
    for i, ((kind, row), size) in enumerate(zip(kinds.items(), sizes)):
        rate = row["searched_rate"]
        drawn = axis.scatter(
            [row["open_book"]],
            [row["closed_book"]],
            c=[rate],
            s=size,
            vmin=0,
            vmax=1,
            cmap="viridis",
            marker=_MARKERS[i % len(_MARKERS)],
            edgecolors="black",
            linewidths=0.6,
            label=f"{kind} ({row['n']}): {100 * rate:.0f} %",
            zorder=3,
            **WHOLE,
        )
    axis.figure.colorbar(drawn, ax=axis, label="questions with a search, trained")
    axis.set(
        title=f"What the start knows and finds; a search costs {100 * penalty:.0f} %",
        xlabel="P_s: EM with every search",
        ylabel="P_c: EM without a search",
        xlim=(0, 1),
        ylim=(0, 1),
    )
    axis.legend(frameon=False, fontsize=8, loc="upper left", title="kind (questions): searched", title_fontsize=8)
