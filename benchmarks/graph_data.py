"""Real questions, their passages and graph knowledge bases of them, for benchmarks/graph.py."""

from __future__ import annotations

import gzip
import json
import pathlib
import random
import sys
from typing import Any

from routerl_jax.core.types import Passage
from routerl_jax.knowledge.corpus import read_corpus
from routerl_jax.knowledge.graph.build import GraphConfig, build_graph_from_passages
from routerl_jax.knowledge.graph.triples import GivenTriples

DATASETS = ("musique", "hotpotqa", "2wikimultihopqa")


def questions_and_passages(
    data: pathlib.Path, dataset: str, questions: int, passages: int
) -> tuple[list[dict[str, Any]], list[Passage]]:
    """Questions with gold passages, and a corpus that holds all of these and others, up to `passages`, by a fixed seed.

    MuSiQue's are those whose gold passages have triples; its corpus is what has triples.
    """
    with gzip.open(data / dataset / "questions_dev.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = [row for row in map(json.loads, file) if row.get("supporting")]
    corpus = list(read_corpus(data / dataset / "corpus.jsonl.gz"))
    if dataset == "musique":
        given = GivenTriples(data / dataset / "triples.jsonl.gz")
        corpus = [passage for passage in corpus if given.of(passage)]
        there = {passage.id for passage in corpus}
        rows = [row for row in rows if set(row["supporting"]) <= there]
    rng = random.Random(0)
    rows = sorted(rng.sample(rows, min(questions, len(rows))), key=lambda row: row["id"])
    gold = {id for row in rows for id in row["supporting"]}
    others = [passage.id for passage in corpus if passage.id not in gold]
    chosen = gold | set(rng.sample(others, max(0, min(passages - len(gold), len(others)))))
    return rows, [passage for passage in corpus if passage.id in chosen]


def build(data: pathlib.Path, work: pathlib.Path, dataset: str, questions: int, passages: int) -> pathlib.Path:
    """The knowledge base of a dataset's corpus, built at the first call: given triples for MuSiQue, rules for the others."""
    directory = work / f"{dataset}-{questions}-{passages}"
    _, corpus = questions_and_passages(data, dataset, questions, passages)
    triples = str(data / dataset / "triples.jsonl.gz") if dataset == "musique" else ""
    config = GraphConfig(extractor="given" if triples else "rules", triples=triples, shard_size=512)
    print(build_graph_from_passages(corpus, config, directory), file=sys.stderr)
    return directory
