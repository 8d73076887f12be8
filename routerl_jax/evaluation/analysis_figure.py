"""The picture of an analysis: turns, modes, cost against accuracy, what changes under other conditions, and the training."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from routerl_jax.evaluation.figures import COLORS, color_of, curve, save_figure, subplots
from routerl_jax.evaluation.report import title

Rows = Mapping[str, Mapping[str, Any]]
_COLUMNS = 4
_WHOLE = {"clip_on": False}  # markers at the edge of a panel are drawn whole
_LARGEST = 200  # square points, of a marker whose size tells a number
_BELOW = {"frameon": False, "fontsize": 8, "loc": "upper center"}


def analysis_figure(
    analysis: Mapping[str, Rows],
    path: pathlib.Path,
    training: Sequence[dict[str, Any]] = (),
    *,
    policy: str = "trained",
) -> None:
    """Writes the panels of an analysis (launch.analyze) that it has data for.

    Args:
      training: the rows of metrics.jsonl.
      policy: the one of the policies that the rest of the analysis is of.
    """
    drawn = _panels(analysis, training, policy)
    rows = -(-len(drawn) // _COLUMNS)
    figure, axes = subplots(rows, _COLUMNS, (19, 4 * rows))
    for axis in axes[len(drawn) :]:
        axis.set_axis_off()
    for axis, draw in zip(axes, drawn):
        draw(axis)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_figure(figure, path)


def _panels(
    analysis: Mapping[str, Rows], training: Sequence[dict[str, Any]], policy: str
) -> list[Callable[[Any], None]]:
    """What there is something to draw for, in reading order."""
    policies, single = analysis["policies"], analysis.get("single_mode", {})
    panels: list[Callable[[Any], None]] = [
        lambda axis: _turns(axis, policies),
        lambda axis: _modes(axis, policies),
        lambda axis: _cost(axis, policies, single, policy),
        lambda axis: _modes_by_step(axis, policies),
        lambda axis: _by(axis, policies, "em_by_turns", "EM by number of turns"),
        lambda axis: _by(axis, policies, "em_by_tokens", "EM by sampled tokens, in quartiles"),
    ]
    panels += _searches_panels(policies, "")
    for key, groups in policies[policy].get("by", {}).items():
        panels.append(lambda axis, key=key, groups=groups: _modes_by_step(axis, groups, f", by {key}"))
        panels += _searches_panels(groups, f", by {key}")
    if training:
        tokens = {"rollout/tokens_per_question": "tokens"}
        panels.append(lambda axis: _training(axis, training, "Reward of sampled attempts", _rewards(training)))
        panels.append(lambda axis: _training(axis, training, "Sampled tokens per attempt", tokens))
    if single:
        panels.append(lambda axis: _em(axis, single, "EM with one mode alone"))
    if analysis.get("top_k"):
        panels.append(lambda axis: _top_k(axis, analysis["top_k"]))
    if analysis.get("retrievers"):
        panels.append(lambda axis: _em(axis, analysis["retrievers"], "EM with other retrievers"))
    return panels


def _searches_panels(rows: Rows, by: str) -> list[Callable[[Any], None]]:
    right = {name: row["searches_of_correct"] for name, row in rows.items() if row["searches_of_correct"]["share"]}
    return [lambda axis: _searches_of_correct(axis, right, by)] if right else []


def _turns(axis: Any, policies: Rows) -> None:
    names = [title(name) for name in policies]
    axis.barh(names, [row["turns"] for row in policies.values()], color=COLORS[0], height=0.6, label="turns")
    axis.barh(names, [row["searches"] for row in policies.values()], color=COLORS[2], height=0.3, label="searches")
    _downwards(axis)
    axis.set(title="Turns and searches per question")
    axis.legend(**_BELOW, bbox_to_anchor=(0.5, -0.06), ncols=2)


def _modes(axis: Any, policies: Rows) -> None:
    names = [title(name) for name in policies]
    modes = sorted({mode for row in policies.values() for mode in row["mode_usage"]})
    _stacked(axis, names, [row["mode_usage"] for row in policies.values()], modes)
    axis.set(title="Share of searches by mode", xlim=(0, 1))


def _stacked(axis: Any, names: list[str], shares: Sequence[Mapping[str, float]], modes: list[str]) -> None:
    """Horizontal bars, each of all modes."""
    left = [0.0] * len(names)
    for i, mode in enumerate(modes):
        widths = [share.get(mode, 0.0) for share in shares]
        axis.barh(names, widths, left=left, color=color_of(i), height=0.6, label=mode)
        left = [a + b for a, b in zip(left, widths)]
    _downwards(axis)
    axis.legend(**_BELOW, bbox_to_anchor=(0.5, -0.06), ncols=max(min(len(modes), 4), 1))


def _modes_by_step(axis: Any, policies: Rows, by: str = "") -> None:
    """A bar for every search of every policy, or group of questions, that another one's same search can be held against."""
    steps = [(name, row) for name, policy in policies.items() for row in policy["mode_by_step"]]
    steps.sort(key=lambda pair: pair[1]["step"])  # stable: policies stay in their order
    names = [f"{row['step']}. {title(name)} ({row['n']})" for name, row in steps]
    modes = sorted({mode for _, row in steps for mode in row["mode_usage"]})
    _stacked(axis, names, [row["mode_usage"] for _, row in steps], modes)
    axis.set(title=f"Each search by mode (searches){by}", xlim=(0, 1))
    axis.tick_params(axis="y", labelsize=8)


def _searches_of_correct(axis: Any, found: Rows, by: str) -> None:
    """Distributions over numbers of searches, the mean in the legend."""
    numbers = sorted({int(count) for row in found.values() for count in row["share"]})
    width = 0.8 / len(found)
    for i, (name, row) in enumerate(found.items()):
        places = [number - 0.4 + (i + 0.5) * width for number in numbers]
        heights = [row["share"].get(str(number), 0.0) for number in numbers]
        axis.bar(places, heights, width, color=color_of(i), label=f"{title(name)}: {row['mean']:.2f}")
    axis.set(title=f"Searches of questions answered rightly{by}", xlabel="searches", ylabel="share", ylim=(0, 1))
    axis.set_xticks(numbers)
    axis.legend(frameon=False, fontsize=8, loc="best", title="mean", title_fontsize=8)


def _rewards(training: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Reward terms by their keys in metrics.jsonl, the total first."""
    keys = dict.fromkeys(key for row in training for key in row if key.startswith("reward/") and key != "reward/std")
    ordered = sorted(keys, key=lambda key: key != "reward/total")
    return {key: key.removeprefix("reward/") for key in ordered[: len(COLORS)]}


def _training(axis: Any, rows: Sequence[dict[str, Any]], heading: str, keys: Mapping[str, str]) -> None:
    for i, (key, label) in enumerate(keys.items()):
        curve(axis, rows, key, label, color_of(i))
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set(title=heading, xlabel="step", ylim=(min(0, axis.get_ylim()[0]), None))
    axis.legend(frameon=False, fontsize=8, loc="best")


def _cost(axis: Any, policies: Rows, single: Rows, policy: str) -> None:
    """Policies are dots, the policy with a single mode, if it was asked as much, a square: they often coincide."""
    asked = policies[policy]["n"]
    fixed = {name: row for name, row in single.items() if name != "trained" and row["n"] == asked}
    looks = [{"fmt": "o", "markersize": 6}] * len(policies) + [{"fmt": "s", "markersize": 11, "mfc": "none"}] * len(
        fixed
    )
    for i, ((name, row), look) in enumerate(zip([*policies.items(), *fixed.items()], looks)):
        cost, em = row["retrieval_cost"], row["em"]
        axis.errorbar(cost, em, yerr=_errors([row]), color=color_of(i), capsize=3, label=title(name), **look, **_WHOLE)
    axis.set(title="EM (95 %) against retrieval cost", xlabel="retrieval cost per question", ylim=(0, 1.02))
    axis.set_xlim(0, max(axis.get_xlim()[1], 0.1))
    axis.legend(**_BELOW, bbox_to_anchor=(0.5, -0.14), ncols=3)


def _by(axis: Any, policies: Rows, key: str, heading: str) -> None:
    most = max((point["n"] for row in policies.values() for point in row[key]), default=1)
    for i, (name, row) in enumerate(policies.items()):
        points, color = row[key], color_of(i)
        x = [point["turns"] if "turns" in point else (point["from"] + point["to"]) / 2 for point in points]
        axis.plot(x, [point["em"] for point in points], color=color, linewidth=1.5, label=title(name))
        sizes = [8 + _LARGEST * point["n"] / most for point in points]
        axis.scatter(x, [point["em"] for point in points], s=sizes, color=color, **_WHOLE)
    axis.set(title=heading, ylim=(-0.05, 1.05), xlabel="turns" if "turns" in key else "tokens")
    axis.margins(x=0.08)
    if "turns" in key:
        axis.xaxis.get_major_locator().set_params(integer=True)
    axis.legend(frameon=False, fontsize=8, loc="best", title="size: questions", title_fontsize=8)


def _top_k(axis: Any, rows: Rows) -> None:
    ks = [int(k) for k in rows]
    em = [row["em"] for row in rows.values()]
    axis.errorbar(ks, em, yerr=_errors(list(rows.values())), fmt="o-", color=COLORS[0], capsize=3, **_WHOLE)
    axis.set(title="Passages per search", xlabel=f"k ({_asked(rows)})", ylim=(0, 1.02))
    axis.set_ylabel("EM (95 %)", color=COLORS[0])
    axis.xaxis.get_major_locator().set_params(integer=True)
    searches = axis.twinx()
    searches.plot(ks, [row["searches"] for row in rows.values()], "s--", color=COLORS[2], linewidth=1, **_WHOLE)
    searches.set_ylabel("searches per question", color=COLORS[2])
    searches.set_ylim(0, None)
    searches.spines["top"].set_visible(False)


def _em(axis: Any, rows: Rows, heading: str) -> None:
    """Bars of EM with its interval, the policy as it is on top."""
    names = ["as it was trained" if name == "trained" else title(name) for name in rows]
    colors = [COLORS[0] if name == "trained" else COLORS[5] for name in rows]
    em = [row["em"] for row in rows.values()]
    axis.barh(names, em, xerr=_errors(list(rows.values())), color=colors, height=0.6, capsize=3)
    _downwards(axis)
    axis.set(title=heading, xlim=(0, 1.02), xlabel=f"EM (95 %, {_asked(rows)})")


def _errors(rows: list[Mapping[str, Any]]) -> list[list[float]]:
    """How far the intervals of EM reach below it, and above."""
    below = [max(row["em"] - row["em_interval"][0], 0) for row in rows]
    return [below, [max(row["em_interval"][1] - row["em"], 0) for row in rows]]


def _asked(rows: Rows) -> str:
    return f"{next(iter(rows.values()))['n']} questions"


def _downwards(axis: Any) -> None:
    """Horizontal bars in reading order, without lines between them."""
    axis.invert_yaxis()
    axis.grid(visible=False, axis="y")
