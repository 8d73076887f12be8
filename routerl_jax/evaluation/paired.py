"""Paired comparison of two agents on the same questions, from records or scores: is one better, or cheaper?"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from routerl_jax.rewards.metrics import exact_match
from routerl_jax.rewards.scoring import bootstrap_intervals

_RESAMPLES = 2000  # of intervals
_P_RESAMPLES = 99_999  # of p, which is thus at least 1e-5
_P_BATCHES = 9  # that bound the memory
_FLIPS = 9999  # random sign flips of the permutation test, if there are more possible ones

Record = Mapping[str, Any]


def record_em(record: Record, normalizer: str = "search_r1") -> float:
    """Exact match of an episode record."""
    return exact_match(record["prediction"], tuple(record["golden_answers"]), normalizer)


def record_cost(record: Record) -> float:
    """Total cost of the searches of an episode record."""
    return float(sum(call["cost"] for turn in record["turns"] for call in turn["calls"]))


def by_question(agents: Mapping[str, Iterable[Record]]) -> dict[str, dict[str, Record]]:
    """For each agent, its records by question id.

    Raises:
      ValueError: an agent has no records, two for one question, or other questions than the first agent.
    """
    records_of: dict[str, dict[str, Record]] = {}
    for agent, records in agents.items():
        rows = records_of[agent] = {}
        for record in records:
            if rows.setdefault(str(record["id"]), record) is not record:
                raise ValueError(f"{agent} has two episodes at question {record['id']!r}; one attempt each is compared")
        first, expected = next(iter(records_of.items()))
        if not rows:
            raise ValueError(f"{agent} has no episodes")
        if only := sorted(rows.keys() ^ expected.keys()):
            raise ValueError(
                f"{first} and {agent} were not asked the same questions; only one of them has {only[:3]}; "
                "evaluate both on the same questions"
            )
    return records_of


def compare_records(first: Iterable[Record], second: Iterable[Record], normalizer: str = "search_r1") -> dict[str, Any]:
    """How `first` differs from `second`: `compare_seeds` for one run."""
    return compare_seeds([(first, second)], normalizer)


def compare_seeds(
    runs: Iterable[tuple[Iterable[Record], Iterable[Record]]], normalizer: str = "search_r1"
) -> dict[str, Any]:
    """How the first agent of each run differs from the second, over all runs of a configuration.

    Returns:
      - `em_difference` with `em_difference_interval`: 95 %, paired bootstrap over the questions and, if there are several, over
        the runs. With few runs that differ, it is wide, as it should be. If every question has the same difference in all runs,
        it is the score interval of `bootstrap_intervals`.
      - `em_difference_by_run`, and `mcnemar_p_by_run`: for each run, exact and two-sided, the p of the hypothesis that each
        agent is equally likely to be the only one to answer a question.
      - `mcnemar_p`: of the worst run, which is the largest; 1 if runs differ in opposite directions.
      - `bootstrap_p`: two-sided, of the hypothesis that there is no difference over all runs: (c + 1) / (`bootstrap_resamples`
        + 1), where c counts the resamples whose difference is at least as far from `em_difference` as that is from 0. Resamples
        are of whole questions, with their results in all runs, and, if there are several, of runs. It is never below 1e-5, nor
        below the least p of a sign test of the questions that differ. With few runs that differ it is somewhat too small.
      - `cost_reduction`, which is 1 - cost / cost, with `cost_reduction_interval`.
      - `n`, the number of questions of a run.

    Raises:
      ValueError: there are no runs, the questions differ, or a question was answered twice.
    """
    agents: dict[str, Iterable[Record]] = {}
    for number, (first, second) in enumerate(runs):
        where = f" of run {number + 1}" if number else ""
        agents |= {f"the first{where}": first, f"the second{where}": second}
    if not agents:
        raise ValueError("there are no runs to compare")
    records = list(by_question(agents).values())
    values = np.asarray([_pairs(ours, theirs, normalizer) for ours, theirs in zip(records[::2], records[1::2])])
    ours, theirs = values[..., 0], values[..., 1]
    gained = (ours == 1).astype(int) - (theirs == 1)
    count, questions = values.shape[:2]
    rng = np.random.default_rng(0)

    def resample() -> tuple[float, float]:
        chosen = values[rng.integers(count, size=count)] if count > 1 else values
        return _statistics(chosen[:, rng.integers(questions, size=questions)].mean(axis=0))

    drawn = np.asarray([resample() for _ in range(_RESAMPLES)])
    em, cost = _statistics(values.mean(axis=0))
    low, high = np.nanquantile(drawn, (0.025, 0.975), axis=0)
    if not np.ptp(ours - theirs):  # all resamples are equal
        low[0], high[0] = bootstrap_intervals((ours - theirs)[..., None], differences=True)[:, 0]
    chances = [_mcnemar(int((row > 0).sum()), int((row < 0).sum())) for row in gained]
    of_runs = gained.mean(axis=1)
    return {
        "em_difference": em,
        "em_difference_interval": [float(low[0]), float(high[0])],
        "em_difference_by_run": of_runs.tolist(),
        "mcnemar_p": 1.0 if of_runs.min() < 0 < of_runs.max() else max(chances),
        "mcnemar_p_by_run": chances,
        "bootstrap_p": _bootstrap_p(gained),
        "bootstrap_resamples": _P_RESAMPLES,
        "cost_reduction": cost,
        "cost_reduction_interval": [float(low[1]), float(high[1])],
        "n": questions,
    }


def compare_scores(
    ours: Float[np.ndarray, "*S N"], theirs: Float[np.ndarray, "*S N"]
) -> dict[str, float | list[float]]:
    """How a metric of one agent differs from that of another on the same questions, with one attempt each or one of each seed.

    Returns:
      `difference` of the means with its `interval` (95 %, `bootstrap_intervals`), and the two-sided `p` of the hypothesis that
      the two scores on each question (with several seeds their means) are exchangeable. It comes from the exact sign test
      (McNemar's) if all of these are 0 or 1, else from random sign flips (scipy.stats.permutation_test, samples permuted).

    Raises:
      ValueError: the numbers of scores differ, or are 0.
    """
    if np.shape(ours) != np.shape(theirs) or not np.size(ours):
        raise ValueError(f"{np.shape(ours)[-1]} and {np.shape(theirs)[-1]} scores can't be paired")
    ours, theirs = (np.asarray(scores, float).reshape(-1, np.shape(scores)[-1]) for scores in (ours, theirs))
    differences = ours - theirs
    means = [scores.mean(axis=0) for scores in (ours, theirs)]
    return {
        "difference": float(differences.mean()),
        "interval": bootstrap_intervals(differences[..., None], differences=True)[:, 0].tolist(),
        "p": _p_value(means[0] - means[1], bool(np.isin(means, (0.0, 1.0)).all())),
    }


def holm(chances: Sequence[float]) -> list[float]:
    """The p-values of several tests, corrected for their number (Holm, Scandinavian Journal of Statistics 6, 1979).

    The probability that any corrected value is below 0.05 by chance is at most 0.05, however the tests depend on each other.
    """
    corrected, worst = [0.0] * len(chances), 0.0
    for rank, i in enumerate(np.argsort(chances, kind="stable").tolist()):
        worst = max(worst, min(1.0, (len(chances) - rank) * chances[i]))
        corrected[i] = worst
    return corrected


def _p_value(differences: Float[np.ndarray, " N"], binary: bool) -> float:
    if binary:
        return _mcnemar(int((differences > 0).sum()), int((differences < 0).sum()))
    if len(differences) < 2 or not differences.any():
        return 1.0
    from scipy import stats  # here, because importing it takes half a second

    test = stats.permutation_test(
        (differences,),
        lambda values, axis: values.mean(axis=axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=_FLIPS,
        batch=max(1, 10**6 // len(differences)),
        rng=np.random.default_rng(0),
    )
    return float(test.pvalue)


def _pairs(ours: Mapping[str, Record], theirs: Mapping[str, Record], normalizer: str) -> list[list[float]]:
    """EM and cost of both at each question, in the order of their ids."""
    return [
        [
            record_em(ours[key], normalizer),
            record_em(theirs[key], normalizer),
            record_cost(ours[key]),
            record_cost(theirs[key]),
        ]
        for key in sorted(ours)
    ]


def _mcnemar(won: int, lost: int) -> float:
    """Probability that a fair coin falls at least as unevenly, in either direction."""
    count = won + lost
    tail = sum(math.comb(count, i) for i in range(min(won, lost) + 1))
    return min(1.0, 2 * tail / 2**count)


def _bootstrap_p(gained: Int[np.ndarray, "R N"]) -> float:
    """`bootstrap_p` of `compare_seeds`, from the first agent's gain at every question of every run (1, 0 or -1)."""
    runs, questions = gained.shape
    # questions with the same gains in all runs are interchangeable
    patterns, counts = np.unique(gained, axis=1, return_counts=True)
    total, far, rng = gained.sum(), 0, np.random.default_rng(0)
    for _ in range(_P_BATCHES):
        size = _P_RESAMPLES // _P_BATCHES
        of_runs = rng.multinomial(runs, np.full(runs, 1 / runs), size=size)
        of_questions = rng.multinomial(questions, counts / questions, size=size)
        sums = (of_runs @ patterns * of_questions).sum(axis=1)
        far += int((abs(sums - total) >= abs(total)).sum())
    telling = int((gained.sum(axis=0) != 0).sum())
    return min(1.0, max((far + 1) / (_P_RESAMPLES + 1), 2.0 ** (1 - telling)))


def _statistics(values: Float[np.ndarray, "N 4"]) -> tuple[float, float]:
    """Difference of the means of EM, and the share of the second's cost that the first saves (0 if the second costs
    nothing)."""
    means = values.mean(axis=0)
    return float(means[0] - means[1]), float(1 - means[2] / means[3]) if means[3] else 0.0
