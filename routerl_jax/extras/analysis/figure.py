"""The figure of an analysis. Its sections: answers, searches, groups of questions, workflows, training, other conditions."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from routerl_jax.evaluation.figures import color_of, new_figure, panels_of, save_figure
from routerl_jax.evaluation.report import title
from routerl_jax.extras.analysis.panels import policies as policy_panels
from routerl_jax.extras.analysis.panels import searches as search_panels
from routerl_jax.extras.analysis.panels import trials as trial_panels
from routerl_jax.extras.analysis.panels.drawing import Panel, Rows
from routerl_jax.extras.analysis.panels.training import training_panels
from routerl_jax.extras.analysis.panels.workflows import calibration, workflow_panels

_COLUMNS, _WIDTH = 4, 21.0  # width of the whole figure, in inches
_HEIGHT, _OF_HEADING = 4.0, 0.5
_OF_GROUP = 0.32  # height per group, in a panel with very many groups of questions
_PAIRS = 8  # with at most this many groups, bars show the start beside the trained policy


@dataclasses.dataclass(frozen=True)
class _Section:
    heading: str
    panels: list[Panel]
    height: float = _HEIGHT  # height of a panel

    @property
    def columns(self) -> int:
        """The number of columns; one more if the last row would have a single panel."""
        alone = len(self.panels) > _COLUMNS and len(self.panels) % _COLUMNS == 1
        return _COLUMNS + 1 if alone else _COLUMNS

    @property
    def rows(self) -> int:
        return math.ceil(len(self.panels) / self.columns)

    @property
    def inches(self) -> float:
        return self.rows * self.height + _OF_HEADING


def analysis_figure(
    analysis: Mapping[str, Any],
    path: pathlib.Path,
    training: Sequence[dict[str, Any]] = (),
    *,
    policy: str = "trained",
    start: str = "warm_start",
) -> None:
    """Writes the panels for which an analysis (launch.analyze) has data.

    Args:
      training: the rows of metrics.jsonl.
      policy: name of the trained policy, which the rest of the analysis is about.
      start: name of the policy before training; it may be missing.
    """
    sections = [section for section in _sections(analysis, training, policy, start) if section.panels]
    figure = new_figure((_WIDTH, sum(section.inches for section in sections)))
    parts = figure.subfigures(len(sections), 1, height_ratios=[section.inches for section in sections], squeeze=False)
    for part, section in zip(parts.flat, sections):
        part.suptitle(section.heading, x=0.005, ha="left", fontweight="bold", fontsize=14)
        axes = panels_of(part, section.rows, section.columns)
        for axis in axes[len(section.panels) :]:
            axis.set_axis_off()
        for axis, draw in zip(axes, section.panels):
            draw(axis)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_figure(figure, path)


def _sections(
    analysis: Mapping[str, Any], training: Sequence[dict[str, Any]], policy: str, start: str
) -> list[_Section]:
    """All sections in reading order; some may be empty."""
    policies, single = analysis["policies"], analysis.get("single_mode", {})
    colors = {name: color_of(i) for i, name in enumerate(policies)}
    return [
        _Section("Answers", _answers(policies)),
        _Section("Searches", _searches(policies, single, policy)),
        *(_by_group(policies, key, policy, start) for key in policies[policy]["by"]),
        _Section(
            "Start and trained policy in the same workflow, and what a price on searches can decide",
            [*workflow_panels(analysis.get("workflows", {}), colors), *_calibration(analysis.get("calibration", {}))],
            _height(max(map(len, policies[policy]["by"].values()), default=0)),
        ),
        _Section("Training", training_panels(training, analysis.get("training", {}), colors)),
        _Section(f"{title(policy)}, under other conditions", _trials(analysis)),
    ]


def _answers(policies: Rows) -> list[Panel]:
    named = {title(name): row for name, row in policies.items()}
    return [
        policy_panels.answers_and_searches(policies),
        policy_panels.four_ways(named, "Right and wrong, with and without a search, %"),
        lambda axis: policy_panels.em_by(axis, policies, "em_by_turns", "EM by number of turns"),
        lambda axis: policy_panels.em_by(axis, policies, "em_by_tokens", "EM by sampled tokens, in quartiles"),
    ]


def _searches(policies: Rows, single: Rows, policy: str) -> list[Panel]:
    return [
        lambda axis: policy_panels.turns(axis, policies),
        lambda axis: policy_panels.cost(axis, policies, single, policy),
        *search_panels.modes(policies),
        *search_panels.modes_by_step(policies),
        *search_panels.searches_of_correct(policies),
    ]


def _by_group(policies: Rows, key: str, policy: str, start: str) -> _Section:
    """Panels by group: tables of all policies, the breakdown of the trained policy (and the start, if groups are few), and its
    searches."""
    groups = policies[policy]["by"][key]
    shown = [name for name in (start, policy) if name == policy or (name in policies and len(groups) <= _PAIRS)]
    bars = {f"{value}, {title(name)}": policies[name]["by"][key][value] for value in groups for name in shown}
    panels: list[Panel] = [
        *policy_panels.tables_by_group(policies, key),
        policy_panels.four_ways(bars, "Right and wrong, with and without a search, %"),
        *search_panels.modes_by_step(groups, f", {title(policy)}"),
        *search_panels.searches_of_correct(groups, f", {title(policy)}"),
    ]
    return _Section(f"By {key} of question (how many)", panels, _height(len(groups)))


def _height(groups: int) -> float:
    return max(_HEIGHT, _OF_GROUP * groups)


def _calibration(measured: Mapping[str, Any]) -> list[Panel]:
    return [lambda axis: calibration(axis, measured["penalty"], measured["kinds"])] if measured else []


def _trials(analysis: Mapping[str, Any]) -> list[Panel]:
    headings = {"single_mode": "EM with one mode alone", "retrievers": "EM with other retrievers"}
    panels: list[Panel] = [
        lambda axis, rows=analysis[name], heading=heading: trial_panels.em(axis, rows, heading)
        for name, heading in headings.items()
        if analysis.get(name)
    ]
    if rows := analysis.get("top_k"):
        panels.append(lambda axis: trial_panels.top_k(axis, rows))
    return panels
