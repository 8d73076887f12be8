"""The summary of an episode record for the index: the numbers to filter by, and the words to search."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

from routerl_jax.rewards.metrics import exact_match

FAILURES = (
    "no answer",
    "truncated",
    "invalid action",
    "malformed",
    "tool error",
    "repeated search",
    "picture not shown",
    "refusal",
    "endpoint",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary:
    """The numbers and words of an episode.

    Attributes:
      reward, advantage: nan where the record has none.
      correct: 1 or 0 by exact match, -1 where there is no gold answer.
      trained: 1 if the step learnt from the episode, 0 if not, -1 where the record does not say.
      tokens: sampled tokens of all turns.
      kbs: names of the knowledge bases that were searched.
      failures: of FAILURES.
      datasets: data set, kind and type of the question, from its metadata.
      search_text: question, gold answers, answer, thoughts and queries in lower case.
      passages: texts of the retrieved passages in lower case, titles included.
    """

    question: str
    text: str
    sample: int
    step: int
    reward: float
    advantage: float
    correct: int
    trained: int
    turns: int
    searches: int
    tokens: int
    forked: bool
    kbs: frozenset[str]
    failures: frozenset[str]
    datasets: frozenset[str]
    search_text: str
    passages: tuple[str, ...]


def summarise(record: Mapping[str, Any], normalizer: str) -> Summary:
    """The summary of a record as `evaluation.records` writes them.

    Raises:
      KeyError, TypeError, AttributeError, ValueError: it is no such record.
    """
    turns = record["turns"]
    calls = [call for turn in turns for call in turn["calls"]]
    actions = [turn["action"] or {} for turn in turns]
    golds = tuple(record["golden_answers"])
    rewards = record.get("rewards") or {}
    words = [record["id"], record["question"], *golds, record["prediction"] or ""]
    for turn, action in zip(turns, actions):
        words += [action.get("thought") or "", action.get("query") or "", action.get("error") or ""]
        words += [] if action.get("thought") or action.get("query") else [turn["text"]]
    words += [call["query"] for call in calls]
    return Summary(
        question=str(record["id"]),
        text=record["question"],
        sample=_count(record["sample"]),
        step=_count(record.get("step", -1)),
        reward=_number(rewards.get("total")),
        advantage=_number(record.get("advantage")),
        correct=int(_exact_match(record["prediction"], golds, normalizer)) if golds else -1,
        trained=int(bool(record["trained"])) if "trained" in record else -1,
        turns=len(turns),
        searches=len(calls),
        tokens=_count(sum(turn["tokens"] for turn in turns)),
        forked=bool(record.get("branches")),
        kbs=frozenset(call["tool"] for call in calls),
        failures=frozenset(_failures(record, calls, actions)),
        datasets=frozenset(_datasets(record.get("metadata") or {})),
        search_text="\n".join(dict.fromkeys(words)).lower(),
        passages=tuple(f"{p['title']}\n{p['text']}".lower() for call in calls for p in call["passages"]),
    )


def _failures(record: Mapping[str, Any], calls: list[dict[str, Any]], actions: list[dict[str, Any]]) -> list[str]:
    asked = [(call["tool"], call["query"], call.get("image")) for call in calls]
    shown = [item for turn in record["turns"] for item in turn.get("shown", ())]
    happened = {
        "no answer": record["prediction"] is None,
        "truncated": record["truncated"],
        "invalid action": any(action.get("kind") == "invalid" or action.get("error") for action in actions),
        "malformed": any(not turn["well_formed"] for turn in record["turns"]),
        "tool error": any(call["error"] is not None for call in calls),
        "repeated search": len(set(asked)) < len(asked),
        "picture not shown": any(item["error"] for item in shown),
        "refusal": any(action.get("kind") == "refusal" for action in actions),
        "endpoint": bool(record.get("failure")),
    }
    return [name for name in FAILURES if happened[name]]


def _datasets(metadata: Mapping[str, Any]) -> list[str]:
    """ "kind: mixed", "dataset: hotpotqa", ..; of several values each."""
    names = []
    for key, value in metadata.items():
        values = value if isinstance(value, list) else [value]
        names += [f"{key}: {text}" for text in values if isinstance(text, str)]
    return names


@functools.lru_cache(65536)
def _exact_match(prediction: str | None, golds: tuple[str, ...], normalizer: str) -> float:
    return exact_match(prediction, list(golds), normalizer)


def _count(value: Any) -> int:
    if not -(2**31) <= value < 2**31:
        raise ValueError(f"{value!r} is no number that the index can hold")
    return int(value)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else math.nan
