"""Panels of training: one run's rewards and lengths over its steps, and several runs beside each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from routerl_jax.evaluation.figures import COLORS, color_of, curve, legend
from routerl_jax.evaluation.panels.drawing import Panel
from routerl_jax.evaluation.report import title

Steps = Sequence[dict[str, Any]]  # rows of metrics.jsonl
Line = tuple[Steps, str, str, str]  # rows, key, what it is called, colour
_REWARD, _SEARCHED, _TOKENS = "reward/total", "rollout/searched_rate", "rollout/tokens_per_question"


def training_panels(rows: Steps, runs: Mapping[str, Steps], colors: Mapping[str, str]) -> list[Panel]:
    """Of the run itself its rewards and sampled tokens; of it and its controls the reward, where there are several, and how
    often they search, where any does (MMSearch-R1, arXiv 2506.20670, figure 5b).

    Args:
      rows: all of the run.
      runs: of the run and its controls, by name.
      colors: of runs.
    """
    drawn = {
        "Reward of sampled attempts": _terms(rows),
        "Sampled tokens per attempt": [(rows, _TOKENS, "tokens", COLORS[0])] if rows else [],
        "Each run's own reward": _compared(runs, _REWARD, colors) if len(runs) > 1 else [],
        "Share of sampled attempts with a search": _compared(runs, _SEARCHED, colors),
    }
    return [lambda axis, said=said, lines=lines: _curves(axis, said, lines) for said, lines in drawn.items() if lines]


def _terms(rows: Steps) -> list[Line]:
    """The reward and its terms, the total first."""
    keys = dict.fromkeys(key for row in rows for key in row if key.startswith("reward/") and key != "reward/std")
    ordered = sorted(keys, key=lambda key: key != _REWARD)
    return [(rows, key, key.removeprefix("reward/"), color) for key, color in zip(ordered, COLORS)]


def _compared(runs: Mapping[str, Steps], key: str, colors: Mapping[str, str]) -> list[Line]:
    """Of every run the same; nothing where it is nothing throughout."""
    if not any(row.get(key) for rows in runs.values() for row in rows):
        return []
    return [(rows, key, title(name), colors.get(name, color_of(i))) for i, (name, rows) in enumerate(runs.items())]


def _curves(axis: Any, heading: str, lines: Sequence[Line]) -> None:
    for line in lines:
        curve(axis, *line)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set(title=heading, xlabel="step", ylim=(min(0, axis.get_ylim()[0]), None))
    legend(axis, loc="best")
