"""Counts of requests to the stages of a run's tools, for metrics and results: hit rates of caches, failures of services."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from routerl_jax.agents.agent import SearchTool
from routerl_jax.knowledge.base import ASKED, FAILURES, HITS, LEFT_OUT, Counts, added, difference
from routerl_jax.parallel import multihost

ToolCounts = Mapping[str, Counts]


def tool_counts(tools: Mapping[str, SearchTool]) -> dict[str, Counts]:
    """The counts of this process so far, for every tool that counts (`stage_counts`)."""
    counts_of = {name: counts() for name, tool in tools.items() if (counts := getattr(tool, "stage_counts", None))}
    return {name: counts for name, counts in counts_of.items() if counts}


def of_all_processes(counts: ToolCounts) -> dict[str, Counts]:
    """The sums over all processes (a collective call if there are counts; all processes have the same tools)."""
    if not counts:
        return {}
    parts = multihost.exchange(counts)
    return {name: added(*(part[name] for part in parts)) for name in counts}


def together(first: ToolCounts, second: ToolCounts) -> dict[str, Counts]:
    """The sums of two sessions."""
    return {name: added(first.get(name, {}), second.get(name, {})) for name in {**first, **second}}


def tool_metrics(tools: Mapping[str, SearchTool], before: ToolCounts) -> dict[str, float]:
    """Metrics of the requests since `before`, of all processes (a collective call).

    They are `tools/NAME/STAGE/asked`, `../failures`, for a stage with a cache that was asked at all `../hit_rate`, and, once
    there was one, `../left_out`: documents that were no passages.
    """
    now = tool_counts(tools)
    counted = of_all_processes({name: difference(counts, before.get(name, {})) for name, counts in now.items()})
    metrics: dict[str, float] = {}
    for name, stages in counted.items():
        for stage, counts in stages.items():
            prefix = f"tools/{name}/{stage}"
            metrics |= {f"{prefix}/{ASKED}": counts[ASKED], f"{prefix}/{FAILURES}": counts[FAILURES]}
            if HITS in counts and counts[ASKED]:
                metrics[f"{prefix}/hit_rate"] = counts[HITS] / counts[ASKED]
            if LEFT_OUT in counts:
                metrics[f"{prefix}/{LEFT_OUT}"] = counts[LEFT_OUT]
    return metrics


def tool_results(counted: ToolCounts) -> dict[str, Any]:
    """Counts with the shares of hits and failures, for results.json."""
    return {
        name: {stage: {**counts, **_shares(counts)} for stage, counts in stages.items()}
        for name, stages in counted.items()
    }


def tool_table(counted: ToolCounts) -> str:
    """Counts as text, one line per stage. Stages that were never asked are left out."""
    rows = [("tool", "stage", "asked", "from what is kept", "failed")]
    for name, stages in counted.items():
        for stage, counts in stages.items():
            if counts[ASKED]:
                shares = _shares(counts)
                hit_rate = f"{shares['hit_rate']:.1%}" if "hit_rate" in shares else ""
                rows.append((name, stage, f"{counts[ASKED]:,}", hit_rate, f"{shares['failure_rate']:.2%}"))
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = (
        "  ".join(
            cell.ljust(width) if index < 2 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths))
        )
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines) if len(rows) > 1 else ""


def _shares(counts: Mapping[str, int]) -> dict[str, float]:
    requests = counts[ASKED]
    if not requests:
        return {}
    hits = {"hit_rate": counts[HITS] / requests} if HITS in counts else {}
    return {**hits, "failure_rate": counts[FAILURES] / requests}
