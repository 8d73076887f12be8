"""Analysis of how training changed a policy: turns, searches, modes, cost, and the accuracy that goes with them."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from routerl_jax.evaluation.metrics import breakdown, by_group, search_rates
from routerl_jax.evaluation.paired import Record, by_question, record_cost, record_em
from routerl_jax.rewards.metrics import f1
from routerl_jax.rewards.scoring import bootstrap_intervals

CURVES = ("reward/total", "rollout/searched_rate")  # of sampled attempts; runs are compared by them over their steps
_BINS = 4  # bins of tokens


def analyse(
    records: Mapping[str, Sequence[Record]], normalizer: str = "search_r1", budget: int | None = None
) -> dict[str, Any]:
    """Behaviour of several agents on the same questions.

    Args:
      budget: searches that each of them may make on a question (Agent.search_budget).

    Returns:
      By agent: `behaviour`, and EM by number of turns and by sampled tokens. The tokens are binned in quartiles of all agents'
      episodes, so that agents can be compared. If the questions have several data sets, kinds or types, `by` has for each such
      key and value the entries of `behaviour` about right answers and searches.

    Raises:
      ValueError: an agent has no episodes, or other questions than the first agent.
    """
    by_question(records)
    tokens = np.concatenate([[_tokens(record) for record in rows] for rows in records.values()])
    edges = np.quantile(tokens, np.linspace(0, 1, _BINS + 1))
    return {
        name: behaviour(rows, normalizer, budget)
        | {
            "em_by_turns": _em_by_turns(rows, normalizer),
            "em_by_tokens": _em_by_tokens(rows, edges, normalizer),
            "by": _by_group(rows, normalizer, budget),
        }
        for name, rows in records.items()
    }


def analyse_workflows(
    records: Mapping[str, Mapping[str, Sequence[Record]]],
    normalizer: str = "search_r1",
    budgets: Mapping[str, int | None] | None = None,
) -> dict[str, dict[str, Any]]:
    """Behaviour of several policies in the same fixed workflows (MMSearch-R1, arXiv 2506.20670, figure 4a).

    Args:
      records: episode records by workflow and policy.
      budgets: for each workflow, the searches on a question.

    Returns:
      By workflow and policy: `behaviour`, and `by` as in `analyse`.

    Raises:
      ValueError: not all have the same questions.
    """
    by_question(
        {f"{policy} as {name}": rows for name, policies in records.items() for policy, rows in policies.items()}
    )
    budget_of = budgets or {}
    return {
        name: {
            policy: behaviour(rows, normalizer, budget_of.get(name))
            | {"by": _by_group(rows, normalizer, budget_of.get(name))}
            for policy, rows in policies.items()
        }
        for name, policies in records.items()
    }


def behaviour(records: Sequence[Record], normalizer: str = "search_r1", budget: int | None = None) -> dict[str, Any]:
    """Metrics of an agent's behaviour:

    - `em` with `em_interval` (95 %, bootstrap), `f1`, and `n`, the number of questions;
    - means per question: `turns`, `searches`, `tokens` (sampled), `retrieval_cost`, `retrieval_seconds`;
    - `mode_usage`: the share of searches by knowledge base; `mode_by_step`: the same for first searches, second ones and so on
      (figure 3 of R1-Router, arXiv 2505.22095);
    - `searches_of_correct`: the number of searches of rightly answered questions (its figure 2c);
    - `searched_rate`, `search_ratio` (if there is a `budget`) and `breakdown`, as in `metrics.summarize`.
    """
    return {
        **_answered_and_searched(records, normalizer, budget),
        "f1": float(np.mean([f1(r["prediction"], tuple(r["golden_answers"]), normalizer) for r in records])),
        "turns": float(np.mean([len(record["turns"]) for record in records])),
        "searches": float(np.mean([len(_calls(record)) for record in records])),
        "tokens": float(np.mean([_tokens(record) for record in records])),
        "retrieval_cost": float(np.mean([record_cost(record) for record in records])),
        "retrieval_seconds": float(np.mean([sum(call["seconds"] for call in _calls(record)) for record in records])),
        "mode_usage": _shares(collections.Counter(call["tool"] for record in records for call in _calls(record))),
    }


def training_curves(
    runs: Mapping[str, Sequence[Mapping[str, Any]]],
) -> dict[str, list[dict[str, Any]]]:
    """`CURVES` over the steps of several runs, by name, from the rows of their metrics.jsonl. Supervised runs, which have no
    reward, are left out."""
    curves = {
        name: [{key: row.get(key) for key in ("step", *CURVES)} for row in rows if row.get(CURVES[0]) is not None]
        for name, rows in runs.items()
    }
    return {name: rows for name, rows in curves.items() if rows}


def analyse_calibration(
    measured: Mapping[str, Mapping[str, Any]], penalty: float, trained: Mapping[str, Any]
) -> dict[str, Any]:
    """Compares the knowledge and the searches of the untrained policy with the behaviour of the trained policy.

    Args:
      measured: `calibration` of results.json, by kind of question.
      penalty: the share of a right answer's reward that a search costs.
      trained: the trained policy's row of `analyse`.

    Returns:
      `penalty`, and `kinds`: the entries of `measured`, each with the trained policy's `em` and `searched_rate`. {} if
      `measured` is empty.
    """
    kinds = trained["by"].get("kind", {})
    after = {kind: {key: kinds[kind][key] for key in ("em", "searched_rate")} for kind in measured if kind in kinds}
    return (
        {"penalty": penalty, "kinds": {kind: {**measured[kind], **row} for kind, row in after.items()}} if after else {}
    )


def _by_group(records: Sequence[Record], normalizer: str, budget: int | None) -> dict[str, dict[str, Any]]:
    return {
        key: {
            value: _answered_and_searched([records[i] for i in numbers], normalizer, budget)
            for value, numbers in values.items()
        }
        for key, values in by_group([record.get("metadata", {}) for record in records]).items()
    }


def _answered_and_searched(records: Sequence[Record], normalizer: str, budget: int | None) -> dict[str, Any]:
    em = np.asarray([record_em(record, normalizer) for record in records])
    searches = np.asarray([len(_calls(record)) for record in records])
    return {
        "em": float(em.mean()),
        "em_interval": bootstrap_intervals(em[:, None])[:, 0].tolist(),
        **search_rates(searches.tolist(), budget),
        "breakdown": breakdown(em == 1, searches > 0),
        "mode_by_step": _mode_by_step(records),
        "searches_of_correct": _searches_of_correct(records, em),
        "n": len(records),
    }


def _mode_by_step(records: Sequence[Record]) -> list[dict[str, Any]]:
    by_step: dict[int, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for record in records:
        for step, call in enumerate(_calls(record), 1):
            by_step[step][call["tool"]] += 1
    return [{"step": step, "mode_usage": _shares(modes), "n": modes.total()} for step, modes in sorted(by_step.items())]


def _searches_of_correct(records: Sequence[Record], em: np.ndarray) -> dict[str, Any]:
    """`mean` (None without a right answer), and the `share` of right answers by number of searches."""
    counts = [len(_calls(record)) for record, right in zip(records, em) if right == 1]
    shares = _shares(collections.Counter(counts))
    return {"mean": float(np.mean(counts)) if counts else None, "share": {str(k): v for k, v in shares.items()}}


def _shares(counts: collections.Counter[Any]) -> dict[Any, float]:
    return {name: count / counts.total() for name, count in sorted(counts.items())}


def _em_by_turns(records: Sequence[Record], normalizer: str) -> list[dict[str, float]]:
    by_turns: dict[int, list[float]] = collections.defaultdict(list)
    for record in records:
        by_turns[len(record["turns"])].append(record_em(record, normalizer))
    return [{"turns": turns, "em": float(np.mean(em)), "n": len(em)} for turns, em in sorted(by_turns.items())]


def _em_by_tokens(records: Sequence[Record], edges: np.ndarray, normalizer: str) -> list[dict[str, float]]:
    tokens = np.asarray([_tokens(record) for record in records])
    em = np.asarray([record_em(record, normalizer) for record in records])
    bins = np.searchsorted(edges[1:-1], tokens, side="left")
    rows = []
    for i in range(len(edges) - 1):
        inside = em[bins == i]
        if len(inside):
            row = {"from": float(edges[i]), "to": float(edges[i + 1]), "em": float(inside.mean()), "n": len(inside)}
            rows.append(row)
    return rows


def _calls(record: Record) -> list[Mapping[str, Any]]:
    return [call for turn in record["turns"] for call in turn["calls"]]


def _tokens(record: Record) -> int:
    return sum(turn["tokens"] for turn in record["turns"])
