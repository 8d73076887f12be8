"""The figure of an analysis. Its sections: answers, searches, groups of questions, workflows, training, other conditions."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from routerl_jax.evaluation.figures import COLORS, color_of, curve, legend, new_figure, panels_of, save_figure
from routerl_jax.evaluation.report import title

# --- Drawing helpers: bars, error bars, tables of shares, legends. ---


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


def errors(rows: Sequence[Mapping[str, Any]], metric: str = "em") -> list[list[float]]:
    """How far the intervals of a metric reach below and above it."""
    ends = [(row[metric], *row[f"{metric}_interval"]) for row in rows]
    return [[max(mean - low, 0) for mean, low, _ in ends], [max(high - mean, 0) for mean, _, high in ends]]


def downwards(axis: Any, names: int = 0) -> None:
    """Puts horizontal bars in reading order, without lines between them. `names`: number of named bars."""
    axis.invert_yaxis()
    axis.grid(visible=False, axis="y")
    axis.tick_params(axis="y", labelsize=size_of(names))


def size_of(names: int) -> int:
    """Font size for this many names, one below the other."""
    return 10 if names <= 6 else 8 if names <= 24 else 6


# --- Panels of policies on the same questions: answers, searches, turns and costs. ---


_LARGEST = 200  # square points; largest marker whose size shows a number
_MEASURES = {
    "em": "EM",
    "searched_rate": "questions with a search",
    "search_ratio": "searches made of those allowed",
}
_FOUR_WAYS = {  # parts of the breakdown: label, colour, and colour of numbers in it
    "correct_without_search": ("right, no search", "#2e8b57", "white"),
    "correct_with_search": ("right, searched", "#9bd1b1", "black"),
    "wrong_with_search": ("wrong, searched", "#f0b9a8", "black"),
    "wrong_without_search": ("wrong, no search", "#c0392b", "white"),
}
_LEAST = 0.04  # smallest share of a bar with room for its number


def answers_and_searches(policies: Rows) -> Panel:
    """A table of EM and searches."""
    measures = _measured(policies)
    names = [title(name) for name in policies]
    shares = [[row.get(measure) for measure in measures] for row in policies.values()]
    columns = [_MEASURES[measure].replace(" with ", "\nwith ").replace(" of ", "\nof ") for measure in measures]
    return lambda axis: table(axis, names, columns, shares, "Answers and searches, %")


def tables_by_group(policies: Rows, key: str) -> list[Panel]:
    """EM and searches by group of questions, one panel per measure (MMSearch-R1, arXiv 2506.20670, figure 5a)."""
    groups = {name: row["by"][key] for name, row in policies.items() if key in row["by"]}
    values = next(iter(groups.values()))
    rows = [f"{value} ({row['n']})" for value, row in values.items()]
    names = [title(name) for name in groups]
    panels: list[Panel] = []
    for measure in _measured(values):
        shares = [[group[value].get(measure) for group in groups.values()] for value in values]
        heading = f"{_MEASURES[measure][0].upper()}{_MEASURES[measure][1:]}, %"
        panels.append(lambda axis, shares=shares, heading=heading: table(axis, rows, names, shares, heading))
    return panels


def _measured(rows: Rows) -> list[str]:
    return [measure for measure in _MEASURES if any(measure in row for row in rows.values())]


def four_ways(rows: Rows) -> Panel:
    """Right and wrong answers, with and without a search (figure 4b). `rows`: by the names of the bars."""
    labels, colors, inks = zip(*_FOUR_WAYS.values())
    shares = [row["breakdown"] for row in rows.values()]

    def draw(axis: Any) -> None:
        stacked(axis, list(rows), shares, list(_FOUR_WAYS), colors, labels)
        for bars, part, ink in zip(axis.containers, _FOUR_WAYS, inks):
            numbers = [f"{100 * share[part]:.0f}" if share[part] >= _LEAST else "" for share in shares]
            axis.bar_label(bars, numbers, label_type="center", fontsize=min(size_of(len(rows)), 8), color=ink)
        axis.set_title("Right and wrong, with and without a search, %")

    return draw


def turns(axis: Any, policies: Rows) -> None:
    """Turns and searches per question of each policy, as bars."""
    names = [title(name) for name in policies]
    axis.barh(names, [row["turns"] for row in policies.values()], color=COLORS[0], height=0.6, label="turns")
    axis.barh(names, [row["searches"] for row in policies.values()], color=COLORS[2], height=0.3, label="searches")
    downwards(axis)
    axis.set(title="Turns and searches per question")
    axis.legend(**BELOW, bbox_to_anchor=(0.5, -0.06), ncols=2)


def cost(axis: Any, policies: Rows, single: Rows, policy: str) -> None:
    """EM against cost. Policies are dots. The policy with a single mode is a square, if it has the same number of questions;
    they often coincide."""
    count = policies[policy]["n"]
    fixed = {name: row for name, row in single.items() if name != "trained" and row["n"] == count}
    looks = [{"fmt": "o", "markersize": 6}] * len(policies) + [{"fmt": "s", "markersize": 11, "mfc": "none"}] * len(
        fixed
    )
    for i, ((name, row), look) in enumerate(zip([*policies.items(), *fixed.items()], looks)):
        spent, em = row["retrieval_cost"], row["em"]
        axis.errorbar(spent, em, yerr=errors([row]), color=color_of(i), capsize=3, label=title(name), **look, **WHOLE)
    axis.set(title="EM (95 %) against retrieval cost", xlabel="retrieval cost per question", ylim=(0, 1.02))
    axis.set_xlim(0, max(axis.get_xlim()[1], 0.1))
    axis.legend(**BELOW, bbox_to_anchor=(0.5, -0.14), ncols=3)


def em_by(axis: Any, policies: Rows, key: str, heading: str) -> None:
    """EM over turns or tokens."""
    most = max((point["n"] for row in policies.values() for point in row[key]), default=1)
    for i, (name, row) in enumerate(policies.items()):
        points, color = row[key], color_of(i)
        x = [point["turns"] if "turns" in point else (point["from"] + point["to"]) / 2 for point in points]
        axis.plot(x, [point["em"] for point in points], color=color, linewidth=1.5, label=title(name))
        sizes = [8 + _LARGEST * point["n"] / most for point in points]
        axis.scatter(x, [point["em"] for point in points], s=sizes, color=color, **WHOLE)
    axis.set(title=heading, ylim=(-0.05, 1.05), xlabel="turns" if "turns" in key else "tokens")
    axis.margins(x=0.08)
    if "turns" in key:
        axis.xaxis.get_major_locator().set_params(integer=True)
    axis.legend(frameon=False, fontsize=8, loc="best", title="size: questions", title_fontsize=8)


# --- Panels of searches: by mode, by search number, and for right answers. ---


def by_mode(names: list[str], shares: list[Mapping[str, float]], heading: str) -> list[Panel]:
    """A bar of the shares of knowledge bases for each name; [] if there were no searches."""
    used = sorted({mode for share in shares for mode in share})

    def draw(axis: Any) -> None:
        stacked(axis, names, shares, used)
        axis.set_title(heading)

    return [draw] if used else []


def modes_by_step(rows: Rows, by: str = "") -> list[Panel]:
    """A bar of modes for every search number of every policy or group of questions, if another one has the same number to
    compare with."""
    steps = [(name, step) for name, row in rows.items() for step in row["mode_by_step"]]
    steps.sort(key=lambda pair: pair[1]["step"])  # stable: policies stay in their order
    names = [f"{step['step']}. {title(name)} ({step['n']})" for name, step in steps]
    return by_mode(names, [step["mode_usage"] for _, step in steps], f"Each search by mode (searches){by}")


def searches_of_correct(rows: Rows, by: str = "") -> list[Panel]:
    """Distributions of right answers over numbers of searches, with their means; [] if there were no right answers. They are
    side by side, or one below the other if there are more than colours."""
    right = {name: row["searches_of_correct"] for name, row in rows.items() if row["searches_of_correct"]["share"]}
    numbers = sorted({int(count) for row in right.values() for count in row["share"]})
    names = [f"{title(name)}: {row['mean']:.2f}" for name, row in right.items()]

    def draw(axis: Any) -> None:
        axis.set_title(f"Searches of questions answered rightly{by}")
        if len(right) > len(COLORS):
            stacked(axis, names, [row["share"] for row in right.values()], [str(number) for number in numbers])
            return
        width = 0.8 / len(right)
        for i, (name, row) in enumerate(zip(names, right.values())):
            positions = [number - 0.4 + (i + 0.5) * width for number in numbers]
            heights = [row["share"].get(str(number), 0.0) for number in numbers]
            axis.bar(positions, heights, width, color=color_of(i), label=name)
        axis.set(xlabel="searches", ylabel="share", ylim=(0, 1))
        axis.set_xticks(numbers)
        axis.legend(**BELOW, bbox_to_anchor=(0.5, -0.14), ncols=3, title="mean", title_fontsize=8)

    return [draw] if right else []


# --- Panels that compare the start with the trained policy: in the same workflow, and for a price on searches. ---


_MARKERS = "osD^v<>P"
_LARGEST_MARK, _SMALLEST = 200, 80  # square points; different sizes, so that markers that coincide are all visible


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
    sizes = [_LARGEST_MARK - (_LARGEST_MARK - _SMALLEST) * i / max(len(kinds) - 1, 1) for i in range(len(kinds))]
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


# --- Panels of training: rewards and lengths of one run over its steps, and a comparison of several runs. ---


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
    keys = dict.fromkeys(key for row in rows for key in row if key.startswith("reward/") and key != "reward/std")
    drawn = {
        "Reward of sampled attempts": [  # the total first
            (rows, key, key.removeprefix("reward/"), color)
            for key, color in zip(sorted(keys, key=lambda key: key != _REWARD), COLORS)
        ],
        "Sampled tokens per attempt": [(rows, _TOKENS, "tokens", COLORS[0])] if rows else [],
        "Each run's own reward": _compared(runs, _REWARD, colors) if len(runs) > 1 else [],
        "Share of sampled attempts with a search": _compared(runs, _SEARCHED, colors),
    }
    return [
        lambda axis, heading=heading, lines=lines: _curves(axis, heading, lines)
        for heading, lines in drawn.items()
        if lines
    ]


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


# --- Panels of a trained policy under other conditions. ---


def em_by_top_k(axis: Any, rows: Rows) -> None:
    """EM and searches by passages per search."""
    ks = [int(k) for k in rows]
    em_of_trials = [row["em"] for row in rows.values()]
    axis.errorbar(ks, em_of_trials, yerr=errors(list(rows.values())), fmt="o-", color=COLORS[0], capsize=3, **WHOLE)
    axis.set(title="Passages per search", xlabel=f"k ({_asked(rows)})", ylim=(0, 1.02))
    axis.set_ylabel("EM (95 %)", color=COLORS[0])
    axis.xaxis.get_major_locator().set_params(integer=True)
    searches = axis.twinx()
    searches.plot(ks, [row["searches"] for row in rows.values()], "s--", color=COLORS[2], linewidth=1, **WHOLE)
    searches.set_ylabel("searches per question", color=COLORS[2])
    searches.set_ylim(0, None)
    searches.spines["top"].set_visible(False)


def em_of_trials(axis: Any, rows: Rows, heading: str) -> None:
    """Bars of EM with its interval, the unchanged policy on top."""
    names = ["as it was trained" if name == "trained" else title(name) for name in rows]
    colors = [COLORS[0] if name == "trained" else COLORS[5] for name in rows]
    values = [row["em"] for row in rows.values()]
    axis.barh(names, values, xerr=errors(list(rows.values())), color=colors, height=0.6, capsize=3)
    downwards(axis)
    axis.set(title=heading, xlim=(0, 1.02), xlabel=f"EM (95 %, {_asked(rows)})")


def _asked(rows: Rows) -> str:
    return f"{next(iter(rows.values()))['n']} questions"


# --- the whole figure ---


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
    measured = analysis.get("calibration", {})
    colors = {name: color_of(i) for i, name in enumerate(policies)}
    return [
        _Section(
            "Answers",
            [
                answers_and_searches(policies),
                four_ways({title(name): row for name, row in policies.items()}),
                lambda axis: em_by(axis, policies, "em_by_turns", "EM by number of turns"),
                lambda axis: em_by(axis, policies, "em_by_tokens", "EM by sampled tokens, in quartiles"),
            ],
        ),
        _Section(
            "Searches",
            [
                lambda axis: turns(axis, policies),
                lambda axis: cost(axis, policies, single, policy),
                *by_mode(
                    [title(name) for name in policies],
                    [row["mode_usage"] for row in policies.values()],
                    "Share of searches by mode",
                ),
                *modes_by_step(policies),
                *searches_of_correct(policies),
            ],
        ),
        *(_by_group(policies, key, policy, start) for key in policies[policy]["by"]),
        _Section(
            "Start and trained policy in the same workflow, and what a price on searches can decide",
            [
                *workflow_panels(analysis.get("workflows", {}), colors),
                *([lambda axis: calibration(axis, measured["penalty"], measured["kinds"])] if measured else []),
            ],
            _height(max(map(len, policies[policy]["by"].values()), default=0)),
        ),
        _Section("Training", training_panels(training, analysis.get("training", {}), colors)),
        _Section(f"{title(policy)}, under other conditions", _trials(analysis)),
    ]


def _by_group(policies: Rows, key: str, policy: str, start: str) -> _Section:
    """Panels by group: tables of all policies, the breakdown of the trained policy (and the start, if groups are few), and its
    searches."""
    groups = policies[policy]["by"][key]
    shown = [name for name in (start, policy) if name == policy or (name in policies and len(groups) <= _PAIRS)]
    bars = {f"{value}, {title(name)}": policies[name]["by"][key][value] for value in groups for name in shown}
    panels: list[Panel] = [
        *tables_by_group(policies, key),
        four_ways(bars),
        *modes_by_step(groups, f", {title(policy)}"),
        *searches_of_correct(groups, f", {title(policy)}"),
    ]
    return _Section(f"By {key} of question (how many)", panels, _height(len(groups)))


def _height(groups: int) -> float:
    return max(_HEIGHT, _OF_GROUP * groups)


def _trials(analysis: Mapping[str, Any]) -> list[Panel]:
    headings = {"single_mode": "EM with one mode alone", "retrievers": "EM with other retrievers"}
    panels: list[Panel] = [
        lambda axis, rows=analysis[name], heading=heading: em_of_trials(axis, rows, heading)
        for name, heading in headings.items()
        if analysis.get(name)
    ]
    if rows := analysis.get("top_k"):
        panels.append(lambda axis: em_by_top_k(axis, rows))
    return panels
