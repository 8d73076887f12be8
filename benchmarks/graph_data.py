"""Real questions, their passages and graph knowledge bases of them, for benchmarks/graph.py."""

from __future__ import annotations

import pathlib
import sys
from typing import Any

from routerl_jax.core.rows import read_rows
from routerl_jax.core.types import Passage
from routerl_jax.knowledge.corpus import read_corpus
from routerl_jax.knowledge.graph.build import GraphConfig, build_graph_from_passages
from routerl_jax.knowledge.graph.triples import PrecomputedTriples

DATASETS = ("musique", "hotpotqa", "2wikimultihopqa")


def questions_and_passages(data: pathlib.Path, dataset: str) -> tuple[list[dict[str, Any]], list[Passage]]:
    """A dataset's development questions with gold passages, and its corpus.

    Of MuSiQue, the passages that have triples, and the questions whose gold passages are among them.
    """
    rows = [row for _, row in read_rows(data / dataset / "questions_dev.jsonl.gz") if row.get("supporting")]
    corpus = list(read_corpus(data / dataset / "corpus.jsonl.gz"))
    if dataset == "musique":
        precomputed = PrecomputedTriples(data / dataset / "triples.jsonl.gz")
        corpus = [passage for passage in corpus if precomputed.of(passage)]
        there = {passage.id for passage in corpus}
        rows = [row for row in rows if set(row["supporting"]) <= there]
    return rows, corpus


def build(data: pathlib.Path, work: pathlib.Path, dataset: str) -> pathlib.Path:
    """The knowledge base of a dataset's corpus, built at the first call: given triples for MuSiQue, rules for the others."""
    directory = work / f"graph_{dataset}"
    if not (directory / "kb.json").is_file():
        _, corpus = questions_and_passages(data, dataset)
        triples = str(data / dataset / "triples.jsonl.gz") if dataset == "musique" else ""
        config = GraphConfig(extractor="given" if triples else "rules", triples=triples, shard_size=512)
        print(build_graph_from_passages(corpus, config, directory), file=sys.stderr)
    return directory
