"""Draws R1-Router's figures 2 and 3 (Peng et al., arXiv 2505.22095). The layout follows captions and text of the paper."""

from __future__ import annotations

from typing import Any

from routerl_jax.evaluation.figures import color_of
from routerl_jax.extras.comparison.papers.figure import (
    A_RUN,
    COMPARED,
    LENGTH,
    REWARD,
    Measured,
    Method,
    bars,
    behaviours,
    labels_of,
    legend_below,
    missing,
    over_steps,
    panels,
    paper_figure,
)

METHODS = (
    Method("Prompt", "r1_router", run=("warm_start",)),
    Method("SFT", "row:sft", run=("sft",)),
    Method("Step-GRPO", "row:step_grpo", run=("trained",), other="recipe:r1_router"),
)
_NEEDS = f"{A_RUN} with a control sft, or {COMPARED} with r1_router and the runs of table 2"
_TABLE, _VISUAL, _TEXT = "Table QA", "Visual QA", "Text QA"
# Section 5.3 puts its benchmarks together by the kind of knowledge that they need
_KINDS = {
    **dict.fromkeys(("open_wikitable", "tabfact"), _TABLE),
    **dict.fromkeys(("infoseek", "dyn_vqa", "webqa"), _VISUAL),
    "2wikimultihopqa": _TEXT,
}
_VISUAL_PARTS = (_VISUAL, "visual")  # of a comparison, and kind of Atlas's questions


@paper_figure(
    "r1_router",
    2,
    shows="reward and response length over training, searches of right answers by kind of question",
    needs=_NEEDS,
    methods=METHODS,
    records=True,
)
def training(measured: Measured) -> Any:
    """Figure 2: reward (a) and response length (b) over training; searches of rightly answered questions (c)."""
    figure, (reward, length, steps) = panels(3, measured.caption)
    over_steps(reward, measured, REWARD, "(a) Reward", METHODS)
    over_steps(length, measured, LENGTH, "(b) Response length, tokens", METHODS)
    by_part = behaviours(measured, _KINDS)
    title = "(c) Searches of questions answered rightly"
    if not by_part:
        missing(steps, title, "no episodes are at hand")
        return figure
    means = {
        name: {label: row["searches_of_correct"]["mean"] for label, row in rows.items()}
        for name, rows in by_part.items()
    }
    bars(steps, means, METHODS)
    steps.set(title=title, ylabel="searches of a question")
    return figure


@paper_figure(
    "r1_router",
    3,
    shows="share of each knowledge base in first, second and third searches on visual questions",
    needs=_NEEDS,
    methods=METHODS,
    records=True,
)
def routing(measured: Measured) -> Any:
    """Figure 3: the share of each knowledge base in first, second and further searches on visual questions, by method."""
    by_part = behaviours(measured, _KINDS)
    part = next((name for name in _VISUAL_PARTS if name in by_part), next(iter(by_part), ""))
    rows = by_part.get(part, {})
    figure, axes = panels(len(METHODS), measured.about, width=4.2)
    bases = sorted({base for row in rows.values() for step in row["mode_by_step"] for base in step["mode_usage"]})
    for axis, method, letter in zip(axes, METHODS, "abc"):
        title = f"({letter}) {method.name}, {part}"
        label = next(labels_of(method, rows), "")
        if not label:
            missing(axis, title, f"not run ({measured.absent.get(method.name, method.agent)})")
            continue
        steps = rows[label]["mode_by_step"]
        if not steps:
            missing(axis, title, "it made no search")
            continue
        below = [0.0] * len(steps)
        for i, base in enumerate(bases):
            shares = [100 * step["mode_usage"].get(base, 0.0) for step in steps]
            drawn = axis.bar(range(len(steps)), shares, bottom=below, width=0.6, color=color_of(i), label=base)
            texts = [f"{share:.0f}" if share >= 6 else "" for share in shares]
            axis.bar_label(drawn, texts, label_type="center", fontsize=8, color="white")
            below = [first + second for first, second in zip(below, shares)]
        axis.set_xticks(range(len(steps)), [f"{step['step']}\n({step['n']})" for step in steps])
        axis.grid(visible=False, axis="x")
        axis.set_axisbelow(True)
        axis.set(title=title, xlabel="search (how many)", ylabel="% of searches", ylim=(0, 102))
    legend_below(figure, axes)
    return figure
