"""Graph retrieval: batched personalised PageRank beside python-igraph's PRPACK, and whole queries beside HippoRAG's own code.

    python -m benchmarks.graph [--datasets hotpotqa ..] [--repeats 5] [--json]

ROUTERL_TEST_DATA names the real datasets, ROUTERL_BENCH_CACHE where the knowledge bases stay that are built at the first run
(minutes to half an hour: MiniLM embeds passages, phrases and facts), ROUTERL_HIPPORAG a checkout of OSU-NLP-Group/HippoRAG
(github.com, commit c617143); without the last, what needs it is left out. igraph is needed (`pip install igraph`).
"""

from __future__ import annotations

from routerl_jax.parallel.platform import tune_process

if __name__ == "__main__":
    tune_process()

import argparse
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.graph_data import DATASETS, build, questions_and_passages
from benchmarks.passages import cache_directory, data_directory

BATCH, TOP = 64, 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--datasets", nargs="*", default=list(DATASETS), choices=list(DATASETS))
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    result = _measure(arguments.datasets, arguments.repeats)
    print(json.dumps(result) if arguments.json else json.dumps(result, indent=2))


def measure(quick: bool) -> dict[str, Any]:
    """For benchmarks/retrieval.py; `quick`: the ranks alone."""
    return _measure((), 3) if quick else _measure(list(DATASETS), 5)


def _measure(datasets: Sequence[str], repeats: int) -> dict[str, Any]:
    ranks = page_rank(repeats=repeats)
    print(ranks, file=sys.stderr)
    result: dict[str, Any] = {"ratios": {"graph_vs_igraph": ranks["ratio"]}, "recall": {}, "page_rank": ranks}
    hipporag = os.environ.get("ROUTERL_HIPPORAG")
    for dataset in datasets:
        measured = retrieval(
            data_directory(), cache_directory(), dataset, pathlib.Path(hipporag) if hipporag else None, repeats
        )
        print(dataset, measured, file=sys.stderr)
        result["recall"][f"{dataset}, {measured['passages']} passages"] = measured.pop("recall")
        result[dataset] = measured
        for key in ("ratio", "ratio_given_vectors"):
            if key in measured:
                result["ratios"][f"graph_{key.replace('ratio', 'vs_hipporag')}_{dataset}"] = measured[key]
    return result


def page_rank(nodes: int = 30_000, edges: int = 150_000, repeats: int = 5, asked: int = 16) -> dict[str, Any]:
    """Queries per second of both sides on a random graph with hubs, resets as retrieval makes them; and their agreement.

    igraph is timed with `asked` queries, one call each, ours with a batch of 64, in turn; seconds of the wall and of the CPU.
    """
    import igraph
    import scipy.sparse

    from routerl_jax.knowledge.graph.pagerank import HostPageRank

    sources, targets, weights = random_graph(nodes, edges)
    reset = random_resets(nodes, BATCH)
    graph = igraph.Graph(n=nodes, edges=np.stack([sources, targets], 1).tolist(), directed=False)
    graph.es["weight"] = weights.tolist()
    half = scipy.sparse.coo_array((weights.astype(float), (sources, targets)), shape=(nodes, nodes))
    walk = HostPageRank((half + half.T).tocsr())
    columns = [column.tolist() for column in reset.T]

    def theirs() -> list[list[float]]:
        return [
            graph.personalized_pagerank(
                damping=0.5, directed=False, weights="weight", reset=column, implementation="prpack"
            )
            for column in columns[:asked]
        ]

    ours_times, their_times = _in_turn(lambda: walk(reset), theirs, repeats)
    ours, expected = walk(reset)[:, :asked], np.asarray(theirs()).T
    order = [np.argsort(-ranks, axis=0, kind="stable")[:TOP] for ranks in (ours, expected)]
    return {
        "nodes": nodes,
        "edges": edges,
        "batch": BATCH,
        "steps": walk.steps,
        "queries_per_second": BATCH / _median(ours_times, 0),
        "igraph_queries_per_second": asked / _median(their_times, 0),
        "ratio": _ratio(ours_times, their_times, 0, BATCH / asked),
        "ratio_of_cpu_seconds": _ratio(ours_times, their_times, 1, BATCH / asked),
        "largest_difference": float(np.abs(ours - expected).max()),
        "equal_top_10": float((order[0] == order[1]).all(0).mean()),
    }


def random_graph(nodes: int, edges: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ends and weights of edges; some nodes have many, as phrases like a country have."""
    rng = np.random.default_rng(0)
    popularity = 1 / np.arange(1, nodes + 1) ** 0.6
    sources = rng.integers(nodes, size=edges)
    targets = rng.permutation(nodes)[rng.choice(nodes, size=edges, p=popularity / popularity.sum())]
    return sources, targets, rng.uniform(0.8, 2, size=edges)


def random_resets(nodes: int, queries: int) -> np.ndarray:
    """Five phrases of some weight, and a small one for a quarter of the nodes, the passages."""
    rng = np.random.default_rng(1)
    reset = np.zeros((nodes, queries), np.float32)
    passages = rng.choice(nodes, nodes // 4, replace=False)
    for column in reset.T:
        column[rng.choice(nodes, 5, replace=False)] = rng.random(5)
        column[passages] += 0.05 * rng.random(len(passages))
    return reset


def retrieval(
    data: pathlib.Path, work: pathlib.Path, dataset: str, hipporag: pathlib.Path | None, repeats: int
) -> dict[str, Any]:
    """Recall@5 of graph, dense and reference on the same triples and vectors, and queries per second end to end.

    Both sides embed every query with the same encoder on the host: ours in batches, theirs one by one, and again for facts and
    for passages. With `given_vectors`, both remember the vectors of earlier queries.
    """
    from routerl_jax.knowledge.encoders import shared_encoder
    from routerl_jax.knowledge.graph.kb import GraphKB
    from routerl_jax.knowledge.store import Store
    from routerl_jax.parallel.mesh import single_device_mesh

    rows, _ = questions_and_passages(data, dataset)
    store = Store(build(data, work, dataset))
    encoder = shared_encoder("all-MiniLM-L6-v2", single_device_mesh())
    kb = GraphKB(store, encoder, cache_size=0)  # no vector of a query is remembered
    asked, gold = [row["question"] for row in rows], [row["supporting"] for row in rows]
    graph = kb.search(asked, 5)
    released = kb.with_settings(phrase_weights="released").search(asked, 5)
    scores = encoder.embed(asked, prefix=kb.fact_prefix) @ store.embeddings.read(0, len(store)).T
    ids = [passage.id for passage in store.passages.read(0, len(store))]
    dense = [[ids[index] for index in np.argsort(-row)[:5]] for row in scores]
    result: dict[str, Any] = {
        "questions": len(rows),
        "passages": len(store),
        "phrases": kb.graph.entities,
        "facts": len(kb.graph.fact_ends),
        "edges": kb.graph.adjacency.nnz // 2,
        "recall": {
            "graph": recall([[p.id for p in passages] for passages in graph], gold),
            "graph_released_weights": recall([[p.id for p in passages] for passages in released], gold),
            "dense": recall(dense, gold),
        },
    }
    if hipporag is None:
        return result
    from benchmarks.hipporag_peer import HippoRag

    with tempfile.TemporaryDirectory() as scratch:
        peer = HippoRag(hipporag, kb, pathlib.Path(scratch))
    theirs = [peer.retrieve(query, 5) for query in asked]
    result["recall"]["hipporag"] = recall([[id for id, _ in passages] for passages in theirs], gold)
    result["same_edges"] = peer.edges() == result["edges"]
    result["weight_of_edges"] = [float(kb.graph.adjacency.sum() / 2), peer.weight()]
    same = [[id for id, _ in a] == [p.id for p in b] for a, b in zip(theirs, graph)]
    clear = ~_tied(kb, asked)
    result["equal_top_5"] = {"all": float(np.mean(same)), "without_ties": float(np.mean(np.asarray(same)[clear]))}
    result["queries_without_ties"] = int(clear.sum())
    scored = [(dict(t), graph[i]) for i, t in enumerate(theirs) if clear[i]]
    differences = [abs(t[p.id] - p.score) for t, passages in scored for p in passages if p.id in t]
    result["largest_difference_without_ties"] = max(differences, default=None)
    batch = (asked * BATCH)[:BATCH]
    few = batch[: BATCH // 8]
    remembering = GraphKB(store, encoder)
    for key, search, reembed in (("", kb.search, True), ("_given_vectors", remembering.search, False)):
        ours_times, their_times = _in_turn(
            lambda search=search: search(batch, 5),
            lambda reembed=reembed: [peer.retrieve(query, 5, reembed=reembed) for query in few],
            repeats,
        )
        result[f"queries_per_second{key}"] = BATCH / _median(ours_times, 0)
        result[f"hipporag_queries_per_second{key}"] = len(few) / _median(their_times, 0)
        result[f"ratio{key}"] = _ratio(ours_times, their_times, 0, BATCH / len(few))
        result[f"ratio_of_cpu_seconds{key}"] = _ratio(ours_times, their_times, 1, BATCH / len(few))
    return result


def _tied(kb: Any, queries: Sequence[str]) -> np.ndarray:
    """Queries of which phrases of equal weight compete for the last place: the reference takes any, by the order of a set."""
    from routerl_jax.knowledge.graph.kb import phrase_weights

    tied = []
    for facts in kb.link(queries):
        rows, scores = zip(*facts)
        ends = kb.graph.fact_ends[list(rows)]
        weights = list(phrase_weights(ends, scores, kb.graph.passages_of, keep=2 * len(rows)).values())
        limit = kb.settings.link_phrases
        tied.append(len(weights) > limit and abs(weights[limit] - weights[limit - 1]) <= 1e-6 * weights[limit - 1])
    return np.asarray(tied)


def recall(results: Sequence[Sequence[str]], gold: Sequence[Sequence[str]]) -> float:
    """Mean share of the gold passages that are found."""
    return float(np.mean([len(set(ids) & set(wanted)) / len(set(wanted)) for ids, wanted in zip(results, gold)]))


def _in_turn(
    ours: Callable[[], Any], theirs: Callable[[], Any], repeats: int
) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """(wall, CPU) seconds of each, A B A B ..., after one warm-up run of each."""
    seconds: tuple[list[tuple[float, float]], list[tuple[float, float]]] = ([], [])
    for _ in range(repeats + 1):
        for function, times in zip((ours, theirs), seconds):
            wall, cpu = time.perf_counter(), time.process_time()
            function()
            times.append((time.perf_counter() - wall, time.process_time() - cpu))
    return seconds[0][1:], seconds[1][1:]


def _median(times: Sequence[tuple[float, float]], which: int) -> float:
    return statistics.median(pair[which] for pair in times)


def _ratio(
    ours: Sequence[tuple[float, float]], theirs: Sequence[tuple[float, float]], which: int, work: float
) -> float:
    """Median of the pairs' ratios of speed, where ours does `work` times as many queries."""
    return statistics.median(work * b[which] / a[which] for a, b in zip(ours, theirs))


if __name__ == "__main__":
    main()
