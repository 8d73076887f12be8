"""Drawing helpers for the panels of an analysis: bars, error bars, tables of shares, legends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from routerl_jax.evaluation.figures import color_of

Rows = Mapping[str, Mapping[str, Any]]
Panel = Callable[[Any], None]  # draws on an axis

WHOLE = {"clip_on": False}  # draws markers at the edge of a panel without clipping
BELOW = {"frameon": False, "fontsize": 8, "loc": "upper center"}
_DARK = 0.6  # shares from this on are written in white


def stacked(
    axis: Any,
    names: Sequence[str],
    shares: Sequence[Mapping[str, float]],
    parts: Sequence[str],
    colors: Sequence[str] = (),
    labels: Sequence[str] = (),
) -> None:
    """Draws horizontal bars, each stacked from all parts."""
    starts = [0.0] * len(names)
    for i, part in enumerate(parts):
        widths = [share.get(part, 0.0) for share in shares]
        color = colors[i] if colors else color_of(i)
        axis.barh(names, widths, left=starts, color=color, height=0.6, label=labels[i] if labels else part)
        starts = [a + b for a, b in zip(starts, widths)]
    downwards(axis, len(names))
    axis.set_xlim(0, 1)
    axis.legend(**BELOW, bbox_to_anchor=(0.5, -0.06), ncols=max(min(len(parts), 4), 1))


def table(
    axis: Any, rows: Sequence[str], columns: Sequence[str], shares: Sequence[Sequence[float | None]], heading: str
) -> None:
    """Draws shares as a table of percentages; greater ones are darker."""
    import matplotlib

    colors = matplotlib.colormaps["Blues"]
    axis.imshow(
        [[0.0 if share is None else share for share in row] for row in shares],
        cmap=colors,
        vmin=0,
        vmax=1,
        aspect="auto",
        alpha=0.9,
    )
    for i, row in enumerate(shares):
        for j, share in enumerate(row):
            text = "-" if share is None else f"{100 * share:.1f}"
            color = "white" if (share or 0) > _DARK else "black"
            axis.text(j, i, text, ha="center", va="center", color=color, fontsize=size_of(len(rows)))
    axis.set_xticks(range(len(columns)), columns, fontsize=9 if len(columns) <= 3 else 8)
    if len(columns) > 3:
        axis.tick_params(axis="x", rotation=20)
    axis.set_yticks(range(len(rows)), rows, fontsize=size_of(len(rows)))
    axis.tick_params(length=0)
    axis.grid(visible=False)
    axis.spines[:].set_visible(False)
    axis.set_title(heading)


def errors(rows: Sequence[Mapping[str, Any]]) -> list[list[float]]:
    """How far the intervals of EM reach below and above it."""
    below = [max(row["em"] - row["em_interval"][0], 0) for row in rows]
    return [below, [max(row["em_interval"][1] - row["em"], 0) for row in rows]]


def downwards(axis: Any, names: int = 0) -> None:
    """Puts horizontal bars in reading order, without lines between them. `names`: number of named bars."""
    axis.invert_yaxis()
    axis.grid(visible=False, axis="y")
    axis.tick_params(axis="y", labelsize=size_of(names))


def size_of(names: int) -> int:
    """Font size for this many names, one below the other."""
    return 10 if names <= 6 else 8 if names <= 24 else 6
