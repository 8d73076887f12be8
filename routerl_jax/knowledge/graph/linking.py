"""The start of a query's walk: the nearest facts, the weights of their phrases, and the recognition filter."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from absl import logging
from jaxtyping import Float32, Int

from routerl_jax.core.types import Message
from routerl_jax.knowledge.graph.parsing import json_value
from routerl_jax.knowledge.graph.triples import Triple
from routerl_jax.knowledge.vector_index import VectorSource
from routerl_jax.services.base import ChatModel

PhraseWeights = Literal["average", "released"]

_ROWS = 65_536  # vectors that are compared at a time, which bounds memory
_GROUP = 128  # values per group; the maxima of groups are compared first
_KEYS = 2048  # vectors per block, so that a block stays in the CPU's cache for all queries


class Scores(NamedTuple):
    """The needed part of the inner products of queries with all vectors."""

    best: list[tuple[Int[np.ndarray, " K"], Float32[np.ndarray, " K"]]]  # per query: ids and products, best first
    smallest: Float32[np.ndarray, " Q"]
    largest: Float32[np.ndarray, " Q"]


def products(queries: Float32[np.ndarray, "Q D"], keys: Float32[np.ndarray, "R D"]) -> Float32[np.ndarray, "Q R"]:
    """Inner products that do not depend on the other queries of the call.

    There is one product of matrix and vector per query. In a product of two matrices, the order in which the terms of a row are
    added depends, on some CPUs (AVX-512), on the position of the row in its block. That would take 0.4 of the time for 64
    queries.
    """
    result = np.empty((len(queries), len(keys)), np.float32)
    for start in range(0, len(keys), _KEYS):
        block = keys[start : start + _KEYS]
        for query, row in zip(queries, result):
            np.dot(block, query, out=row[start : start + _KEYS])
    return result


def nearest(queries: Float32[np.ndarray, "Q D"], vectors: VectorSource, k: int) -> Scores:
    """The k vectors with the largest inner product with each query (ties: the lower id), and the range of all products."""
    count = vectors.shape[0]
    best = [(np.zeros(0, np.int64), np.zeros(0, np.float32)) for _ in queries]
    smallest = np.full(len(queries), np.inf, np.float32)
    largest = -smallest
    for start in range(0, count, _ROWS):
        block = products(queries, vectors.read(start, min(start + _ROWS, count)))
        smallest, largest = np.minimum(smallest, block.min(1)), np.maximum(largest, block.max(1))
        for i, row in enumerate(block):
            ids = largest_of(row, k)
            ids, values = np.concatenate([best[i][0], ids + start]), np.concatenate([best[i][1], row[ids]])
            order = np.lexsort((ids, -values))[:k]
            best[i] = ids[order], values[order]
    return Scores(best, smallest, largest)


def largest_of(values: Float32[np.ndarray, " R"], k: int) -> Int[np.ndarray, " K"]:
    """Indices of the k largest values, best first; ties: the lower index."""
    grouped = len(values) // _GROUP * _GROUP
    if grouped >= 2 * k * _GROUP:  # the k-th largest maximum of groups is a bound that few values reach
        tops = values[:grouped].reshape(-1, _GROUP).max(1)
        candidates = np.flatnonzero(values >= np.partition(tops, -k)[-k])
    else:
        candidates = np.arange(len(values))
    return candidates[np.lexsort((candidates, -values[candidates]))[:k]]


def min_max(values: np.ndarray, smallest: np.ndarray, largest: np.ndarray) -> np.ndarray:
    """Values scaled to 0..1 by their range; 1 if the range is empty, as in HippoRAG."""
    extent = largest - smallest
    return np.where(extent > 0, (values - smallest) / np.where(extent > 0, extent, 1), 1)


def phrase_weights(
    ends: Int[np.ndarray, "K 2"],
    scores: Sequence[float],
    passages_of: Int[np.ndarray, " E"],
    *,
    keep: int,
    rule: PhraseWeights = "average",
) -> dict[int, float]:
    """Reset weights of the phrases of linked facts (HippoRAG 2, section 3.4), at most `keep` of them.

    A fact gives its score, divided by the number of passages that mention the phrase, to subject and object.

    Args:
      ends: entities of the facts, best fact first.
      scores: scores of the facts, 0..1.
      rule: "average": a phrase gets the mean over its facts, and the phrases with the largest weights are kept (HippoRAG since
        its issue 128). "released": the last fact of a phrase overwrites the others, and the phrases with the largest mean score
        of their facts are kept (RouteRAG's release).
    """
    shares: dict[int, list[tuple[float, float]]] = {}  # entity: (share, score) of each of its facts
    for (subject, object_), score in zip(ends.tolist(), scores):
        for entity in (subject, object_):
            shares.setdefault(entity, []).append((float(score) / max(int(passages_of[entity]), 1), float(score)))
    mean = {entity: sum(share for share, _ in facts) / len(facts) for entity, facts in shares.items()}
    if rule == "average":
        return dict(sorted(mean.items(), key=lambda item: -item[1])[:keep])
    linked = {entity: sum(score for _, score in facts) / len(facts) for entity, facts in shares.items()}
    best = sorted(linked, key=lambda entity: -linked[entity])[:keep]
    return {entity: shares[entity][-1][0] for entity in best}


class RecognitionFilter:
    """Asks a language model which of the linked facts are relevant to the question (HippoRAG 2, section 3.3).

    Args:
      most: most facts that are kept.
      max_tokens: most tokens of an answer.
    """

    def __init__(self, model: ChatModel, *, most: int = 4, max_tokens: int = 256) -> None:
        self.model, self.most, self.max_tokens = model, most, max_tokens

    def __call__(self, queries: Sequence[str], facts: Sequence[Sequence[Triple]]) -> list[list[int]]:
        """For each query, the indices of the facts to keep, in the model's order; all facts if its answer is unusable."""
        with_facts = [i for i, linked in enumerate(facts) if linked]
        answers = self.model.complete(
            [_filter_prompt(queries[i], facts[i], self.most) for i in with_facts],
            max_tokens=self.max_tokens,
            schema=_SCHEMA,
        )
        result = [list(range(len(linked))) for linked in facts]
        failed = 0
        for i, answer in zip(with_facts, answers):
            chosen = None if answer.error else _chosen(answer.text, len(facts[i]))
            failed += chosen is None
            result[i] = result[i] if chosen is None else chosen[: self.most]
        if failed:
            logging.warning(
                "%s: %d of %d answers name no facts; all are kept", self.model.name, failed, len(with_facts)
            )
        return result


_SCHEMA = {
    "type": "object",
    "properties": {"keep": {"type": "array", "items": {"type": "integer"}}},
    "required": ["keep"],
    "additionalProperties": False,
}


def _filter_prompt(query: str, facts: Sequence[Triple], most: int) -> list[Message]:
    listed = "\n".join(f"{number}. {json.dumps(fact, ensure_ascii=False)}" for number, fact in enumerate(facts, 1))
    return [
        Message(
            role="system",
            content=(
                "You select facts for a search engine. A fact is kept if it states something that helps to answer the "
                "question, be it only one step on the way to the answer. Facts about other things of a similar name are "
                f'left out. Reply with JSON alone: {{"keep": [numbers of at most {most} facts, most useful first]}}, or '
                '{"keep": []} if none helps.'
            ),
        ),
        Message(
            role="user",
            content="Question: Who founded the maker of the Zephyr?\n\n1. "
            '["zephyr", "is made by", "lincoln motor company"]\n2. ["zephyr", "is", "greek god of the west wind"]',
        ),
        Message(role="assistant", content='{"keep": [1]}'),
        Message(role="user", content=f"Question: {query}\n\n{listed}"),
    ]


def _chosen(text: str, count: int) -> list[int] | None:
    value = json_value(text, "keep")
    numbers = value.get("keep") if isinstance(value, dict) else value
    if not isinstance(numbers, list):
        return None
    if any(isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= count for n in numbers):
        return None
    return [n - 1 for n in dict.fromkeys(numbers)]
