"""Retrieval alone: the gold passages that BM25 finds for the questions of each benchmark at hand. No policy is asked.

python -m benchmarks.retrieval_alone --data=DATA --keep=benchmarks/results/retrieval_alone.json [--benchmarks=hotpotqa,..] \
    [--questions=-1]

Prints a table of docs/comparisons.md. Each knowledge base of a benchmark is searched by itself, with the question as the query
and BM25 for its passages or its tables' rows, whatever the benchmark's own retriever is. Only gold passages that it holds
count. Benchmarks without files in DATA, without gold passages, or whose knowledge bases are pictures are left out, and named.
Without --data it prints what the file has.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from routerl_jax.core.files import write_atomic
from routerl_jax.core.types import Passage
from routerl_jax.data.gold_paths import GoldHop
from routerl_jax.data.readers import open_dataset
from routerl_jax.extras.comparison.benchmarks import BENCHMARKS, located
from routerl_jax.extras.comparison.card import Names
from routerl_jax.knowledge.store import Manifest
from routerl_jax.rewards.retrieval import Retrieval, gold_passages_of
from routerl_jax.rewards.scoring import bootstrap_intervals
from routerl_jax.training.config import KnowledgeConfig
from routerl_jax.training.knowledge import kb_directory, open_knowledge_bases

K = (1, 3, 5, 10)
_READABLE = ("dense_text", "dense_table", "ocr")  # kinds whose sources BM25 can read


def measured(name: str, data: str, questions: int) -> dict[str, Any]:
    """Recall at every k of `K`, and NDCG at the largest, by knowledge base, each as [mean, low, high].

    With `n`, the questions with a gold passage in the knowledge base, and `passages`.

    Raises:
      ValueError: the benchmark has no files in `data`, no gold passages or no knowledge base of words.
    """
    benchmark = located(name, BENCHMARKS.get(name), data)
    source = open_dataset(benchmark.questions[0])
    questions_with_gold = [(source[i], gold) for i in range(len(source)) if (gold := gold_passages_of(source[i]))]
    questions_with_gold = questions_with_gold[: None if questions == -1 else questions]
    if not questions_with_gold:
        raise ValueError("its questions name no gold passages")
    specs = {kb: spec for kb, spec in benchmark.knowledge.items() if spec.kind in _READABLE and spec.source}
    if not specs:
        raise ValueError("its knowledge bases are pictures")
    results: dict[str, Any] = {}
    for kb, spec in specs.items():
        latin = {"words": {"split": "latin"}}  # those of its kept results
        words = KnowledgeConfig(source=spec.source, kind="bm25", settings=latin) if spec.kind != "ocr" else spec
        tool: Any = open_knowledge_bases({kb: words}, progress=False)[kb]
        names = Names()
        names.add(kb_directory(kb, words))
        held = [(example, own) for example, gold in questions_with_gold if (own := tuple(filter(names.hold, gold)))]
        if not held:
            continue
        rankings = tool.search([example.question for example, _ in held], K[-1])
        passages = Manifest.read(kb_directory(kb, words)).count
        results[kb] = {"n": len(held), "passages": passages, **_scores([gold for _, gold in held], rankings)}
    return results


def _scores(golds: Sequence[tuple[GoldHop, ...]], rankings: Sequence[Sequence[Passage]]) -> dict[str, list[float]]:
    rows = []
    for gold, passages in zip(golds, rankings, strict=True):
        by_k = [Retrieval(searches=(tuple(passages[:k]),), gold=gold) for k in K]
        rows.append([*(retrieval.recall() for retrieval in by_k), by_k[-1].ndcg()])
    scores = np.asarray(rows)
    spans = bootstrap_intervals(scores)
    names = [*(f"recall@{k}" for k in K), f"ndcg@{K[-1]}"]
    return {
        name: [round(float(scores[:, i].mean()), 5), *spans[:, i].round(5).tolist()] for i, name in enumerate(names)
    }


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown: a row for each knowledge base of each benchmark."""
    names = [*(f"recall@{k}" for k in K), f"ndcg@{K[-1]}"]
    headings = [
        "benchmark",
        "knowledge base",
        "passages",
        "questions",
        *(name.replace("ndcg", "NDCG") for name in names),
    ]
    lines = ["| " + " | ".join(headings) + " |", "|---|---" + "|---:" * (len(headings) - 2) + "|"]
    for benchmark, bases in results.items():
        for kb, row in bases.items():
            cells = [
                benchmark,
                kb,
                f"{row['passages']:,}",
                f"{row['n']:,}",
                *(_interval_text(row[name]) for name in names),
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _interval_text(value: Sequence[float]) -> str:
    mean, low, high = (100 * part for part in value)
    return f"{mean:.1f} ({low:.1f} to {high:.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=pathlib.Path, required=True, help="JSON file of the results")
    parser.add_argument("--data", default="", help="directory with the files of the benchmarks")
    parser.add_argument("--benchmarks", default=",".join(BENCHMARKS), help="default: all")
    parser.add_argument("--questions", type=int, default=-1, help="the first so many with gold passages; -1: all")
    arguments = parser.parse_args()
    results: dict[str, Any] = json.loads(arguments.keep.read_text()) if arguments.keep.exists() else {}
    for name in arguments.benchmarks.split(",") if arguments.data else ():
        try:
            results[name] = measured(name, arguments.data, arguments.questions)
        except ValueError as error:
            print(f"left out: {name}: {str(error).partition(';')[0]}")
            continue
        write_atomic(arguments.keep, json.dumps(results, indent=1) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
