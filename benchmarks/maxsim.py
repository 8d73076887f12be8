"""MaxSim over page images beside torch: exact scores of all pages, and retrieval in two stages, on real ColQwen2 vectors.

    python -m benchmarks.maxsim --vectors=colqwen_vectors.npz [--pages 2000] [--queries 32] [--repeats 3] [--json]

The vectors of 39 real pages (731 or 779 of 128 each, bfloat16) are tiled to so many pages; each copy is shifted by noise of a
tenth of its length and rounded to bfloat16 again, or pages would tie. A query is 12 to 29 neighbouring vectors of a page, with
noise too. Peers, all written here, on two threads, results checked against ours:

  loop        one matrix product per query and page, float32
  padded      what colpali-engine's score_multi_vector does (colpali_engine/utils/processing_utils.py): queries and pages in
              batches, each padded to its longest, one einsum, a maximum, a sum; float32, batches of 128
  padded bf16 the same in bfloat16 with batches of 256, as VRAG-RL's engine calls it (search_engine/search_engine.py)

`maxsim_vs_torch` is exact search beside the loop. Recall is of the ten best pages by exact MaxSim. Seconds are those of the
clock, and those that all cores worked ("cpu"), which say more on a machine that does other things too.
"""

from __future__ import annotations

from routerl_jax.parallel.platform import tune_process

if __name__ == "__main__":
    tune_process()

import argparse
import json
import pathlib
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import ml_dtypes
import numpy as np

_NOISE = 0.1
_K = 10


def main() -> None:
    import torch

    from routerl_jax.knowledge.pages.maxsim import MaxSim
    from routerl_jax.parallel.platform import split_cpu

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vectors", required=True, help=".npz: page id -> [n, 128]")
    parser.add_argument("--pages", type=int, default=2000)
    parser.add_argument("--queries", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="one JSON object in place of tables")
    arguments = parser.parse_args()
    split_cpu(2)
    torch.set_num_threads(2)
    pages, queries = corpus(pathlib.Path(arguments.vectors), arguments.pages, arguments.queries)
    scorer = MaxSim(pages)
    plain = [torch.from_numpy(page.astype(np.float32)) for page in pages]
    short = [page.bfloat16() for page in plain]
    results: dict[str, Any] = {}
    for name, asked in (("batch", queries), ("single", queries[:1])):
        wide = [torch.from_numpy(query) for query in asked]
        narrow = [query.bfloat16() for query in wide]
        sides: dict[str, Callable[[], Any]] = {
            "ours": lambda asked=asked: scorer.scores(asked),
            "loop": lambda wide=wide: loop(wide, plain),
            "padded": lambda wide=wide: padded(wide, plain, 128),
            "padded bf16": lambda narrow=narrow: padded(narrow, short, 256),
        }
        results[name] = measure(sides, arguments.repeats)
        expected = np.asarray(sides["loop"]())
        results[name]["largest difference"] = float(np.abs(sides["ours"]() - expected).max())
    with tempfile.TemporaryDirectory() as directory:
        results["two stages"] = two_stages(pathlib.Path(directory), pages, queries, scorer, arguments.repeats)
    ratio = {
        f"maxsim_{name}_vs_torch_{peer.replace(' ', '_')}{clock.replace(', ', '_')}": results[name][f"{peer}{clock}"]
        / results[name][f"ours{clock}"]
        for name in ("batch", "single")
        for peer in ("loop", "padded", "padded bf16")
        for clock in ("", ", cpu")
    }
    report = {
        "ratios": {"maxsim_vs_torch": ratio["maxsim_batch_vs_torch_loop"], **ratio},
        "recall": {"two_stages_at_10": results["two stages"]["recall"]},
        "pages": len(pages),
        "page_vectors": sum(map(len, pages)),
        "queries": len(queries),
        "query_vectors": sum(map(len, queries)),
        "seconds": results,
        "hardware": hardware(),
    }
    print(json.dumps(report) if arguments.json else table(report))


def corpus(path: pathlib.Path, count: int, asked: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """(pages in bfloat16, queries in float32 that bfloat16 holds)."""
    rng = np.random.default_rng(0)
    with np.load(path) as file:
        real = [file[name].astype(np.float32) for name in file.files]

    def near(vectors: np.ndarray) -> np.ndarray:
        noise = rng.normal(size=vectors.shape).astype(np.float32)
        moved = vectors + _NOISE * noise / np.linalg.norm(noise, axis=1, keepdims=True)
        return (moved / np.linalg.norm(moved, axis=1, keepdims=True)).astype(ml_dtypes.bfloat16)

    pages = [near(real[i % len(real)]) for i in range(count)]
    queries = []
    for _ in range(asked):
        page, start, length = rng.integers(count), rng.integers(0, 600), rng.integers(12, 30)
        queries.append(near(pages[page][start : start + length].astype(np.float32)).astype(np.float32))
    return pages, queries


def loop(queries: list[Any], pages: list[Any]) -> Any:
    """One matrix product per query and page."""
    import torch

    return torch.stack([torch.stack([(query @ page.T).amax(1).sum() for page in pages]) for query in queries])


def padded(queries: list[Any], pages: list[Any], batch: int) -> Any:
    """Batches of queries and of pages, each padded to its longest."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    rows = []
    for i in range(0, len(queries), batch):
        asked = pad_sequence(queries[i : i + batch], batch_first=True)
        row = []
        for j in range(0, len(pages), batch):
            shown = pad_sequence(pages[j : j + batch], batch_first=True)
            row.append(torch.einsum("bnd,csd->bcns", asked, shown).amax(3).sum(2))
        rows.append(torch.cat(row, 1))
    return torch.cat(rows).float()


def two_stages(
    directory: pathlib.Path, pages: list[np.ndarray], queries: list[np.ndarray], scorer: Any, repeats: int
) -> dict[str, Any]:
    """A first stage over pooled vectors, candidates from disk: seconds of a batch and of one query, and recall."""
    from routerl_jax.knowledge.index import ScannIndex
    from routerl_jax.knowledge.pages.index import FirstStage, PageIndex
    from routerl_jax.knowledge.pages.pooling import pool
    from routerl_jax.knowledge.pages.ragged import Ragged, RaggedWriter

    started = time.perf_counter()
    progress = directory / "progress"
    progress.mkdir()
    sets: list[tuple[str, Any, Callable[[int, int], list[np.ndarray]]]] = [
        ("vectors", "bfloat16", lambda start, stop: [page.astype(np.float32) for page in pages[start:stop]]),
        ("pooled", "float32", lambda start, stop: [pool(page.astype(np.float32), 32) for page in pages[start:stop]]),
    ]
    made: list[Ragged] = []
    for name, precision, make in sets:
        options: Any = {"width": pages[0].shape[1], "precision": precision, "count": len(pages), "step": 256}
        RaggedWriter(directory, progress, name, **options).write(make)
        made.append(Ragged(directory / name, precision, memory_limit=2**28, hint=""))
    vectors, pooled = made
    first = FirstStage(ScannIndex.build(pooled.values, {}), pooled.owner(), depth=256, candidates=64)
    index = PageIndex(vectors, first)
    seconds = time.perf_counter() - started
    scores = scorer.scores(queries)
    best = [set(np.argsort(-row)[:_K].tolist()) for row in scores]
    found = [set(rows.tolist()) for rows, _ in index.search(queries, _K)]
    times = measure(
        {"batch": lambda: index.search(queries, _K), "single": lambda: index.search(queries[:1], _K)}, repeats
    )
    shared = [len(one & other) / _K for one, other in zip(best, found)]
    return {**times, "recall": float(np.mean(shared)), "build": seconds, "candidates": first.candidates}


def measure(sides: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median seconds of each by the clock, and under "NAME, cpu" on all cores, in turn (A B C A B C ..), after a warm-up."""
    times: dict[str, list[float]] = {f"{name}{clock}": [] for name in sides for clock in ("", ", cpu")}
    for _ in range(repeats + 1):
        for name, side in sides.items():
            started = time.perf_counter(), time.process_time()
            side()
            times[name].append(time.perf_counter() - started[0])
            times[f"{name}, cpu"].append(time.process_time() - started[1])
    return {name: statistics.median(one[1:]) for name, one in times.items()}


def hardware() -> str:
    """One line about the machine."""
    import torch

    return (
        f"{platform.machine()} CPU, {torch.get_num_threads()} torch threads, {len(jax.devices())} JAX devices; "
        f"jax {jax.__version__}, torch {torch.__version__}"
    )


def table(report: dict[str, Any]) -> str:
    """The report to be read."""
    seconds, stages = report["seconds"], report["seconds"]["two stages"]
    lines = [
        report["hardware"],
        f"{report['pages']:,} pages of {report['page_vectors']:,} vectors; {report['queries']} queries of "
        f"{report['query_vectors']} vectors",
        "| seconds | ours, exact | torch loop | torch padded | torch padded bf16 | ours, two stages |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, label in (("batch", f"{report['queries']} queries"), ("single", "1 query")):
        for clock in ("", ", cpu"):
            row = [seconds[name][f"{side}{clock}"] for side in ("ours", "loop", "padded", "padded bf16")]
            shown = [f"{row[0]:.3f}", *(f"{one:.3f} ({one / row[0]:.1f}x)" for one in row[1:])]
            lines.append(f"| {label}{clock} | {' | '.join(shown)} | {stages[f'{name}{clock}']:.3f} |")
    differences = max(seconds[name]["largest difference"] for name in ("batch", "single"))
    lines.append(
        f"recall@10 of two stages {report['recall']['two_stages_at_10']:.3f} with {stages['candidates']} candidates (built in "
        f"{stages['build']:.0f} s); largest difference of exact scores from torch's {differences:.1e}"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
