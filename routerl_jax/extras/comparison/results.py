"""Computes numbers from episodes: metrics with intervals, costs, and paired tests between agents."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from routerl_jax.core.types import Episode
from routerl_jax.evaluation.metrics import ANSWER, JUDGE, answer_scores, summarize
from routerl_jax.evaluation.paired import compare_scores, holm

Scores = Mapping[str, Float[np.ndarray, " N"]]  # scores of a row, by metric; nan for episodes that are left out


def row_scores(
    episodes: Sequence[Episode], metrics: Sequence[str], normalizer: str
) -> dict[str, Float[np.ndarray, " N"]]:
    """Scores of each episode, by metric; nan if the judge's verdict does not count."""
    table = answer_scores(episodes, normalizer)
    verdicts = [e.verdict.counts if e.verdict is not None else None for e in episodes]
    judged = np.asarray([np.nan if counts is None else counts for counts in verdicts])
    return {name: judged if name == JUDGE else table[:, ANSWER.index(name)] for name in metrics}


def row_results(
    episodes: Sequence[Episode],
    records: Sequence[Mapping[str, Any]],
    tools: Sequence[str],
    normalizer: str,
    budget: int | None,
) -> dict[str, Any]:
    """The numbers of an agent's episodes on a benchmark: `evaluation.metrics.summarize`, and `cost`.

    `cost` has means per question: `searches` by knowledge base, tokens `read` and `written`, `seconds` (shared by all questions
    that ran side by side), and `money` if there is a price.
    """
    summary = summarize(episodes, normalizer, tools, budget)
    count = len(episodes)
    searched = collections.Counter(call.tool for episode in episodes for call in episode.calls)
    took = {key: sum(record["took"][key] for record in records) / count for key in ("read", "written", "seconds")}
    money = sum(episode.usage.cost for episode in episodes if episode.usage is not None) / count
    searches = {name: searched[name] / count for name in (*tools, *sorted(searched.keys() - set(tools)))}
    return {**summary, "cost": {"searches": searches, **took, **({"money": money} if money else {})}}


def paired_tests(rows: Mapping[str, Scores], metrics: Sequence[str], reference: str = "") -> list[dict[str, Any]]:
    """Paired tests between rows of a benchmark, for each metric: between every two rows, or each row and the `reference`
    (none if that is not among the rows).

    Returns:
      One entry per `metric`, `first` and `second`, in the order of the rows. It has `difference`, `interval` and `p`
      (paired.compare_scores) on the `n` questions on which both have a score, and `holm`, the `p` corrected for the number of
      tests of this metric.
    """
    pairs = list(itertools.combinations(rows, 2))
    if reference:
        pairs = [(name, reference) for name in rows if name != reference and reference in rows]
    tests: list[dict[str, Any]] = []
    for metric in metrics:
        of_metric = []
        for first, second in pairs:
            ours, theirs = rows[first][metric], rows[second][metric]
            scored = ~(np.isnan(ours) | np.isnan(theirs))
            if scored.any():
                compared = compare_scores(ours[scored], theirs[scored])
                of_metric.append(
                    {"metric": metric, "first": first, "second": second, "n": int(scored.sum()), **compared}
                )
        corrected = holm([test["p"] for test in of_metric])
        tests += [{**test, "holm": value} for test, value in zip(of_metric, corrected)]
    return tests
