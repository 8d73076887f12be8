"""Metrics of a step: behaviour in the rollouts, agreement of sampler and learner, and requests to the tools (hit rates of
caches, failures of services)."""

from __future__ import annotations

import resource
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from routerl_jax.agents.agent import SearchTool
from routerl_jax.core.types import Episode
from routerl_jax.evaluation.metrics import averages, knowledge_base_shares
from routerl_jax.knowledge.base import ASKED, FAILURES, HITS, LEFT_OUT, Counts, added, difference
from routerl_jax.learning.advantages import groups_without_signal
from routerl_jax.parallel import multihost
from routerl_jax.rewards.terms import judged


def rollout_metrics(
    episodes: Sequence[Episode], groups: np.ndarray, normalizer: str, tools: Collection[str] | None = None
) -> dict[str, Any]:
    """Answer quality, behaviour, rewards and group statistics of the sampled episodes.

    The mean of a reward term is over the episodes that have it.

    Args:
      tools: see `evaluation.metrics.averages`.
    """
    totals = np.asarray([episode.rewards["total"] for episode in episodes])
    result = averages(episodes, normalizer, tools)
    metrics: dict[str, Any] = {f"rollout/{name}": value for name, value in result.items()}
    metrics |= {f"rollout/kb/{name}": share for name, share in knowledge_base_shares(episodes).items()}
    for name in episodes[0].rewards:
        if of_term := judged(name, episodes):
            metrics[f"reward/{name}"] = float(np.mean([episode.rewards[name] for episode in of_term]))
    lengths = [len(sequence) for episode in episodes for sequence in episode.sequences] or [0]
    metrics["reward/std"] = float(totals.std())
    metrics["rollout/frac_reward_zero_std"] = float(groups_without_signal(totals, groups).mean())
    metrics["rollout/sequence_length/mean"] = float(np.mean(lengths))
    metrics["rollout/sequence_length/max"] = int(np.max(lengths))
    well_formed = [bool(e.turns) and all(t.well_formed for t in e.turns) for e in episodes]
    metrics["rollout/well_formed_rate"] = float(np.mean(well_formed))
    thoughts = [turn.action.thought for episode in episodes for turn in episode.turns if turn.action]
    metrics["rollout/thought_words"] = float(np.mean([len(thought.split()) for thought in thoughts] or [0]))
    of_type: dict[
        str, list[int]
    ] = {}  # bridge, comparison, ..: a policy that has collapsed searches equally often for all
    for episode in episodes:
        if kind := episode.example.metadata.get("type"):
            of_type.setdefault(str(kind), []).append(len(episode.calls))
    metrics |= {f"rollout/searches/{kind}": float(np.mean(counts)) for kind, counts in sorted(of_type.items())}
    failed: dict[str, list[bool]] = {}
    for call in (call for episode in episodes for call in episode.calls):
        failed.setdefault(call.tool, []).append(call.error is not None)
    metrics |= {f"tools/{name}/error_rate": float(np.mean(of_tool)) for name, of_tool in sorted(failed.items())}
    # The mean of -log p of the sampled tokens is an unbiased estimate of the policy's entropy per token.
    sampled = np.concatenate([np.zeros(0), *(s.logprobs[s.loss_mask] for e in episodes for s in e.sequences)])
    metrics["rollout/entropy"] = float(-sampled.mean()) if len(sampled) else 0.0
    return metrics


def why_no_signal(episodes: Sequence[Episode]) -> str:
    """The most frequent reason why attempts at a question differ in nothing, with what the policy wrote, and what to do."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for episode in episodes:
        invalid = next((turn for turn in episode.turns if turn.action and turn.action.kind == "invalid"), None)
        failed = next((call.error for turn in episode.turns for call in turn.calls if call.error), "")
        wrote = (invalid or episode.turns[-1]).text if episode.turns else ""
        if invalid is not None and invalid.action is not None:
            named = invalid.action.error.startswith("there is no ")
            remedy = (
                "name the knowledge bases (config.knowledge) as the policy does, or teach it their names by a warm start "
                "(config.warm_start)"
                if named
                else "teach the policy the form by a warm start (config.warm_start), or tell it (config.agent.instruct)"
            )
            reason = invalid.action.error if named else f"not parsed, as {invalid.action.error}"
        elif failed:
            reason, remedy = f"searches fail with {failed!r:.150}", "mend the tool (config.knowledge)"
        elif episode.answer is None:
            reason, remedy = (
                "there is no answer",
                "raise config.agent.max_turn_tokens and answer_tokens, or give a warm start",
            )
        else:
            reason, remedy = (
                "all attempts at a question get the same reward",
                "take questions that the policy answers right now and then, more attempts (config.rollout.samples), or a "
                "reward with finer steps, or give a warm start (config.warm_start)",
            )
        reasons.setdefault((reason, remedy), []).append(wrote)
    (reason, remedy), texts = max(reasons.items(), key=lambda item: len(item[1]))
    example = f", as in {texts[0].strip()[-120:]!r}" if texts[0].strip() else ""
    return f"{reason} ({len(texts)} of {len(episodes)} attempts{example}); {remedy}"


def staleness_metrics(episodes: Sequence[Episode], step: int) -> dict[str, float]:
    """How many steps older than the learner's weights before `step` the weights were that sampled each token."""
    ages = np.concatenate([np.zeros(0, int), *(step - s.versions[s.loss_mask] for e in episodes for s in e.sequences)])
    return {
        "rollout/staleness/mean": float(ages.mean()) if len(ages) else 0.0,
        "rollout/staleness/max": int(ages.max(initial=0)),
    }


def gap_metrics(sampler: Sequence[np.ndarray], learner: Sequence[np.ndarray]) -> dict[str, float]:
    """Statistics of |sampler log-prob - learner log-prob|, same tokens and weights; near zero if the numerics agree."""
    if not any(len(logprobs) for logprobs in sampler):
        return {}
    gap = np.abs(np.concatenate(list(sampler)) - np.concatenate(list(learner)))
    return {
        "sampler_gap/mean": float(gap.mean()),
        "sampler_gap/p99": float(np.percentile(gap, 99)),
        "sampler_gap/max": float(gap.max()),
    }


def ratio_metrics(behaviour: Sequence[np.ndarray], current: Sequence[np.ndarray]) -> dict[str, float]:
    """Importance ratios over a step's mini-batches: how far the policy moved from the policy that sampled.

    `ratio/kl` is the mean of log p_sampler - log p_learner over the sampled tokens, an estimate of KL(sampler || learner).
    """
    log_ratio = np.concatenate(list(current)) - np.concatenate(list(behaviour))
    if not len(log_ratio):
        return {}
    ratio = np.exp(np.clip(log_ratio, -20, 20))
    p95, p99 = np.percentile(np.abs(log_ratio), (95, 99))
    return {
        "ratio/kl": float(-log_ratio.mean()),
        "ratio/log_p95": float(p95),
        "ratio/log_p99": float(p99),
        "ratio/mean": float(ratio.mean()),
        "ratio/p99": float(np.percentile(ratio, 99)),
        "ratio/max": float(ratio.max()),
        "ratio/effective_sample_share": float(ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum())),
    }


def promoted_metrics(logprobs: Sequence[np.ndarray]) -> dict[str, float]:
    """Mean log-probability, before each update, of the tokens with a positive advantage.

    If it falls although these tokens are reinforced, likelihood is displaced. That precedes a collapse (Search-R1's issue 186).
    """
    promoted = np.concatenate(list(logprobs))
    return {"actor/promoted_logprob": float(promoted.mean())} if len(promoted) else {}


def memory_metrics() -> dict[str, float]:
    """Peak memory of this process and, if the backend reports it, of the first device, in GiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    metrics = {"memory/host_peak_gib": peak / (2**30 if sys.platform == "darwin" else 2**20)}
    stats = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        metrics["memory/device_peak_gib"] = stats["peak_bytes_in_use"] / 2**30
    return metrics


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
