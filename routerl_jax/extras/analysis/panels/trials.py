"""Panels of a trained policy under other conditions."""

from __future__ import annotations

from typing import Any

from routerl_jax.evaluation.figures import COLORS
from routerl_jax.evaluation.report import title
from routerl_jax.extras.analysis.panels.drawing import WHOLE, Rows, downwards, errors


def top_k(axis: Any, rows: Rows) -> None:
    """EM and searches by passages per search."""
    ks = [int(k) for k in rows]
    em = [row["em"] for row in rows.values()]
    axis.errorbar(ks, em, yerr=errors(list(rows.values())), fmt="o-", color=COLORS[0], capsize=3, **WHOLE)
    axis.set(title="Passages per search", xlabel=f"k ({_asked(rows)})", ylim=(0, 1.02))
    axis.set_ylabel("EM (95 %)", color=COLORS[0])
    axis.xaxis.get_major_locator().set_params(integer=True)
    searches = axis.twinx()
    searches.plot(ks, [row["searches"] for row in rows.values()], "s--", color=COLORS[2], linewidth=1, **WHOLE)
    searches.set_ylabel("searches per question", color=COLORS[2])
    searches.set_ylim(0, None)
    searches.spines["top"].set_visible(False)


def em(axis: Any, rows: Rows, heading: str) -> None:
    """Bars of EM with its interval, the unchanged policy on top."""
    names = ["as it was trained" if name == "trained" else title(name) for name in rows]
    colors = [COLORS[0] if name == "trained" else COLORS[5] for name in rows]
    values = [row["em"] for row in rows.values()]
    axis.barh(names, values, xerr=errors(list(rows.values())), color=colors, height=0.6, capsize=3)
    downwards(axis)
    axis.set(title=heading, xlim=(0, 1.02), xlabel=f"EM (95 %, {_asked(rows)})")


def _asked(rows: Rows) -> str:
    return f"{next(iter(rows.values()))['n']} questions"
