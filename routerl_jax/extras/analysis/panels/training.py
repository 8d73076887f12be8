"""Panels of training: rewards and lengths of one run over its steps, and a comparison of several runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from routerl_jax.evaluation.figures import COLORS, color_of, curve, legend
from routerl_jax.evaluation.report import title
from routerl_jax.extras.analysis.panels.drawing import Panel

Steps = Sequence[dict[str, Any]]  # rows of metrics.jsonl
Line = tuple[Steps, str, str, str]  # rows, key, label, colour
_REWARD, _SEARCHED, _TOKENS = "reward/total", "rollout/searched_rate", "rollout/tokens_per_question"


def training_panels(rows: Steps, runs: Mapping[str, Steps], colors: Mapping[str, str]) -> list[Panel]:
    """Panels of the run's rewards and sampled tokens; and to compare it with its controls, of the reward (if there are
    controls) and of searches (if there are any; MMSearch-R1, arXiv 2506.20670, figure 5b).

    Args:
      rows: all rows of the run.
      runs: rows of the run and its controls, by name.
      colors: colours of the runs, by name.
    """
    drawn = {
        "Reward of sampled attempts": _terms(rows),
        "Sampled tokens per attempt": [(rows, _TOKENS, "tokens", COLORS[0])] if rows else [],
        "Each run's own reward": _compared(runs, _REWARD, colors) if len(runs) > 1 else [],
        "Share of sampled attempts with a search": _compared(runs, _SEARCHED, colors),
    }
    return [
        lambda axis, heading=heading, lines=lines: _curves(axis, heading, lines)
        for heading, lines in drawn.items()
        if lines
    ]


def _terms(rows: Steps) -> list[Line]:
    """Lines of the reward and its terms, the total first."""
    keys = dict.fromkeys(key for row in rows for key in row if key.startswith("reward/") and key != "reward/std")
    ordered = sorted(keys, key=lambda key: key != _REWARD)
    return [(rows, key, key.removeprefix("reward/"), color) for key, color in zip(ordered, COLORS)]


def _compared(runs: Mapping[str, Steps], key: str, colors: Mapping[str, str]) -> list[Line]:
    """Lines of the same metric for every run; [] if it is 0 throughout."""
    if not any(row.get(key) for rows in runs.values() for row in rows):
        return []
    return [(rows, key, title(name), colors.get(name, color_of(i))) for i, (name, rows) in enumerate(runs.items())]


def _curves(axis: Any, heading: str, lines: Sequence[Line]) -> None:
    for line in lines:
        curve(axis, *line)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set(title=heading, xlabel="step", ylim=(min(0, axis.get_ylim()[0]), None))
    legend(axis, loc="best")
