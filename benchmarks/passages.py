"""Passage recall on the real questions and corpora of HotpotQA, 2WikiMultihopQA and MuSiQue: BM25, dense, and both fused.

Embeddings are made once, in the directory that ROUTERL_BENCH_CACHE names (default: the user's cache); an hour on two
busy cores.
"""

from __future__ import annotations

import os
import pathlib
from typing import Any

import numpy as np

from routerl_jax.core.rows import read_rows
from routerl_jax.knowledge.base import KnowledgeBase
from routerl_jax.knowledge.bm25 import Bm25Config, Words, build_bm25
from routerl_jax.knowledge.build import BuildConfig, build_kb
from routerl_jax.knowledge.hybrid import HybridKB
from routerl_jax.knowledge.load import load_kb

DATASETS = ("hotpotqa", "2wikimultihopqa", "musique")
K = 5
# Of the development questions, by bm25s alone with the same settings (the manifest of the data).
BM25_REFERENCE = {"hotpotqa": 0.7500, "2wikimultihopqa": 0.6639, "musique": 0.4848}


def measure(quick: bool) -> dict[str, Any]:
    """Recall@5 per corpus and retriever; `quick`: MuSiQue alone, and dense only where its vectors are there already."""
    data, result = data_directory(), {}
    for name in DATASETS[-1:] if quick else DATASETS:
        result[name] = _measure_corpus(data / name, cache_directory(), dense=not quick)
        result[name]["bm25_reference"] = BM25_REFERENCE[name]
    return {"ratios": {}, "recall": result}


def data_directory() -> pathlib.Path:
    """The real datasets.

    Raises:
      ValueError: ROUTERL_TEST_DATA is not set.
    """
    data = os.environ.get("ROUTERL_TEST_DATA")
    if not data:
        raise ValueError("set ROUTERL_TEST_DATA to the directory of real datasets")
    return pathlib.Path(data)


def cache_directory() -> pathlib.Path:
    """The directory in which knowledge bases of benchmarks are kept."""
    default = pathlib.Path.home() / ".cache" / "routerl_jax" / "benchmarks"
    return pathlib.Path(os.environ.get("ROUTERL_BENCH_CACHE", default))


def dense_kb(name: str) -> pathlib.Path:
    """MiniLM's knowledge base of a dataset's corpus, built at the first call (five minutes on two idle cores)."""
    directory = cache_directory() / f"kb_{name}"
    if not (directory / "kb.json").is_file():
        build_kb(BuildConfig(corpus=str(data_directory() / name / "corpus.jsonl.gz")), directory)
    return directory


def _measure_corpus(data: pathlib.Path, cache: pathlib.Path, dense: bool) -> dict[str, float]:
    corpus = str(data / "corpus.jsonl.gz")
    rows = [row for _, row in read_rows(data / "questions_dev.jsonl.gz") if row["supporting"]]
    build_bm25(Bm25Config(corpus=corpus, words=Words(split="latin")), cache / f"bm25_{data.name}", progress=False)
    kbs: dict[str, KnowledgeBase] = {"bm25": load_kb(cache / f"bm25_{data.name}")}
    if dense or (cache / f"kb_{data.name}" / "kb.json").is_file():
        kbs["dense"] = load_kb(dense_kb(data.name))
        kbs["hybrid"] = HybridKB([kbs["bm25"], kbs["dense"]])
    return {name: recall_at(kb, rows, K) for name, kb in kbs.items()}


def recall_at(kb: KnowledgeBase, rows: list[dict[str, Any]], k: int) -> float:
    """Mean share of a question's gold passages among the first k."""
    results = kb.search([row["question"] for row in rows], k)
    gold = [set(row["supporting"]) for row in rows]
    return float(np.mean([len({p.id for p in passages} & ids) / len(ids) for passages, ids in zip(results, gold)]))
